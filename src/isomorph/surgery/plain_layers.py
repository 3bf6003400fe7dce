"""Layers of timm that compute a plain convolution or linear layer in another way: as the plain layer."""

from collections import OrderedDict
from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from timm.layers.conv2d_same import Conv2dSame
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from isomorph.layers.same_padding import SamePadding

_STANDARDISED = (ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame)


def _has_another_form(module: nn.Module) -> bool:
    """True for a convolution of timm with standardised weights or SAME padding, with the attributes of its class."""
    return type(module) is Conv2dSame or (type(module) in _STANDARDISED and hasattr(module, "eps"))


@torch.no_grad()
def plain_layer(module: nn.Module) -> nn.Module:
    """Return the plain layer that computes what a layer of timm computes, or the module itself if it is none of these.

    - timm's `Linear`, which differs from nn.Linear only in TorchScript.
    - Convolutions with weight standardisation (NFNet, BiT): with the weight that the standardisation gives now.
    - Convolutions with TensorFlow's SAME padding: with the same padding on both sides where that does not depend on
      the size of the image, as with stride 1 and an odd kernel. `same_padding` returns that of the others.
    """
    if is_parametrized(module):
        return module
    if type(module) is timm.layers.Linear:
        assert isinstance(module, nn.Linear)
        linear = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
        linear.weight, linear.bias = module.weight, module.bias
        return linear
    if not _has_another_form(module):
        return module
    assert isinstance(module, nn.Conv2d)
    padding = (_equal_sides(module) or (0, 0)) if _pads_same(module) else module.padding
    window = (module.kernel_size, module.stride, padding, module.dilation, module.groups)
    conv = nn.Conv2d(module.in_channels, module.out_channels, *window, bias=False, device="meta")  # type: ignore[arg-type]
    weight = module.weight if type(module) is Conv2dSame else nn.Parameter(_standardised_weight(module))
    conv.weight, conv.bias = weight, module.bias
    return conv.train(module.training)


def _standardised_weight(conv: Any) -> Tensor:
    """Return the weight by which a convolution with weight standardisation filters. Shape: -> as conv.weight"""
    weight = conv.weight.double()
    gain = (conv.gain * conv.scale).view(-1).double() if hasattr(conv, "gain") else None
    rows = weight.reshape(1, conv.out_channels, -1)
    rows = F.batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0, eps=conv.eps)
    return rows.reshape_as(weight).to(conv.weight)


def _pads_same(module: nn.Module) -> bool:
    """True for a convolution with TensorFlow's SAME padding."""
    return type(module) is Conv2dSame or bool(getattr(module, "same_pad", False))


def _equal_sides(conv: nn.Conv2d) -> tuple[int, int] | None:
    """Return the SAME padding if it is the same on both sides for every image, else None."""
    total = [d * (k - 1) for k, d in zip(conv.kernel_size, conv.dilation, strict=True)]
    fixed = conv.stride == (1, 1) and not any(t % 2 for t in total)
    return (total[0] // 2, total[1] // 2) if fixed else None


def same_padding(module: nn.Module) -> SamePadding | None:
    """Return the padding that comes before the plain layer of a convolution, or None: the layer pads itself."""
    if not _has_another_form(module) or not _pads_same(module):
        return None
    assert isinstance(module, nn.Conv2d)
    if _equal_sides(module) or module.kernel_size == (1, 1):
        return None
    return SamePadding(module.kernel_size, module.stride, module.dilation)  # type: ignore[arg-type]


def with_same_padding(module: nn.Module, replacement: nn.Module) -> nn.Module:
    """Return the replacement of the plain layer of a module, with the padding that comes before it, if any.

    A replacement that cannot convert back to a layer of the module's class gets `replaces_plain = False`.
    """
    if _has_another_form(module):
        replacement.replaces_plain = False  # type: ignore[assignment]
    padding = same_padding(module)
    return nn.Sequential(OrderedDict(pad=padding, conv=replacement)) if padding else replacement
