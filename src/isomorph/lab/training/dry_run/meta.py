"""Operations on the meta device whose results are remembered, so that equal layers are computed once."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Shape, strides and type of a tensor of the meta device, which are all there is to know of it.
Outline = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
# Operations that return a view without saying so.
_UNMARKED_VIEWS = ("aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh")


class RememberOutlines(TorchDispatchMode):
    """Return new tensors of the known outlines where an operation is repeated on inputs of the same outlines.

    PyTorch computes most outlines on the meta device in Python, in milliseconds. Operations that
    write into their first argument and return it keep its outline; others that change an input, or return a view of
    one, are not remembered.
    """

    known: ClassVar[dict[Any, "_Results"]] = {}
    """Shared by all dry runs of a process."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        key = _key(operation, args, kwargs)
        if key is None:
            return operation(*args, **kwargs)
        if key in self.known:
            return args[0] if _writes_first(operation) else self.known[key].tensors()
        output = operation(*args, **kwargs)
        results = _results(output)
        if results is not None:
            self.known[key] = results
        return output


@dataclass(frozen=True)
class _Results:
    outlines: list[Outline | None]
    single: bool

    def tensors(self) -> Any:
        """Return new tensors of these outlines, as the operation returns them."""
        made = tuple(_empty(outline) for outline in self.outlines)
        return made[0] if self.single else made


def _empty(outline: Outline | None) -> Tensor | None:
    if outline is None:
        return None
    size, stride, dtype = outline
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _key(operation: Any, args: Any, kwargs: Any) -> Any:
    """Return what decides the outlines of an operation's results, or None if they are not remembered."""
    if not _makes_tensors(operation) and not (args and _writes_first(operation)):
        return None
    parts = [_part(value) for value in (*args, *kwargs.items())]
    if None in parts:
        return None
    return (operation, *parts)


@functools.cache
def _makes_tensors(operation: Any) -> bool:
    """True if an operation changes none of its inputs, and returns a view of none."""
    schema = operation._schema
    if schema.is_mutable or any(output.alias_info for output in schema.returns):
        return False
    return schema.name not in _UNMARKED_VIEWS


@functools.cache
def _writes_first(operation: Any) -> bool:
    """True if an operation writes into its first argument, which keeps its outline, and returns it."""
    if torch.Tag.inplace_view in operation.tags or len(operation._schema.returns) != 1:
        return False
    return torch.Tag.inplace in operation.tags


def _part(value: Any) -> Any:
    """Return a hashable part of a key, or None for a tensor that is on another device."""
    if isinstance(value, Tensor):
        return _outline(value) if value.is_meta else None
    if isinstance(value, list | tuple):
        parts = tuple(map(_part, value))
        return None if None in parts else parts
    return (type(value), value)


def _outline(tensor: Tensor) -> Outline:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _results(output: Any) -> _Results | None:
    """Return the outlines of one or several tensors; None where there is anything else."""
    single = isinstance(output, Tensor)
    outputs = (output,) if single else output
    if not isinstance(outputs, tuple):
        return None
    outlines: list[Outline | None] = []
    for value in outputs:
        if value is None:
            outlines.append(None)
        elif isinstance(value, Tensor) and value.is_meta:
            outlines.append(_outline(value))
        else:
            return None
    return _Results(outlines, single)
