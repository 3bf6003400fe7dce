"""Chains of linear layers that are one linear map: recognise them, and merge them into one layer."""

import copy
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from timm.layers import BatchNormAct2d, ConvNormAct, SyncBatchNormAct, to_2tuple
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.layers import AnnealedReLU
from isomorph.layers.pyramid.annealed import is_pointwise
from isomorph.layers.pyramid.base import Pyramid
from isomorph.layers.pyramid.batchnorm import fold
from isomorph.operations import see
from isomorph.surgery.plain_layers import layer_mismatch, overridden_methods

BATCH_NORMS = (BatchNormAct2d, SyncBatchNormAct, nn.SyncBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""BatchNorm classes of torch and timm, a subclass before its base."""
_LINEAR = (nn.Linear, nn.Conv2d, Pyramid)


def _chain_layers(module: nn.Module, annealed: bool = False) -> Iterator[nn.Module]:
    """Yield the layers of a chain in order, without identities; `annealed` also leaves out annealed ReLUs."""
    if isinstance(module, nn.Sequential) and not overridden_methods(module, nn.Sequential):
        for child in module:
            yield from _chain_layers(child, annealed)
    elif isinstance(module, AnnealedReLU):
        yield from () if annealed or module.is_identity else (module,)
    elif isinstance(module, ConvNormAct) and not overridden_methods(module, ConvNormAct):
        yield from (
            piece
            for child in (module.conv, module.bn, module.aa)
            if child is not None
            for piece in _chain_layers(child, annealed)
        )
    elif not isinstance(module, nn.Identity) or overridden_methods(module, nn.Identity):
        yield module


def is_plain_norm(module: nn.Module) -> bool:
    """True if a module is BatchNorm with running statistics and no activation or dropout, which timm's may have."""
    extras = (getattr(module, name, None) for name in ("act", "drop"))
    kind = next((known for known in BATCH_NORMS if isinstance(module, known)), None)
    if kind is None or overridden_methods(module, kind) or module.running_mean is None:
        return False
    return all(extra is None or type(extra) is nn.Identity for extra in extras)


def linear_mismatch(module: nn.Module) -> str | None:
    """Return why a layer is not a plain linear layer or convolution, or None if it is."""
    if isinstance(module, nn.Linear):
        return layer_mismatch(module, nn.Linear, "nn.Linear")
    if not isinstance(module, nn.Conv2d):
        return f"{type(module).__name__} is not a linear layer or convolution"
    if reason := layer_mismatch(module, nn.Conv2d, "nn.Conv2d"):
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
        total = [d * (k - 1) for k, d in zip(conv.kernel_size, conv.dilation, strict=True)]
        return None if any(t % 2 for t in total) else (total[0] // 2, total[1] // 2)
    return to_2tuple(conv.padding)


def is_chain(module: nn.Module, annealed: bool = False) -> bool:
    """True if a module is a sequence of two or more linear maps, with at most a BatchNorm between them.

    `annealed`: ignore ReLUs that an anneal turns into the identity.
    """
    layers = list(_chain_layers(module, annealed))
    linear = [layer for layer in layers if not isinstance(layer, _BatchNorm)]
    if len(linear) < 2 or any(map(linear_mismatch, linear)) or layers[0] is not linear[0]:
        return False
    norms = [layer for layer in layers if isinstance(layer, _BatchNorm)]
    doubled = any(isinstance(a, _BatchNorm) and isinstance(b, _BatchNorm) for a, b in pairwise(layers))
    if doubled or not all(map(is_plain_norm, norms)):
        return False
    first, *rest = linear
    if isinstance(first, nn.Linear):
        return all(isinstance(layer, nn.Linear) for layer in rest)
    assert isinstance(first, nn.Conv2d)
    return first.groups == 1 and all(isinstance(layer, nn.Conv2d) and is_pointwise(layer) for layer in rest)


@torch.no_grad()
def merge_chain(module: nn.Module, annealed: bool = False) -> nn.Linear | nn.Conv2d:
    """Merge a chain in eval mode into one layer with a bias, computed in float64; `annealed` as in `is_chain`."""
    dtype = next(module.parameters()).dtype
    layers = list(_chain_layers(copy.deepcopy(module).double().eval(), annealed))
    first = layers[0]
    assert isinstance(first, nn.Linear | nn.Conv2d)
    weight, bias = fold(layers)
    merged = _new_layer_like(first, bias.numel())
    merged.weight = nn.Parameter(weight.reshape(-1, *first.weight.shape[1:]))
    merged.bias = nn.Parameter(bias.flatten())
    return merged.to(dtype)


def _new_layer_like(layer: nn.Linear | nn.Conv2d, out: int) -> nn.Linear | nn.Conv2d:
    """Return a new layer with the same input window, `out` outputs and a bias."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, out)
    window = (layer.kernel_size, layer.stride, conv_padding(layer), layer.dilation, layer.groups)
    return nn.Conv2d(layer.in_channels, out, *window)  # type: ignore[arg-type]


@torch.no_grad()
def absorb_conv_biases(model: nn.Module) -> None:
    """Move the bias of a convolution before a BatchNorm into its running mean, in place.

    A convolution has one where a pyramid was fused, and timm's merging of branches does not expect it.
    """
    for module in model.modules():
        if names := conv_and_norm(module):
            layer, norm = (module.get_submodule(name) for name in names)
            if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
                norm.running_mean.sub_(layer.bias)  # type: ignore[operator]
                layer.bias = None


def conv_and_norm(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of the linear layer and of the BatchNorm that alone reads its output, in a unit of the two.

    They are children of the module, and run in this order whatever its class: ConvNormAct, GhostNet's ConvBnAct,
    LeViT's pairs. None for others, for a BatchNorm without running statistics, and where the output is used otherwise.
    """
    children = dict(module.named_children())
    layers = [name for name, child in children.items() if isinstance(child, _LINEAR)]
    norms = [
        name for name, child in children.items() if isinstance(child, _BatchNorm) and child.running_mean is not None
    ]
    if len(layers) != 1 or len(norms) != 1:
        return None
    unit = copy.deepcopy(module).eval()
    for part in unit.modules():  # hooks of the user are not for an example
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    try:
        x = _example_input(children[layers[0]]).to(next(unit.parameters()))
        flow = see(unit, partial(unit, x))
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, IndexError):  # it takes other inputs
        return None
    return (layers[0], norms[0]) if flow.norm_after(layers[0]) == norms[0] else None


def _example_input(layer: Any) -> torch.Tensor:
    """Return zeros that a linear layer, a convolution or a pyramid can read. Shape: -> (2, 2, C) or (2, C, H, W)"""
    window = getattr(layer, "window", layer)
    if not hasattr(window, "kernel_size"):
        return torch.zeros(2, 2, layer.in_features)
    size = (d * (k - 1) + 1 for k, d in zip(window.kernel_size, window.dilation, strict=True))
    return torch.zeros(2, layer.in_channels, *size)
