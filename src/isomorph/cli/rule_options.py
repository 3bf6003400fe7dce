"""The fields of the registered rules as options of a command, so that a rule states its options once."""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import Parameter, Token

from isomorph.errors import UserError
from isomorph.surgery.rules.registry import RULES, RuleOption, rule_options

Command = TypeVar("Command", bound=Callable[..., None])


def with_rule_options(command: Command) -> Command:
    """Let the parameters `rule` and `fields` of a command take any registered rule, and the fields of all rules.

    `fields` becomes a dataclass with one option per field, None where it is not given.
    """
    columns = [(name, _annotation(option), dataclasses.field(default=None)) for name, option in rule_options().items()]
    fields = Parameter(name="*")(dataclasses.make_dataclass("RuleFields", columns, frozen=True))
    fields.__module__ = __name__  # cyclopts takes a class of the module `types`, the default here, for a plain value
    texts = [f"{name}: {(rule.__doc__ or '').partition(chr(10))[0]}" for name, rule in RULES.items()]
    command.__annotations__["rule"] = Annotated[Literal[tuple(RULES)], Parameter(help=" ".join(texts))]
    command.__annotations__["fields"] = fields
    defaults = command.__kwdefaults__
    assert defaults is not None
    defaults["fields"] = fields()
    return command


def _annotation(option: RuleOption) -> Any:
    """Return the type of an option with its help, as cyclopts reads it."""
    kinds = [_exact(kind) for kind in typing.get_args(option.type) if typing.get_origin(kind) is not Mapping]
    return Annotated[typing.Union[tuple(kinds)], Parameter(help=option.help)]  # noqa: UP007


def _whole_number(_: type, tokens: Sequence[Token]) -> int:
    """Return a whole number as it was typed. Raises: UserError for a fraction, which cyclopts would round."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise UserError(f"{tokens[0].keyword} {tokens[0].value} must be a whole number") from None


def _exact(kind: Any) -> Any:
    """Return a type whose whole numbers, also those in a tuple, are read without rounding."""
    if kind is int:
        return Annotated[int, Parameter(converter=_whole_number)]
    return tuple[tuple(map(_exact, typing.get_args(kind)))] if typing.get_origin(kind) is tuple else kind  # type: ignore[misc]
