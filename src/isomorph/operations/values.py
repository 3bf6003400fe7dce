"""Values of a call: tensors at a version, and the tensors that any object holds."""

import gc
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# The identity and the version of a tensor: an operation in place makes a new value.
Value = tuple[int, int]

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
    return list(_find(values, set()))


def _find(value: Any, seen: set[int]) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif gc.is_tracked(leaf) and id(leaf) not in seen and not isinstance(leaf, NOT_HELD):
            seen.add(id(leaf))
            yield from _find(held_by(leaf), seen)


def held_by(value: Any) -> list[Any]:
    """Return what an object that is not a plain container refers to."""
    if isinstance(value, Mapping):
        return list(value.values())
    held = gc.get_referents(value)
    if isinstance(value, types.FunctionType):
        return [each for each in held if each is not value.__globals__ and each is not value.__builtins__]
    return held
