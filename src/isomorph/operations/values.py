"""Values of a call: tensors at a version, and what an object consists of, as a list of tensors or by name."""

import gc
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# The identity and the version of a tensor: an operation in place makes a new value.
TensorVersion = tuple[int, int]

# Values that hold no tensors, and are met too often to look into.
PLAIN = frozenset(
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


def value_of(tensor: Tensor) -> TensorVersion:
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
    tensors: list[Tensor] = []
    _add_tensors(values, tensors, set())
    return tensors


def _add_tensors(values: Iterable[Any], tensors: list[Tensor], visited: set[int]) -> None:
    """Append the tensors that values hold, each object once."""
    for value in values:
        kind = type(value)
        if kind in PLAIN:
            continue
        if isinstance(value, tuple | list):  # also what torch.max gives, by index
            _add_tensors(value, tensors, visited)
        elif isinstance(value, Mapping):
            _add_tensors(value.values(), tensors, visited)
        elif isinstance(value, Tensor):
            tensors.append(value)
        elif gc.is_tracked(value) and id(value) not in visited and not isinstance(value, NOT_HELD):
            visited.add(id(value))
            _add_tensors(held_by(value), tensors, visited)


def held_by(value: Any) -> list[Any]:
    """Return what an object that is not a plain container refers to."""
    if isinstance(value, Mapping):
        return list(value.values())
    referents = gc.get_referents(value)
    if isinstance(value, types.FunctionType):
        shared = (value.__globals__, getattr(value, "__builtins__", None))
        return [
            referent
            for referent in referents
            if not any(referent is namespace for namespace in shared)
        ]
    return referents


def parts_of(value: Any) -> dict[str, Any] | None:
    """Return what a value consists of, by name: of a dict, list, data class or other object; None for a single one."""
    if isinstance(value, Tensor):
        return _numbered(value.unbind()) if value.is_nested else None
    if isinstance(value, Mapping):
        return {str(name): part for name, part in value.items()}
    if isinstance(value, list | tuple):
        return _numbered(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    if isinstance(value, nn.Module | type | np.ndarray | np.generic | Enum) or callable(value):
        return None
    attributes: dict[str, Any] = {}
    for kind in type(value).__mro__:
        for name in _slots(kind):
            if hasattr(value, name):
                attributes[name] = getattr(value, name)
    attributes.update(getattr(value, "__dict__", {}))
    return attributes or None


def _numbered(parts: Sequence[Any]) -> dict[str, Any]:
    return {str(number): part for number, part in enumerate(parts)}


def _slots(kind: type) -> list[str]:
    if kind.__module__ in ("builtins", "torch"):
        return []
    names = vars(kind).get("__slots__", ())
    slots = [names] if isinstance(names, str) else names
    return [name for name in slots if not name.startswith("__")]


def leaves(output: Any, path: str = "", around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield what an output consists of, by name: a tensor, or the items of dicts, lists, data classes and objects."""
    parts = parts_of(output)
    if parts is None:
        yield path, output
        return
    if id(output) in around:  # an object that holds itself
        return
    for name, part in parts.items():
        yield from leaves(part, f"{path}.{name}", (*around, id(output)))
