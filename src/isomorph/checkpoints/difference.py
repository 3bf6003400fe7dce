"""The first difference between two networks, but for the values of their tensors."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from timm.layers import BatchNormAct2d, SyncBatchNormAct
from torch import nn

from isomorph.surgery.plain_layers import describe_attachments, has_same_attachments

# Attributes that change neither what a model computes nor how it is trained; grids follow the last image, and timm's
# Swin notes the shift that it was asked for.
_WITHOUT_EFFECT = frozenset(
    {"training", "fused_attn", "grad_checkpointing", "grid_size", "token_grid", "target_shift_size"}
)
_OTHER = object()
# Layers that torch's and timm's `convert_sync_batchnorm` replace. Files have the plain ones: a run on several processes
# converts them again.
_PLAIN_FORMS: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {
    nn.SyncBatchNorm: (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    SyncBatchNormAct: (BatchNormAct2d,),
}


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
    for name, first in _ties_without(model, twin):
        return f"{name} is tied to {first}, and would not be"
    for name, first in _ties_without(twin, model):
        return f"{name} is not tied to {first}, and would be"
    others = dict(twin.named_modules())
    for name, module in model.named_modules():
        if name not in others:
            return f"{name} would be missing"
        other = others[name]
        difference = _module_difference(module, other)
        if difference is not None:
            return f"{name}.{difference}".removeprefix(".")
        if not has_same_attachments(other, module):
            where = name or "the model"
            lost = describe_attachments(module)
            if lost is None:
                return f"{where} would have {describe_attachments(other)}"
            return f"{where} has {lost}, which a file does not keep (remove them before saving)"
    return None if _text(model) == _text(twin) else "its modules differ in their order or number"


def _text(model: nn.Module) -> str:
    """Return the repr of a model, with one name for all kinds of BatchNorm."""
    return re.sub(r"(?:Sync|\b)(BatchNorm(?:Act)?)(?:[123]d)?\(", r"\1(", repr(model))


def _shapes_of(model: nn.Module) -> dict[str, Any]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _ties_without(model: nn.Module, twin: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each parameter that is tied in a model and not in its twin, with the first name that it is tied to."""
    others = dict(twin.named_parameters(remove_duplicate=False))
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(parameter, name)
        if others.get(name) is not others.get(first):
            yield name, first


def _module_difference(module: nn.Module, other: nn.Module) -> str | None:
    """Return the first setting in which two modules differ, or None."""
    is_synchronised = type(other) in _PLAIN_FORMS.get(type(module), ())
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
