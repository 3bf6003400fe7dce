"""Bounds of the fields of rules, and checks of their values."""

from collections.abc import Collection, Sequence
from typing import Any

from isomorph.errors import UserError

LOCALITY = (1e-4, 1e3)
"""At 1,000 the attention to the next position is exp(-1000), 0 in float64; below 1e-4 it is nearly uniform."""

GATE = (-1e3, 1e3)
"""Bounds of the logit; beyond them the sigmoid is exactly 0 or 1 in float64."""

RATIO = (0, 64)
"""Attention maps for every head; Refiner uses up to 6."""

KERNEL = (1, 127)
"""Side of a kernel on attention maps; Refiner uses 3."""

GRID = (1, 4096)
"""Height and width of a grid of tokens."""

WINDOW = (1, 127)
"""Height and width of the window around a query."""

PREFIX = (0, 4096)
"""Number of tokens before the grid."""

RESCALE = (1e-6, 1e6)
"""N, where a sum of branches is divided by sqrt(N)."""


def check_number(name: str, value: Any, bounds: tuple[float, float]) -> None:
    """Check that a value is a number within bounds.

    Raises: UserError otherwise.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and bounds[0] <= value <= bounds[1]):
        above = number and value <= 0 < bounds[0]
        infinite = number and (value != value or abs(value) == float("inf"))
        kind = "a number " if not number else "finite, " if infinite else "above 0, " if above else ""
        raise UserError(f"{name} {_short_repr(value)} must be {kind}from {bounds[0]:g} to {bounds[1]:g}")


def check_int(name: str, value: Any, bounds: tuple[int, int], hint: str = "") -> None:
    """Check that a value is a whole number within bounds; the hint explains special values.

    Raises: UserError otherwise.
    """
    if type(value) is not int or not bounds[0] <= value <= bounds[1]:
        raise UserError(f"{name} {_short_repr(value)} must be a whole number from {bounds[0]} to {bounds[1]}{hint}")


def check_bool(name: str, value: Any) -> None:
    """Check that a value is true or false.

    Raises: UserError otherwise.
    """
    if not isinstance(value, bool):
        raise UserError(f"{name} {_short_repr(value)} must be true or false")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Check that a value is one of the choices.

    Raises: UserError otherwise.
    """
    if not isinstance(value, str) or value not in choices:
        *first, last = map(repr, choices)
        raise UserError(f"{name} {_short_repr(value)} is unknown; choose {', '.join(first)} or {last}")


def check_grid(grid_size: Any, prefix_tokens: Any) -> None:
    """Check a grid of tokens and the number of prefix tokens; None is allowed.

    Raises: UserError otherwise.
    """
    if grid_size is not None:
        if not isinstance(grid_size, Sequence) or isinstance(grid_size, str) or len(grid_size) != 2:
            raise UserError(f"grid_size {_short_repr(grid_size)} must be (height, width)")
        for name, size in zip(("height", "width"), grid_size, strict=True):
            check_int(f"grid_size {name}", size, GRID)
    if prefix_tokens is not None:
        check_int("prefix_tokens", prefix_tokens, PREFIX)


def _short_repr(value: Any) -> str:
    """Return the repr of a value in at most 40 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no whole number of more than 4,300 digits
        text = "of thousands of digits"
    return text if len(text) <= 40 else f"{text[:37]}..."
