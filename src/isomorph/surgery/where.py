"""The `where` argument of surgery: selects modules by globs over their names, or by a function of name and module."""

import difflib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from isomorph.layers.pyramid import Pyramid

Where = str | Sequence[str] | Callable[[str, nn.Module], bool]
"""A glob over module names, several globs, or a function (name, module) -> bool."""


def matches_where(where: Where, name: str, module: nn.Module) -> bool:
    """Return True if `where` selects the module with this name."""
    if callable(where):
        return bool(where(name, module))
    globs = [where] if isinstance(where, str) else where
    return any(fnmatchcase(name, glob) for glob in globs)


def describe_where(where: Where) -> str:
    """Return a description of `where` for an error message."""
    return f"the predicate {getattr(where, '__name__', where)}" if callable(where) else f"where={where!r}"


def nearest_names(where: Where, names: Sequence[str]) -> str:
    """Return a hint for an error message: the module names closest to a `where` that selects nothing, or ""."""
    globs = [where] if isinstance(where, str) else [] if callable(where) else list(where)
    close = [name for glob in globs for name in difflib.get_close_matches(glob, names, n=3, cutoff=0.4)]
    return f"; nearest names: {', '.join(dict.fromkeys(close))}" if close else ""


def list_names(names: Sequence[str]) -> str:
    """Return at most three names in a row, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def selectable_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules by all their names, except those inside a pyramid, which reads the weights of its layers."""
    named = list(model.named_modules(remove_duplicate=False))
    inside = tuple(f"{name}." if name else "" for name, module in named if isinstance(module, Pyramid))
    return [(name, module) for name, module in named if isinstance(module, Pyramid) or not name.startswith(inside)]
