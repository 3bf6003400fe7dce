"""Whether two models are the same network but for the values of their tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_WITHOUT_EFFECT = frozenset({"training", "fused_attn", "grad_checkpointing", "grid_size", "token_grid"})
"""Attributes that change neither what a model computes nor how it is trained; grids follow the last image."""


def is_same_network(model: nn.Module, twin: nn.Module) -> bool:
    """True if two models have the same modules with the same settings, and tensors of the same names and shapes."""
    return find_difference(model, twin) is None


def find_difference(model: nn.Module, twin: nn.Module) -> str | None:
    """Return the first difference between a model and its twin in words, or None if they are the same network.

    Compared are tensors by name and shape, what modules print, and their attributes that are plain values, such as
    num_heads; dropout rates are among them. Values of tensors, buffers that are not saved, and hooks are not compared.
    """
    shapes = [{name: tuple(tensor.shape) for name, tensor in m.state_dict().items()} for m in (model, twin)]
    for name in {**shapes[0], **shapes[1]}:
        own, other = (each.get(name, "missing") for each in shapes)
        if own != other:
            return f"{name} is {own}, and would be {other}"
    others = dict(twin.named_modules())
    for name, module in model.named_modules():
        if name not in others:
            return f"{name} would be missing"
        if difference := _module_difference(module, others[name]):
            return f"{name}.{difference}".removeprefix(".")
    return None if repr(model) == repr(twin) else "its modules differ in their order or number"


def _module_difference(module: nn.Module, other: nn.Module) -> str | None:
    """Return the first difference between two modules, without the modules in them, or None."""
    if type(module) is not type(other):
        return f"__class__ is {type(module).__name__}, and would be {type(other).__name__}"
    settings, others = plain_attributes(module), plain_attributes(other)
    for name, value in settings.items():
        if name in others and value != others[name]:
            return f"{name} is {value!r}, and would be {others[name]!r}"
    if module.extra_repr() != other.extra_repr():
        return f"({module.extra_repr()}) would be ({other.extra_repr()})"
    return None


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the public attributes of a module, not of the modules in it, whose values can be compared.

    Those are numbers, strings, functions by their names, and lists of them.
    """
    return {
        name: _comparable(value)
        for name, value in vars(module).items()
        if not name.startswith(("_", "isomorph_")) and name not in _WITHOUT_EFFECT and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype) or _is_function(value)


def _is_function(value: Any) -> bool:
    return isinstance(value, Callable) and hasattr(value, "__qualname__")  # type: ignore[arg-type]


def _comparable(value: Any) -> Any:
    """Return a value so that two are equal if they mean the same: lists as tuples, and functions by their names."""
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    return value.__qualname__ if _is_function(value) else value
