"""Modules of a model: selected by `where`, called by their parents or only read, tied by shared parameters.

`where` is a glob over names, several globs, or a function of name and module.

In a glob `*` is any characters, dots too. One may name a part of a joint projection: `attn.v` of `attn.qkv`.
"""

import copy
import difflib
import dis
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import nn

from isomorph.errors import UserError
from isomorph.layers.pyramid.base import Pyramid
from isomorph.surgery.site import Site

# A glob over module names, several globs, or a function (name, module) -> bool.
Where = str | Sequence[str] | Callable[[str, nn.Module], bool]


def matches_where(where: Where, name: str, module: nn.Module) -> bool:
    """Return True if `where` selects the module with this name. Raises: UserError for a module as `where`."""
    if isinstance(where, nn.Module):
        raise UserError(
            f"where is a {type(where).__name__}; give the name of the module, like 'layer4.0.conv2'"
        )
    if callable(where):
        return bool(where(name, module))
    globs = [where] if isinstance(where, str) else where
    return any(fnmatchcase(name, glob) for glob in globs)


def is_excluded(exclude: Where, name: str, module: nn.Module) -> bool:
    """Return True if `exclude` selects a module, or by a glob one around it."""
    if matches_where(exclude, name, module):
        return True
    return any(fnmatchcase(name, f"{glob}.*") for glob in _globs_of(exclude))


def _globs_of(where: Where) -> list[str]:
    """Return the globs of a `where`, none of a function."""
    if callable(where):
        return []
    return [where] if isinstance(where, str) else list(where)


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


def nearest_names(where: Where, names: Iterable[str]) -> str:
    """Return a hint: the names closest to a `where` that selects nothing, or the first; as globs over numbers."""
    globs = _globs_of(where)
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


@torch.no_grad()
def acts_alike_in_both_modes(module: nn.Module) -> bool:
    """Return True for a layer without children, parameters and buffers that gives the same in train and eval mode."""
    if module._modules or module._parameters or module._buffers:
        return False
    outputs: list[Any] = []
    for mode in (True, False):
        layer = copy.copy(module)
        layer.__dict__["training"] = mode
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                outputs.append(layer(torch.randn(32, 32, 8, 8)))
            except Exception:  # of a layer that reads something else than a map
                return False
    first, second = outputs
    return (
        isinstance(first, torch.Tensor)
        and isinstance(second, torch.Tensor)
        and torch.equal(first, second)
    )


def selectable_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules by all their names, except those inside a pyramid, which reads the weights of its layers."""
    named = list(model.named_modules(remove_duplicate=False))
    inside = tuple(_beginning(name) for name, module in named if isinstance(module, Pyramid))
    return [
        (name, module)
        for name, module in named
        if isinstance(module, Pyramid) or not name.startswith(inside)
    ]


def _beginning(path: str) -> str:
    """Return how the names of the modules inside a module begin."""
    return f"{path}." if path else ""


def outermost_modules(
    model: nn.Module, wanted: Callable[[nn.Module], bool]
) -> dict[str, nn.Module]:
    """Return the modules for which `wanted` is True and that are not inside another such module, by name."""
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = name.startswith(tuple(map(_beginning, outermost)))
        if not inside and wanted(module):
            outermost[name] = module
    return outermost


# What code reads of a weight besides its values.
_FORMS = {"dtype", "device", "shape", "size", "ndim", "dim", "is_meta", "requires_grad", "numel"}


def functions_of(kind: type) -> Iterator[Any]:
    """Yield the forward of a class, and the methods and functions of its module that it uses."""
    waiting: list[Any] = [getattr(kind, "forward", None)]
    seen = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        yield function
        for name in code.co_names:
            if inspect.isfunction(inspect.getattr_static(kind, name, None)):
                waiting.append(getattr(kind, name))
            other = function.__globals__.get(name)
            if inspect.isfunction(other) and other.__module__ == function.__module__:
                waiting.append(other)


def why_not_called(site: Site) -> str | None:
    """Return that the parents of a layer read its weight and never call it, or None."""
    if not site.name:
        return None
    path = site.path.split(".")
    found = None
    for depth in range(1, len(path) + 1):
        parent = site.model.get_submodule(".".join(path[:-depth]))
        reads, uses = _uses(type(parent), tuple(path[-depth:]))  # type: ignore[arg-type]
        if uses:
            return None
        if reads and found is None:
            found = f"{type(parent).__name__} reads its weight without calling it"
    return found


@cache
def _uses(kind: type, path: tuple[str, ...]) -> tuple[bool, bool]:
    """Return whether the forward of a class reads the weight of a module inside, and whether it uses it otherwise.

    The code of the class is read, as recasting needs no input with which the model could be called.
    """
    reads = False
    uses = False
    for function in functions_of(kind):
        names = _attributes_in_turn(function)
        for start in range(len(names) - len(path)):
            if tuple(names[start : start + len(path)]) != path:
                continue
            after = names[start + len(path)]
            form = names[start + len(path) + 1] if after else None
            reads |= after == "weight" and form not in _FORMS
            uses |= after is None
    return reads, uses


def _attributes_in_turn(function: Any) -> list[str | None]:
    """Return the attributes that a function reads, step by step of its code; None for a step of another kind."""
    names: list[str | None] = [None]
    for step in dis.get_instructions(function):
        names.append(step.argval if step.opname in ("LOAD_ATTR", "LOAD_METHOD") else None)
    return [*names, None, None]


def make_parents_call(model: nn.Module, names: Iterable[str]) -> None:
    """Turn off the fast paths of torch's encoders around replaced modules, whose weights they read without a call."""
    parents: set[str] = set()
    for name in names:
        parent = name
        while parent:
            parent = parent.rpartition(".")[0]
            parents.add(parent)
    for path, module in model.named_modules():
        if path not in parents:
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


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
