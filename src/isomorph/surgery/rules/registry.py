"""The rules by name, and their fields as options of the command line and of recipes.

A rule's dataclass fields are the only place where its options stand. `register_rule` adds a rule; rules of installed
packages are found by their entry point in the group `isomorph.rules`.
"""

import ast
import dataclasses
import inspect
import textwrap
import types
import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from isomorph.errors import UserError
from isomorph.surgery.recast import Rule

ENTRY_POINTS = "isomorph.rules"
"""Group of the entry points by which other packages offer rules."""

RULES: dict[str, type[Rule]] = {}
"""Rules by the name of their class, in order of registration."""

RuleType = TypeVar("RuleType", bound=type[Rule])


class RuleOption(NamedTuple):
    """A field of one rule or of several: its type with None for "not given", its help, and the rules that have it."""

    name: str
    type: Any
    help: str
    rules: tuple[str, ...]

    @property
    def kinds(self) -> list[Any]:
        """The types that the command line parses: all but None and mappings."""
        return [kind for kind in get_args(self.type) if kind is not type(None) and get_origin(kind) is not Mapping]


def register_rule(rule: RuleType) -> RuleType:
    """Add a rule to those that recipes, checkpoints and the command line know by name; a class decorator.

    An installed package offers a rule with an entry point in the group `isomorph.rules`.

    Raises: UserError if it is not a frozen dataclass with `atol`, `accepts` and `build`, or its name is taken.

    >>> iso.surgery.register_rule(iso.ConvToGPSA) is iso.ConvToGPSA  # registered already: nothing changes
    True
    """
    name = getattr(rule, "__name__", str(rule))
    if not (dataclasses.is_dataclass(rule) and rule.__dataclass_params__.frozen):
        raise UserError(f"{name} is not a rule; make it a frozen dataclass")
    if missing := [part for part in ("atol", "accepts", "build") if not hasattr(rule, part)]:
        raise UserError(f"{name} is not a rule; give it {', '.join(missing)}")
    if RULES.get(name, rule) is not rule:
        raise UserError(f"a rule named {name} is registered already; choose another name")
    RULES[name] = rule
    return rule


def register_installed_rules() -> None:
    """Register the rules of installed packages, with a warning for one that cannot be loaded."""
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            register_rule(entry.load())
        except Exception as error:
            package = entry.dist.name if entry.dist else "a package"
            warnings.warn(f"cannot load the rule {entry.value} of {package}: {error}", stacklevel=2)


def build_rule(name: str, **fields: Any) -> Rule:
    """Return a rule by name with the fields that are not None.

    Raises: UserError for an unknown rule, a field that it does not have, or a value that it does not take.

    >>> iso.surgery.build_rule("ConvToGPSA", init="paper", gate=None)
    ConvToGPSA(init='paper', locality=None, gate=None, content='global', window=None)
    """
    if name not in RULES:
        close = get_close_matches(name, RULES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(RULES)}"
        raise UserError(f"{name} is not a rule; {hint}")
    given = {field: value for field, value in fields.items() if value is not None}
    known = [field.name for field in dataclasses.fields(RULES[name])]  # type: ignore[arg-type]
    for field in given:
        if field not in known:
            raise UserError(f"{name} has no {field}; it has {', '.join(known)}")
    return RULES[name](**given)


def rule_texts() -> dict[str, str]:
    """Return the first line of the docstring of every registered rule, by name."""
    return {name: (rule.__doc__ or "").partition("\n")[0] for name, rule in RULES.items()}


def rule_options() -> dict[str, RuleOption]:
    """Return the fields of all registered rules by name; fields of one name become one option."""
    found: dict[str, list[RuleOption]] = {}
    for rule_name, rule in RULES.items():
        types_, texts = get_type_hints(rule), _field_docstrings(rule)
        for field in dataclasses.fields(rule):  # type: ignore[arg-type]
            option = RuleOption(field.name, types_[field.name] | None, texts.get(field.name, ""), (rule_name,))
            found.setdefault(field.name, []).append(option)
    return {name: _merge(options) for name, options in found.items()}


def _merge(options: list[RuleOption]) -> RuleOption:
    """Return one option for fields of one name: any of their types, and a help text for each group of rules."""
    rules_of: dict[str, list[str]] = {}
    for option in options:
        rules_of.setdefault(option.help, []).append(option.rules[0])
    texts = [f"{', '.join(rules)}: {text}" for text, rules in rules_of.items()]
    kinds = _alternatives([option.type for option in options])
    return RuleOption(options[0].name, kinds, " ".join(texts), tuple(option.rules[0] for option in options))


def _alternatives(kinds: list[Any]) -> Any:
    """Return the union of types, with one Literal for the choices of all."""
    parts = [part for kind in kinds for part in (get_args(kind) if _is_union(kind) else (kind,))]
    choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    others = [part for part in parts if get_origin(part) is not Literal]
    if choices:
        others.insert(0, Literal[tuple(dict.fromkeys(choices))])
    return Union[tuple(dict.fromkeys(others))]  # noqa: UP007  (built at run time)


def _is_union(kind: Any) -> bool:
    """True for `A | B`, however it is written."""
    return get_origin(kind) in (Union, types.UnionType)


@cache
def _field_docstrings(rule: type) -> dict[str, str]:
    """Return the docstring under each field of a class, on one line; empty if its source is not at hand."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(rule))).body[0]
    except (OSError, TypeError):
        return {}
    assert isinstance(body, ast.ClassDef)
    pairs = zip(body.body, body.body[1:], strict=False)
    texts = {ast.unparse(field.target): text.value for field, text in pairs if _is_documented(field, text)}  # type: ignore[attr-defined]
    return {name: " ".join(str(text.value).split()) for name, text in texts.items()}


def _is_documented(field: ast.stmt, text: ast.stmt) -> bool:
    """True for an annotated name that a string follows."""
    is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    return isinstance(field, ast.AnnAssign) and is_text
