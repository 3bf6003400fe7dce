"""Whether a call of a model left a trace in it: a counter, a memory, a cache."""

import gc
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.operations.values import NOT_HELD, PLAIN, held_by, value_of

# Objects that nothing can change.
_CONSTANTS: tuple[type, ...] = (*PLAIN, complex, range, slice, type(Ellipsis), Enum)
# A model that refers to more objects than this is not looked through.
_MOST_OBJECTS = 200_000


def state_of(model: nn.Module) -> list[Any]:
    """Return what two states of one model have to have in common to be the same; the values of tensors are not in it.

    It names every object that the attributes of modules refer to, and never equals another if one cannot be looked
    into.

    >>> from isomorph.operations import state_of
    >>> relu = torch.nn.ReLU()
    >>> before = state_of(relu)
    >>> relu.calls = 1
    >>> state_of(relu) == before
    False
    """
    stack: list[Any] = [vars(module) for module in model.modules()]
    visited: set[int] = set()
    state: list[Any] = []
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            state.append(value_of(value))
        elif isinstance(value, _CONSTANTS):
            state.append(value)
        elif id(value) not in visited:
            visited.add(id(value))
            state.append(id(value))
            if isinstance(value, dict):
                stack += [*value.keys(), *value.values()]
            elif isinstance(value, tuple | list | set | frozenset):
                stack += value
            elif isinstance(value, FunctionType) or (
                gc.is_tracked(value) and not isinstance(value, NOT_HELD)
            ):
                stack += held_by(value)
            elif not isinstance(value, NOT_HELD):
                state.append(object())
        if len(visited) > _MOST_OBJECTS:
            state.append(object())
            break
    return state


def left_no_trace(copied: nn.Module, before: list[Any], original: nn.Module) -> bool:
    """Return True if a copy that was called is as it was before the call, with the parameters of its original."""
    if state_of(copied) != before:
        return False
    tensors = (*copied.parameters(), *copied.buffers())
    originals = (*original.parameters(), *original.buffers())
    return all(map(_are_equal, tensors, originals))


def _are_equal(tensor: Tensor, other: Tensor) -> bool:
    """True if two tensors have the same values, NaN at the same positions included."""
    if tensor.shape != other.shape or tensor.is_meta:
        return False
    if torch.equal(tensor, other):
        return True
    return tensor.is_floating_point() and torch.equal(tensor.nan_to_num(), other.nan_to_num())
