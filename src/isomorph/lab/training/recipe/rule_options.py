"""Fields of the registered rules, as options of the command line and of recipes."""

import dataclasses
import functools
import inspect
import operator
import re
import types
from collections import defaultdict
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from isomorph.surgery.rule import RULES


class RuleOption(NamedTuple):
    """A field of one rule or of several: its type with None for "not given", and its help, which names rules."""

    name: str
    type: Any
    help: str


def rule_texts() -> dict[str, str]:
    """Return the first line of the docstring of every registered rule, by name."""
    return {name: (rule.__doc__ or "").partition("\n")[0] for name, rule in RULES.items()}


def rule_options() -> dict[str, RuleOption]:
    """Return the fields of all registered rules by name; fields of one name become one option.

    Its type is any of their types, with one Literal for the choices of all; each group of rules has a help text.
    """
    types_of: dict[str, dict[Any, None]] = defaultdict(dict)
    rules_of: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for rule_name, rule in RULES.items():
        hints = get_type_hints(rule)
        texts = _field_docstrings(rule)
        for field in dataclasses.fields(rule):  # type: ignore[arg-type]
            name = field.name
            types_of[name] |= dict.fromkeys(_alternatives(hints[name]))
            rules_of[name][texts.get(name, "")].append(rule_name)
    options = {}
    for name, known in types_of.items():
        helps = [f"{', '.join(rules)}: {text}" for text, rules in rules_of[name].items()]
        options[name] = RuleOption(name, _joint_type([*known, None]), " ".join(helps))
    return options


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return get_args(hint)
    return (hint,)


def _joint_type(alternatives: list[Any]) -> Any:
    """Return a type of all alternatives, whose literals are one."""
    literals = tuple(each for each in alternatives if get_origin(each) is Literal)
    others = [each for each in alternatives if each not in literals]
    if literals:
        others.insert(0, Literal[literals])
    return functools.reduce(operator.or_, others)


def _field_docstrings(rule: type) -> dict[str, str]:
    """Return the docstring under each field of a class and its bases, on one line; empty without their source."""
    texts: dict[str, str] = {}
    for kind in rule.__mro__[-2::-1]:  # without object
        with suppress(OSError, TypeError):
            found = re.findall(
                r'^    (\w+):[^\n]*\n    """(.*?)"""',
                inspect.getsource(kind),
                re.MULTILINE | re.DOTALL,
            )
            texts |= {name: " ".join(text.split()) for name, text in found}
    return texts
