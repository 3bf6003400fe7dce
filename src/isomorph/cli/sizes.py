"""Image sizes on the command line, written one way everywhere: 96, 96 128 or 96x128 (height, then width)."""

import re
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter, Token

from isomorph.errors import UserError

SIZE_FIELDS = ("data.size", "model.recast.grid_size")
"""Recipe fields that are sizes."""

_SIZE_OPTIONS = ("--size", "--grid-size", *(f"--{field}" for field in SIZE_FIELDS))
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?")
_SIZE = re.compile(r"[\[(]?\s*(-?\d+)\s*(?:[x, ]\s*(-?\d+)\s*)?[\])]?", re.IGNORECASE)


def parse_size(option: str, text: str) -> tuple[int, int]:
    """Return the height and width that a text such as 96, 96x128 or [96, 128] stands for.

    Raises: UserError, which names the option, for anything else.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found or max(map(len, found.groups(default=""))) > 20:
        given = text if len(text) <= 40 else f"{text[:40]}..."
        raise UserError(f"{given} is not a size; write {option} 96, or {option} 96 128 for height and width")
    height, width = found.groups()
    return int(height), int(width or height)


def only_size(sizes: Sequence[tuple[int, int]] | None) -> tuple[int, int] | None:
    """Return the size that --size gives, or None without one. Raises: UserError for several."""
    if sizes and len(sizes) > 1:
        raise UserError("--size is given several times; give one height and width")
    return sizes[0] if sizes else None


def join_sizes(tokens: Sequence[str]) -> list[str]:
    """Return a command line in which what follows an option for a size is a single argument: --size=96x128."""
    joined: list[str] = []
    rest = list(tokens)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if option not in _SIZE_OPTIONS:
            joined.append(f"{option}{equals}{value}")
            continue
        if not equals:
            numbers = next((i for i, text in enumerate(rest[:2]) if not _NUMBER.fullmatch(text)), len(rest[:2]))
            count = max(numbers, int(bool(rest) and rest[0][:1] in "[("))
            value = "x".join(rest[:count])
            del rest[:count]
        bare = "x".join(value.strip("[]() ").replace(",", " ").split())  # a list in brackets has a meaning in cyclopts
        joined.append(f"{option}={bare}" if value else option)
    return joined


def _convert_size(kind: type, tokens: Sequence[Token]) -> tuple[int, int]:
    return _convert_sizes(kind, tokens)[0]


def _convert_sizes(kind: type, tokens: Sequence[Token]) -> list[tuple[int, int]]:
    return [parse_size(token.keyword or "--size", token.value) for token in tokens]


Size = Annotated[tuple[int, int], Parameter(converter=_convert_size, n_tokens=1)]
"""Type of an option for a size."""

Sizes = Annotated[list[tuple[int, int]] | None, Parameter(converter=_convert_sizes, n_tokens=1)]
"""Type of an option for a size that may be given several times."""
