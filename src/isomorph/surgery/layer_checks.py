"""Whether a module computes exactly what its weights say: what a rule takes apart must be known to the last bit.

A part that a rule carries over as a module may compute anything. A part whose weights are copied out must be the layer
that the rule knows: its class's forward, its class's parameters, plain tensors, and nothing else.
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
    """What a module's class computes, saves or loads otherwise than the class `kind`, by the names of its methods."""
    return [
        name for name in _CHECKED_ATTRIBUTES if _class_attribute(type(module), name) is not _class_attribute(kind, name)
    ]


def _class_attribute(kind: type, name: str) -> object:
    """An attribute of a class as it is stored there, or None."""
    return inspect.getattr_static(kind, name, None)


def layer_mismatch(module: nn.Module, kind: type[nn.Module], name: str) -> str | None:
    """Why a module of the class `kind` is not exactly that layer, or None; `name` is the class's in messages."""
    if is_parametrized(module):
        return f"its weight is parametrized, which would be lost; {_PERMANENT_HINT}"
    if methods := " and ".join(overridden_methods(module, kind)):
        return f"{type(module).__name__} does not compute what {name} does with its weight: it has its own {methods}"
    tensors = {n: t for n, t in {**module._parameters, **module._buffers}.items() if t is not None}
    if extra := [n for n in (*tensors, *module._modules) if n not in ("weight", "bias")]:
        return f"it holds {', '.join(extra)} besides its weight and bias, which would be lost; {_PERMANENT_HINT}"
    return next((reason for n, tensor in tensors.items() if (reason := _tensor_mismatch(n, tensor))), None)


def first_altered_part(layer: nn.Module) -> str | None:
    """The first linear layer or convolution in a layer whose tensors are not its own plain ones, and why; or None."""
    parts = [(path, part) for path, part in layer.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]
    return next(
        (f"of its {path}: {reason}" for path, part in parts if (reason := layer_mismatch(part, type(part), ""))), None
    )


def _tensor_mismatch(name: str, tensor: Tensor) -> str | None:
    """Why a tensor of a layer cannot be copied out, or None."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return f"its {name} is not initialised yet; call the model once on a batch"
    if type(tensor) not in (nn.Parameter, Tensor):
        return f"its {name} is a {type(tensor).__name__}, not a plain tensor; recast before quantising or sharding"
    if not tensor.is_floating_point():
        return f"its {name} is of {tensor.dtype}, not of a floating-point type"
    return None
