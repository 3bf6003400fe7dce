"""The `where` argument of surgery: selects modules by globs over their names, or by a function of name and module.

In a glob `*` is any characters, dots too. One may name a part of a joint projection: `attn.v` of `attn.qkv`.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from isomorph.layers import JointPyramid
from isomorph.layers.pyramid.base import Pyramid

Where = str | Sequence[str] | Callable[[str, nn.Module], bool]
"""A glob over module names, several globs, or a function (name, module) -> bool."""


def matches_where(where: Where, name: str, module: nn.Module) -> bool:
    """Return True if `where` selects the module with this name."""
    if callable(where):
        return bool(where(name, module))
    globs = [where] if isinstance(where, str) else where
    return any(fnmatchcase(name, glob) for glob in globs)


def is_excluded(exclude: Where, name: str, module: nn.Module) -> bool:
    """Return True if `exclude` selects a module, or by a glob one around it."""
    globs = () if callable(exclude) else [exclude] if isinstance(exclude, str) else exclude
    return matches_where(exclude, name, module) or any(fnmatchcase(name, f"{glob}.*") for glob in globs)


def describe_where(where: Where) -> str:
    """Return a description of `where` for an error message."""
    return f"the predicate {getattr(where, '__name__', where)}" if callable(where) else f"where={where!r}"


def list_names(names: Sequence[str]) -> str:
    """Return at most three names in a row, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def nearest_names(where: Where, names: Iterable[str]) -> str:
    """Return a hint: the names closest to a `where` that selects nothing, or the first; as globs over numbers."""
    globs = [where] if isinstance(where, str) else [] if callable(where) else list(where)
    grouped: dict[str, str] = {}
    for name in filter(None, names):
        glob = re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name)
        glob = glob if glob.strip("*.") else name  # not *.*, which selects all
        grouped[glob] = glob if glob in grouped else name
    near = [each for glob in globs for each in difflib.get_close_matches(glob, grouped, n=3, cutoff=0.4)]
    if near:
        return f"; nearest names: {', '.join(dict.fromkeys(grouped[each] for each in near))}"
    return f"; its layers: {list_names(list(grouped.values()))}" if grouped else ""


JOINT_PARTS: Mapping[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "qk": ("q", "k"), "kv": ("k", "v")}
"""The last component of a joint projection's name, mapped to the names of its parts in order."""


@dataclass(frozen=True)
class JointPart:
    """One part of a joint projection: for example `blocks.0.attn.v`, a part of the layer `blocks.0.attn.qkv`."""

    joint: nn.Linear | JointPyramid
    joint_name: str
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parts of the layer, in order."""
        return JOINT_PARTS[self.joint_name.rpartition(".")[2]]


def joint_parts(model: nn.Module) -> dict[str, JointPart]:
    """Return the parts of every joint projection by name, except where a module already has that name."""
    named = dict(model.named_modules(remove_duplicate=False))
    parts_by_name: dict[str, JointPart] = {}
    for name, module in named.items():
        parent, _, last = name.rpartition(".")
        if last in JOINT_PARTS and isinstance(module, nn.Linear | JointPyramid):
            parts_by_name |= {
                f"{parent}.{part}".lstrip("."): JointPart(module, name, part) for part in JOINT_PARTS[last]
            }
    return {name: part for name, part in parts_by_name.items() if name not in named}


def find_target(model: nn.Module, name: str) -> nn.Module | JointPart | None:
    """Return the module or the part of a joint projection with this name, or None if there is neither."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return joint_parts(model).get(name)


def joint_candidates(name: str) -> list[str]:
    """Return the names of the joint projections that a part with this name may belong to."""
    parent, dot, last = name.rpartition(".")
    return [f"{parent}{dot}{joint}" for joint, parts in JOINT_PARTS.items() if last in parts]


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
