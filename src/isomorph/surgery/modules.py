"""Modules of a model: selected by `where`, called by their parents, tied by shared parameters.

`where` is a glob over names, several globs, or a function of name and module.

In a glob `*` is any characters, dots too. One may name a part of a joint projection: `attn.v` of `attn.qkv`.
"""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from isomorph.errors import UserError
from isomorph.surgery.site import Site

# A glob over module names, several globs, or a function (name, module) -> bool.
Where = str | Sequence[str] | Callable[[str, nn.Module], bool]


def matches_where(where: Where, name: str, module: nn.Module, inside: bool = False) -> bool:
    """Return True if `where` selects the module with this name, or with `inside` by a glob one around it.

    Raises: UserError for a module as `where`.
    """
    if isinstance(where, nn.Module):
        raise UserError(
            f"where is a {type(where).__name__}; give the name of the module, like 'layer4.0.conv2'"
        )
    if callable(where):
        return bool(where(name, module))
    for glob in [where] if isinstance(where, str) else where:
        if fnmatchcase(name, glob) or (inside and fnmatchcase(name, f"{glob}.*")):
            return True
    return False


def describe_where(where: Where, argument: str = "where") -> str:
    """Return a description of `where`, given as an argument of that name, for an error message."""
    if callable(where):
        return f"the predicate {getattr(where, '__name__', where)}"
    return f"{argument}={where!r}"


def list_names(names: Sequence[str]) -> str:
    """Return at most three names in a row, and the number of the others."""
    shown = ", ".join(names[:3])
    if len(names) > 3:
        shown += f" and {len(names) - 3} more"
    return shown


def lies_within(path: str, names: Collection[str]) -> bool:
    """Return True for the name of one of some modules, or of a module inside one."""
    while path not in names:
        if not path:
            return False
        path = path.rpartition(".")[0]
    return True


def nearest_names(where: Where, names: Iterable[str]) -> str:
    """Return a hint: the names closest to a `where` that selects nothing, or the first; as globs over numbers."""
    globs: Sequence[str] = ()
    if not callable(where):
        globs = [where] if isinstance(where, str) else where
    names = [name for name in names if name]
    grouped: dict[str, str] = {}  # a glob for names that differ in a number
    for name in names:
        glob = re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name)
        if not glob.strip("*."):  # it would select all
            glob = name
        grouped[glob] = glob if glob in grouped else name
    known = dict(grouped)
    if not any(set("*?[") & set(glob) for glob in globs):
        known.update(zip(names, names, strict=True))
    near: dict[str, None] = {}
    for glob in globs:
        for close in difflib.get_close_matches(glob, known, n=3, cutoff=0.4):
            near.setdefault(known[close])
    if near:
        return f"; nearest names: {', '.join(near)}"
    return f"; its layers: {list_names(list(grouped.values()))}" if grouped else ""


def outermost_modules(
    model: nn.Module, wanted: Callable[[nn.Module], bool]
) -> dict[str, nn.Module]:
    """Return the modules for which `wanted` is True and that are not inside another such module, by name."""
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        around = tuple(f"{outer}.".removeprefix(".") for outer in outermost)
        if not name.startswith(around) and wanted(module):
            outermost[name] = module
    return outermost


def call_from_parents(site: Site) -> None:
    """Turn off the fast paths of torch's encoders around a replaced module, whose weights they read without a call."""
    path = site.path
    while path:
        path = path.rpartition(".")[0]
        around: Any = site.model.get_submodule(path)
        if isinstance(around, nn.TransformerEncoderLayer):
            around.activation_relu_or_gelu = 0
        elif isinstance(around, nn.TransformerEncoder):
            around.use_nested_tensor = False


# Attribute of timm's attention with biases outside of its qkv: True to call the qkv, False to read its weight.
SEPARATE_BIAS = "qkv_bias_separate"


def call_joint_projection(site: Site) -> None:
    """Make timm's attention with separate biases (BEiT, EVA, Swin V2) call its qkv if that was replaced."""
    if (
        hasattr(site.parent, SEPARATE_BIAS)
        and type(getattr(site.parent, "qkv", None)) is not nn.Linear
    ):
        setattr(site.parent, SEPARATE_BIAS, True)


class Ties:
    """The names of each parameter that two or more modules of a model share; a module used twice counts once."""

    def __init__(self, model: nn.Module) -> None:
        names_of: dict[nn.Parameter, list[str]] = {}
        for name, parameter in _parameters_by_module(model):
            names_of.setdefault(parameter, []).append(name)
        self.groups = [names for names in names_of.values() if len(names) > 1]
        self.known = {name for names in names_of.values() for name in names}

    def restore(self, model: nn.Module) -> Iterator[str]:
        """Tie parameters again if name, shape and values are unchanged; yield a sentence for every tie that is less."""
        current = dict(_parameters_by_module(model))
        new = [name for name in current if name not in self.known]
        for names in self.groups:
            present = [name for name in names if name in current]
            tied = []
            if present:
                shared = Counter(current[name] for name in present).most_common(1)[0][0]
                tied = [name for name in present if _are_equal(current[name], shared)]
                _share(model, tied, shared)
            lost = [name for name in names if name not in tied]
            if lost:
                verb = "was" if tied and len(lost) == 1 else "were"
                partners = f" to {list_names(tied)}" if tied else ""
                yield f"{list_names(lost)} {verb} tied{partners}; they are no longer tied and train separately"
            wider = _with_new_parameters(tied, new)
            if wider:
                verb = "has" if len(wider) == 1 else "have"
                whose = f"{list_names(wider)} {verb}"
                yield f"{list_names(tied)} are still tied, but {whose} new parameters that train apart"


def _share(model: nn.Module, names: Sequence[str], parameter: nn.Parameter) -> None:
    for name in names:
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, parameter)


def _with_new_parameters(tied: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the modules of tied parameters that have new parameters too."""
    paths = dict.fromkeys(name.rpartition(".")[0] for name in tied)
    return [path for path in paths if path and any(name.startswith(f"{path}.") for name in new)]


def _parameters_by_module(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for path, module in model.named_modules():
        yield from module.named_parameters(path, recurse=False, remove_duplicate=False)


def _are_equal(a: nn.Parameter, b: nn.Parameter) -> bool:
    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return a.is_meta or torch.equal(a, b)
