"""Values of a call: tensors at a version, and the tensors that any object holds."""

import gc
import types
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# The identity and the version of a tensor: an operation in place makes a new value.
Value = tuple[int, int]

# Values that hold no tensors, and are met too often to look into.
_PLAIN = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        str,
        bytes,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
# What an object refers to without holding its tensors.
NOT_HELD = (nn.Module, type, types.ModuleType, types.CodeType, types.BuiltinFunctionType)


def value_of(tensor: Tensor) -> Value:
    """Return the value that a tensor holds now; an inference tensor has no version."""
    version = 0 if tensor.is_inference() else tensor._version
    return id(tensor), version


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors that values hold, in order, however an object keeps them.

    In containers, attributes, slots, closures, partial functions, generators; not in modules that an object refers to.

    >>> from functools import partial
    >>> from isomorph.operations import tensors_in
    >>> x, y = torch.zeros(1), torch.ones(1)
    >>> [float(z) for z in tensors_in({"of": [x, lambda: y]}, partial(print, x))]
    [0.0, 1.0, 0.0]
    """
    found: list[Tensor] = []
    _add_tensors(values, found, set())
    return found


def _add_tensors(values: Iterable[Any], found: list[Tensor], seen: set[int]) -> None:
    for leaf in leaves_in(values):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif gc.is_tracked(leaf) and id(leaf) not in seen and not isinstance(leaf, NOT_HELD):
            seen.add(id(leaf))
            _add_tensors(held_by(leaf), found, seen)


def leaves_in(values: Iterable[Any]) -> list[Any]:
    """Return what values and the containers among them hold, in order, without numbers, strings and None.

    >>> from isomorph.operations.values import leaves_in
    >>> x = torch.zeros(1)
    >>> leaves_in([x, (1, "same", [x, None])]) == [x, x]
    True
    """
    leaves: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is tuple or kind is list:
            leaves += leaves_in(value)
        elif kind is dict or kind is OrderedDict:
            if value:
                leaves += leaves_in(value.values())
        elif isinstance(value, Tensor):
            leaves.append(value)
        else:  # torch knows further containers
            leaves += [leaf for leaf in tree_leaves(value) if type(leaf) not in _PLAIN]
    return leaves


def held_by(value: Any) -> list[Any]:
    """Return what an object that is not a plain container refers to."""
    if isinstance(value, Mapping):
        return list(value.values())
    held = gc.get_referents(value)
    if isinstance(value, types.FunctionType):
        shared = (value.__globals__, getattr(value, "__builtins__", None))
        return [each for each in held if not any(each is known for known in shared)]
    return held
