"""Whether a module whose weights are copied is exactly the layer that a rule knows, with nothing attached to it."""

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from timm.layers.conv2d_same import Conv2dSame
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from isomorph.errors import UserError
from isomorph.layers.same_padding import SamePadding
from isomorph.operations import hooks_on

_SAVING = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
# Methods that decide what a module computes, saves and loads, and that a user may have patched on the instance.
OVERRIDABLE_METHODS = ("forward", "_conv_forward", *_SAVING)


def describe_attachments(module: nn.Module) -> str | None:
    """Return a description of the hooks, patched methods or parametrization of one module, or None."""
    if is_parametrized(module):
        return "a parametrized weight"
    hooks = hooks_on(module)
    if hooks:
        return f"hooks ({', '.join(dict.fromkeys(hooks))})"
    methods = [name for name in OVERRIDABLE_METHODS if name in vars(module)]
    if methods:
        return f"a patched {' and a patched '.join(methods)}"
    return None


def check_attached(name: str, original: nn.Module, replacement: nn.Module) -> None:
    """Check that no hook, patched method or parametrization of a module is lost in its replacement.

    It is not if the replacement has the submodule: the same class, name, number of hooks and patched methods.

    Raises: UserError if one would be lost.
    """
    new_parts = dict(replacement.named_modules(remove_duplicate=False))
    for path, part in original.named_modules(remove_duplicate=False):
        attachments = describe_attachments(part)
        if not attachments:
            continue
        new_part = new_parts.get(path)
        is_of_class = type(new_part) is type(part)
        if not (is_of_class and has_same_attachments(new_part, part)):
            full = f"{name}.{path}".strip(".") or "the model"
            advice = _PERMANENT_HINT if is_parametrized(part) else "remove them first"
            raise UserError(f"{full} has {attachments}, which would be lost; {advice}")


def has_same_attachments(new_part: nn.Module | None, part: nn.Module) -> bool:
    """Return True if there is a module and it has the same patched methods and as many hooks as another."""
    if new_part is None:
        return False
    for name in OVERRIDABLE_METHODS:
        if (name in vars(new_part)) != (name in vars(part)):
            return False
    return len(hooks_on(new_part)) == len(hooks_on(part))


_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")
# Attributes of a class that decide what its modules compute, save and load.
_CHECKED_ATTRIBUTES = (*OVERRIDABLE_METHODS, *_CALLS, "weight", "bias")

_PERMANENT_HINT = (
    "make it permanent first (prune.remove, remove_weight_norm, remove_parametrizations)"
)


def override_reason(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Return by which methods a module computes, saves or loads differently from a class of torch or timm, or None."""
    find = inspect.getattr_static
    methods = []
    for method in _CHECKED_ATTRIBUTES:
        if find(type(module), method, None) is not find(kind, method, None):
            methods.append(method)
    if not methods:
        return None
    owner = "timm's " if kind.__module__.startswith("timm.") else "nn."
    return f"{type(module).__name__} overrides {' and '.join(methods)} of {owner}{kind.__name__}"


def layer_mismatch(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Return how a module differs from a plain layer of a class of torch, or None."""
    if is_parametrized(module):
        return f"its weight is parametrized, which would be lost; {_PERMANENT_HINT}"
    reason = override_reason(module, kind)
    if reason:
        return reason
    tensors: dict[str, Tensor] = {}
    tensors.update(module.named_parameters(recurse=False, remove_duplicate=False))
    tensors.update(module.named_buffers(recurse=False, remove_duplicate=False))
    extra = [part for part in (*tensors, *module._modules) if part not in ("weight", "bias")]
    if extra:
        return f"it has {', '.join(extra)} besides its weight and bias, which would be lost; {_PERMANENT_HINT}"
    for part, tensor in tensors.items():
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            return f"its {part} is not initialised yet; call the model once on a batch"
        if type(tensor) not in (nn.Parameter, Tensor):
            return (
                f"its {part} is a {type(tensor).__name__}, not a plain tensor; "
                "recast before quantising or sharding"
            )
        if not tensor.is_floating_point():
            return f"its {part} has dtype {tensor.dtype}, which is not a floating-point type"
    return None


def projection_mismatch(module: nn.Module, name: str) -> str | None:
    """Return how a child of a module differs from a plain nn.Linear, whose weights can be split, or None."""
    reason = layer_mismatch(getattr(module, name), nn.Linear)
    return f"its {name}: {reason}" if reason else None


def class_name(module: nn.Module, others: Sequence[str] = ()) -> str:
    """Return the name of a module's class, with its package if `others` or torch.nn have a class of that name."""
    kind = type(module)
    if kind.__name__ not in others and getattr(nn, kind.__name__, kind) is kind:
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"


def is_quantised(module: nn.Module) -> bool:
    """Return True for a layer of torch's quantisation, whose weight is packed, behind a method."""
    has_method = inspect.ismethod(getattr(module, "weight", None))
    return has_method and hasattr(module, "_packed_params")


def describe_stand_in(module: nn.Module) -> str | None:
    """Return what a module is that another tool put in the place of a layer, and what to do; None for others.

    An adapter wraps a linear layer of its own size.
    """
    if is_quantised(module):
        return f"is quantised ({class_name(module)}); change the model before it is quantised"
    if isinstance(module, nn.Linear):
        return None
    size = _size_of(module)
    for name, part in module.named_children():
        if isinstance(part, nn.Linear) and _size_of(part) == size:
            what = f"is an adapter ({class_name(module)}) around its {name}"
            return f"{what}; merge it first (peft: merge_and_unload), or recast before it is added"
    return None


def _size_of(layer: nn.Module) -> tuple[Any, Any]:
    return getattr(layer, "in_features", None), getattr(layer, "out_features", None)


def first_quantised_part(layer: nn.Module) -> str | None:
    """Return the first part of a layer whose weight is packed, and what to do, or None."""
    for path, part in layer.named_modules():
        if path and is_quantised(part):
            return f"its {path} {describe_stand_in(part)}"
    return None


def first_altered_part(layer: nn.Module) -> str | None:
    """Return the first linear layer or convolution inside a layer that is not plain, with the reason, or None."""
    for path, part in layer.named_modules():
        if not isinstance(part, nn.Linear | nn.Conv2d):
            continue
        reason = layer_mismatch(part, type(part))
        if reason:
            return f"its {path}: {reason}"
    return None


_STANDARDISED = (ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame)


def _has_another_form(module: nn.Module) -> bool:
    """True for a convolution of timm with standardised weights or SAME padding, with the attributes of its class."""
    return type(module) is Conv2dSame or (type(module) in _STANDARDISED and hasattr(module, "eps"))


@torch.no_grad()
def plain_layer(module: Any) -> nn.Module:
    """Return the plain layer that computes what a layer of timm computes, or the module itself if it is none of these.

    - timm's `Linear`, which differs from nn.Linear only in TorchScript.
    - Convolutions with weight standardisation (NFNet, BiT): with the weight that the standardisation gives now.
    - Convolutions with TensorFlow's SAME padding: with the same padding on both sides where that does not depend on
      the size of the image, as with stride 1 and an odd kernel. `same_padding` returns that of the others.
    """
    if is_parametrized(module):
        return module
    if type(module) is timm.layers.Linear:
        linear = nn.Linear(
            module.in_features, module.out_features, module.bias is not None, device="meta"
        )
        linear.weight, linear.bias = module.weight, module.bias
        return linear
    if not _has_another_form(module):
        return module
    weight = module.weight
    if type(module) is not Conv2dSame:
        weight = nn.Parameter(_standardised(module))
    padding = module.padding
    if _pads_same(module):
        padding = _equal_sides(module) or (0, 0)
    return conv_like(module, weight, module.bias, padding=padding, padding_mode="zeros")


def conv_like(
    conv: Any, weight: nn.Parameter, bias: nn.Parameter | None, **other: Any
) -> nn.Conv2d:
    """Return a convolution of torch with these parameters, and the window of another or `other` parts of it."""
    names = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    window = {name: getattr(conv, name) for name in names} | other
    new = nn.Conv2d(
        weight.shape[1] * conv.groups,
        len(weight),
        bias=bias is not None,
        device="meta",
        **window,
    )
    new.weight = weight
    new.bias = bias
    return new.train(conv.training)


def _standardised(conv: Any) -> Tensor:
    """Return the weight that the standardisation of timm's convolutions gives now. Shape: -> (out, in, k, k)"""
    gain = None
    if hasattr(conv, "gain"):
        gain = (conv.gain * conv.scale).view(-1).double()
    rows = conv.weight.double().reshape(1, conv.out_channels, -1)
    rows = F.batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0, eps=conv.eps)
    return rows.reshape_as(conv.weight).to(conv.weight)


def _pads_same(module: nn.Module) -> bool:
    return type(module) is Conv2dSame or bool(getattr(module, "same_pad", False))


def _equal_sides(conv: nn.Conv2d) -> tuple[int, int] | None:
    """Return the SAME padding if it is the same on both sides for every image, else None."""
    return _half_extents(conv) if conv.stride == (1, 1) else None


def _half_extents(conv: nn.Conv2d) -> tuple[int, int] | None:
    """Return the rows and columns that a kernel reads on each side of its middle, or None if sides differ."""
    rows = conv.dilation[0] * (conv.kernel_size[0] - 1)
    columns = conv.dilation[1] * (conv.kernel_size[1] - 1)
    if rows % 2 or columns % 2:
        return None
    return rows // 2, columns // 2


def same_padding(module: Any) -> SamePadding | None:
    """Return the padding that comes before the plain layer of a convolution, or None: the layer pads itself."""
    if not _has_another_form(module) or not _pads_same(module):
        return None
    if _equal_sides(module) or module.kernel_size == (1, 1):
        return None
    return SamePadding(module.kernel_size, module.stride, module.dilation)


def with_same_padding(module: nn.Module, replacement: nn.Module) -> nn.Module:
    """Return a replacement with the padding before it; it gets `replaces_plain = False` if it cannot convert back."""
    if _has_another_form(module):
        replacement.replaces_plain = False  # type: ignore[assignment]
    padding = same_padding(module)
    return nn.Sequential(OrderedDict(pad=padding, conv=replacement)) if padding else replacement


_BATCH_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    timm.layers.BatchNormAct2d,
    timm.layers.SyncBatchNormAct,
)


def is_plain_norm(module: nn.Module) -> bool:
    """True for BatchNorm with running statistics and no activation or dropout, which timm's may have."""
    if type(module) not in _BATCH_NORMS or module.running_mean is None:
        return False
    extras = (getattr(module, "act", None), getattr(module, "drop", None))
    return all(extra is None or type(extra) is nn.Identity for extra in extras)


def linear_mismatch(module: nn.Module) -> str | None:
    """Return why a layer is not a plain linear layer or convolution, or None if it is."""
    if isinstance(module, nn.Linear):
        return layer_mismatch(module, nn.Linear)
    if not isinstance(module, nn.Conv2d):
        return f"{type(module).__name__} is not a linear layer or convolution"
    reason = layer_mismatch(module, nn.Conv2d)
    if reason:
        return reason
    if module.padding_mode != "zeros":
        return f"padding_mode={module.padding_mode!r} is not 'zeros'"
    if conv_padding(module) is None:
        return f"padding={module.padding!r} pads one side more than the other"
    return None


def conv_padding(conv: nn.Conv2d) -> tuple[int, int] | None:
    """Return the padding of a convolution in pixels, or None if it differs between sides."""
    if conv.padding == "valid":
        return (0, 0)
    if conv.padding == "same":
        return _half_extents(conv)
    return timm.layers.to_2tuple(conv.padding)
