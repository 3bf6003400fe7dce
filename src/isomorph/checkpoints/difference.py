"""The first difference between two networks, but for the values of their tensors."""

import re
from typing import Any

import torch
from torch import nn

from isomorph.surgery.plain_layers import describe_attachments, has_same_attachments

# Attributes that change neither what a model computes nor how it is trained; grids follow the last image, and timm's
# Swin aims at a shift for images to come.
_WITHOUT_EFFECT = frozenset(
    {"training", "fused_attn", "grad_checkpointing", "grid_size", "token_grid", "target_shift_size"}
)
_OTHER = object()
# What `nn.SyncBatchNorm.convert_sync_batchnorm` replaces; it is called again where several processes train.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def find_difference(model: nn.Module, twin: nn.Module) -> str | None:
    """Return the first difference between a model and its twin in words, or None if they are the same network.

    Compared are tensors by name and shape, which parameters are tied, what modules print, and their plain attributes,
    dropout rates among them.
    """
    shapes = _shapes_of(model)
    other_shapes = _shapes_of(twin)
    for name in {**shapes, **other_shapes}:
        shape = shapes.get(name, "missing")
        other_shape = other_shapes.get(name, "missing")
        if shape != other_shape:
            return f"{name} is {shape}, and would be {other_shape}"
    tie = _lost_tie(model, twin)
    if tie is not None:
        return tie
    others = dict(twin.named_modules())
    for name, module in model.named_modules():
        if name not in others:
            return f"{name} would be missing"
        other = others[name]
        difference = _module_difference(module, other)
        if difference is not None:
            return f"{name}.{difference}".removeprefix(".")
        if not has_same_attachments(other, module):
            own = describe_attachments(module) or "no hooks"
            return f"{name or 'the model'} has {own}, and would have {describe_attachments(other) or 'none'}"
    return None if _text(model) == _text(twin) else "its modules differ in their order or number"


def _text(model: nn.Module) -> str:
    """Return what a model prints, with one name for batch norms of all kinds."""
    return re.sub(r"(?:Sync|\b)BatchNorm(?:[123]d)?\(", "BatchNorm(", repr(model))


def _shapes_of(model: nn.Module) -> dict[str, Any]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _lost_tie(model: nn.Module, twin: nn.Module) -> str | None:
    """Return the first parameter that a model has under two names and its twin does not, in words, or None."""
    others = dict(twin.named_parameters(remove_duplicate=False))
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(parameter, name)
        if others.get(name) is not others.get(first):
            return f"{name} is tied to {first}, and would not be"
    return None


def _module_difference(module: nn.Module, other: nn.Module) -> str | None:
    """Return the first setting in which two modules differ, or None."""
    is_synchronised = type(module) is nn.SyncBatchNorm and type(other) in _BATCH_NORMS
    if type(module) is not type(other) and not is_synchronised:
        return f"__class__ is {type(module).__name__}, and would be {type(other).__name__}"
    others = _settings(other)
    for name, value in _settings(module).items():
        if name in others and value != others[name]:
            return f"{name} is {value!r}, and would be {others[name]!r}"
    if module.extra_repr() != other.extra_repr():
        return f"({module.extra_repr()}) would be ({other.extra_repr()})"
    return None


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return a module's public attributes that can be compared: numbers, strings, functions by name, lists of them."""
    settings = {}
    for name in vars(module):
        if name.startswith(("_", "isomorph_")) or name in _WITHOUT_EFFECT:
            continue
        value = _comparable(getattr(module, name))
        if value is not _OTHER:
            settings[name] = value
    return settings


def _comparable(value: Any) -> Any:
    """Return a value so that two are equal if they mean the same; `_OTHER` for one that cannot be compared."""
    if isinstance(value, list | tuple):
        parts = tuple(map(_comparable, value))
        return _OTHER if _OTHER in parts else parts
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    if callable(value):
        return getattr(value, "__qualname__", _OTHER)
    return _OTHER
