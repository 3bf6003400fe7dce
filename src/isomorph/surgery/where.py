"""The `where` argument of surgery: selects modules by globs over their names, or by a function of name and module."""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from isomorph.layers.pyramid import Pyramid
from isomorph.surgery.joint_projections import JointPart

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


def list_names(names: Sequence[str]) -> str:
    """Return at most three names in a row, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def nearest_names(where: Where, names: Iterable[str]) -> str:
    """Return a hint for an error message: globs of the names closest to a `where` that selects nothing, or of any.

    Names that differ in their numbers only are one glob: blocks.*.mlp.fc1. Those that contain the given glob, which
    lacks their beginning, come first. "" without names.
    """
    globs = [where] if isinstance(where, str) else [] if callable(where) else list(where)
    grouped = _group_numbered(filter(None, names))
    close: dict[str, None] = {}
    for glob in globs:
        partial = [name for name, each in grouped.items() if any(fnmatchcase(f".{n}.", f"*.{glob}.*") for n in each)]
        close |= dict.fromkeys([*partial, *difflib.get_close_matches(glob, grouped, n=3, cutoff=0.4)][:3])
    if close:
        return f"; nearest names: {', '.join(close)}"
    return f"; its layers: {list_names(list(grouped))}" if grouped else ""


def _group_numbered(names: Iterable[str]) -> dict[str, list[str]]:
    """Return names by a glob for those that differ in numbers between dots only, or by their own name."""
    groups: dict[str, list[str]] = {}
    for name in names:
        glob = re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name)
        groups.setdefault(glob if glob.strip("*.") else name, []).append(name)  # not *.*, which selects all
    return {glob if len(members) > 1 else members[0]: members for glob, members in groups.items()}


def names_of_kind(named: Sequence[tuple[str, Any]], kind: tuple[type[nn.Module], ...]) -> list[str]:
    """Return the names of the modules of a rule's kind, and of parts of joint projections."""
    return [name for name, module in named if name and isinstance(module, (*kind, JointPart))]


def selectable_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules by all their names, except those inside a pyramid, which reads the weights of its layers."""
    named = list(model.named_modules(remove_duplicate=False))
    inside = tuple(f"{name}." if name else "" for name, module in named if isinstance(module, Pyramid))
    return [(name, module) for name, module in named if isinstance(module, Pyramid) or not name.startswith(inside)]


def outermost_modules(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """Return the modules for which `wanted` is True and that are not inside another such module, by name."""
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in outermost)
        if not inside and wanted(module):
            outermost[name] = module
    return outermost
