"""The fields of the registered rules as options of a command, so that a rule states its options once.

Those of isomorph's own rules are read from tables.json. If an installed package offers rules, all are read from the
registry, which imports torch.
"""

import dataclasses
import typing
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import Parameter

from isomorph.cli.app import loading
from isomorph.cli.options import WholeNumber
from isomorph.cli.sizes import Size
from isomorph.cli.tables import tables

Command = TypeVar("Command", bound=Callable[..., None])


def with_rule_options(command: Command) -> Command:
    """Let the parameters `rule` and `fields` of a command take any registered rule, and the fields of all rules.

    `fields` becomes a dataclass with one option per field, None where it is not given.
    """
    rules, options = _known_rules()
    columns = [
        (
            name,
            Annotated[typing.Union[(*map(_exact, kinds), None)], Parameter(help=text)],
            dataclasses.field(default=None),
        )
        for name, kinds, text in options
    ]
    fields = Parameter(name="*")(dataclasses.make_dataclass("RuleFields", columns, frozen=True))
    fields.__module__ = __name__  # cyclopts takes a class of the module `types`, the default here, for a plain value
    texts = [f"{name}: {text}" for name, text in rules.items()]
    command.__annotations__["rule"] = Annotated[Literal[tuple(rules)], Parameter(help=" ".join(texts))]
    command.__annotations__["fields"] = fields
    defaults = command.__kwdefaults__
    assert defaults is not None
    defaults["fields"] = fields()
    return command


def _known_rules() -> tuple[dict[str, str], list[tuple[str, list[Any], str]]]:
    """Return the first line of each rule's docstring by name; and the name, types and help of every option."""
    if not entry_points(group="isomorph.rules"):
        rows = tables()["rule_options"]
        return tables()["rules"], [(row["name"], _types(row), row["help"]) for row in rows]
    with loading():
        from isomorph.surgery.rule import rule_options, rule_texts
    return rule_texts(), [(option.name, option.kinds, option.help) for option in rule_options().values()]


def _types(row: dict[str, Any]) -> list[Any]:
    """Return the types of an option in tables.json."""
    kinds = [Literal[tuple(row["choices"])]] if row["choices"] else []
    return kinds + [_TYPES[name] for name in row["types"]]


_TYPES = {"bool": bool, "float": float, "int": int, "str": str, "tuple[int, int]": tuple[int, int]}
"""Types of the fields of isomorph's rules, by name."""

_EXACT = {int: WholeNumber, tuple[int, int]: Size}
"""Types that are parsed without rounding, and sizes as in every command."""


def _exact(kind: Any) -> Any:
    """Return a type as cyclopts should parse it."""
    return _EXACT.get(kind, kind)
