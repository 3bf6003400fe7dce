"""Checks that a module is exactly a known layer, so that copying its weights copies its function.

A submodule that a rule carries over may compute anything. One whose weights are copied must be the layer that the rule
knows: the forward and the parameters of that class, as plain tensors, and nothing else.
"""

import inspect

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from isomorph.surgery.attachments import OVERRIDABLE_METHODS

_CHECKED_ATTRIBUTES = (
    *OVERRIDABLE_METHODS,
    "__call__",
    "_call_impl",
    "_wrapped_call_impl",
    "__getattr__",
    "__getattribute__",
    "weight",
    "bias",
)
"""Attributes of a class that decide what its modules compute, save and load."""

_PERMANENT_HINT = "make it permanent first (prune.remove, remove_weight_norm, remove_parametrizations)"


def overridden_methods(module: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Return the names of the methods by which a module computes, saves or loads differently from the class `kind`."""
    return [
        name for name in _CHECKED_ATTRIBUTES if _class_attribute(type(module), name) is not _class_attribute(kind, name)
    ]


def _class_attribute(kind: type, name: str) -> object:
    """Return an attribute of a class without calling descriptors, or None."""
    return inspect.getattr_static(kind, name, None)


def layer_mismatch(module: nn.Module, kind: type[nn.Module], name: str) -> str | None:
    """Return how a module differs from a plain layer of the class `kind`, or None; `name` is the class in messages."""
    if is_parametrized(module):
        return f"its weight is parametrized, which would be lost; {_PERMANENT_HINT}"
    if methods := " and ".join(overridden_methods(module, kind)):
        return f"{type(module).__name__} overrides {methods} of {name}"
    tensors = {n: t for n, t in {**module._parameters, **module._buffers}.items() if t is not None}
    if extra := [n for n in (*tensors, *module._modules) if n not in ("weight", "bias")]:
        return f"it has {', '.join(extra)} besides its weight and bias, which would be lost; {_PERMANENT_HINT}"
    return next((reason for n, tensor in tensors.items() if (reason := _tensor_mismatch(n, tensor))), None)


def first_altered_part(layer: nn.Module) -> str | None:
    """Return the first linear layer or convolution inside a layer that is not plain, with the reason, or None."""
    parts = [(path, part) for path, part in layer.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]
    return next(
        (f"its {path}: {reason}" for path, part in parts if (reason := layer_mismatch(part, type(part), ""))), None
    )


def _tensor_mismatch(name: str, tensor: Tensor) -> str | None:
    """Return why a tensor of a layer cannot be copied, or None."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return f"its {name} is not initialised yet; call the model once on a batch"
    if type(tensor) not in (nn.Parameter, Tensor):
        return f"its {name} is a {type(tensor).__name__}, not a plain tensor; recast before quantising or sharding"
    if not tensor.is_floating_point():
        return f"its {name} has dtype {tensor.dtype}, which is not a floating-point type"
    return None
