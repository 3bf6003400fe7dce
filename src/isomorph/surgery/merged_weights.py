"""Weights and biases of layers into which norms, scales, branches and other layers are written."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.surgery.affine import Group, Summand
from isomorph.surgery.layer_calls import InputWindow


def merged_weights(model: nn.Module, group: Group) -> list[tuple[Tensor, Tensor | None]]:
    """Return weight and bias of the carriers of a group: of the first of a chain, of the one of a sum, of all readers.

    Of a whole module, if its code adds its input, that of the carrier with it; otherwise none.

    The model still has the modules that go.
    """
    layers: list[Any] = [model.get_submodule(name) for name in group.carriers]
    if group.kind == "chain":
        return [_product(*layers)]
    if group.kind == "sum":
        return [_sum(model, layers[0], group)]
    if group.kind == "whole":
        return [_with_skips(layers[0], group)] if group.summands else []
    readers = zip(layers, group.windows, group.scales, strict=True)
    return [_after_scale(layer, window, scale) for layer, window, scale in readers]


def _product(first: Any, second: Any) -> tuple[Tensor, Tensor]:
    """Return weight and bias of second(first(x)), where the second is pointwise."""
    rows = second.weight.flatten(1)  # (out, middle)
    bias = rows.new_zeros(len(rows)) if second.bias is None else second.bias
    if first.bias is not None:
        bias = bias + rows @ first.bias
    return (rows @ first.weight.flatten(1)).unflatten(1, first.weight.shape[1:]), bias


def _after_scale(
    layer: Any, window: InputWindow, scale: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of layer(gain * x + shift)."""
    gain, shift = scale
    weight = layer.weight.unflatten(0, (window.groups, -1))  # (G, out, in, ...)
    bias = layer.bias
    sides = (window.groups, 1, weight.shape[2], *[1] * (weight.ndim - 3))
    if shift.any():
        extra = (weight * shift.view(sides)).flatten(2).sum(2).flatten()  # (G out,)
        bias = extra if bias is None else bias + extra
    return (weight * gain.view(sides)).flatten(0, 1), bias


def _sum(model: nn.Module, carrier: Any, group: Group) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias with which the carrier computes the sum and the shift."""
    weight = torch.zeros_like(carrier.weight)
    bias = group.shift
    for summand in group.summands:
        own_weight, own_bias = _weights_of(model, summand)
        weight = weight + _filters(summand, own_weight, group.windows[0], weight)
        if own_bias is not None:
            bias = bias + summand.gain * own_bias
    if carrier.bias is None and not bias.any():
        return weight, None
    return weight, bias


def _with_skips(carrier: Any, group: Group) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of the carrier plus its input, times the factors of the module's own code."""
    weight = carrier.weight
    for skip in group.summands:
        weight = weight + _identity_filters(weight, group.windows[0]) * skip.factor
    return weight, carrier.bias


def _weights_of(model: nn.Module, summand: Summand) -> tuple[Tensor | None, Tensor | None]:
    """Return weight and bias of a summand's layer, or of the product of two; none for the source itself."""
    if not summand.layer:
        return None, None
    layer: Any = model.get_submodule(summand.layer)
    if summand.after:
        return _product(layer, model.get_submodule(summand.after))
    return layer.weight, layer.bias


def _filters(summand: Summand, weight: Tensor | None, window: InputWindow, like: Tensor) -> Tensor:
    """Return what a summand, whose layer has this weight, adds to that of the carrier: a weight `like` this one."""
    if window.transposed and weight is not None:
        gain = summand.gain.view(window.groups, 1, -1, *[1] * (like.ndim - 2))
        return (weight.unflatten(0, (window.groups, -1)) * gain).flatten(0, 1)  # (in, out / G, ...)
    gain = summand.gain.view(-1, *[1] * (like.ndim - 1))
    if weight is None:
        if summand.stays:  # the model's own code adds `factor` times the source
            gain = gain - summand.factor
        return _identity_filters(like, window) * gain
    weight = _with_groups(weight, summand.window.groups, window.groups)
    padding: list[int] = []
    for outer, inner in zip(reversed(window.kernel), reversed(summand.window.kernel), strict=True):
        margin = (outer - inner) // 2
        padding += [margin, margin]
    return F.pad(weight, padding) * gain


def _identity_filters(like: Tensor, window: InputWindow) -> Tensor:
    """Return the filters that give their input: 1 in the middle of each channel's own filter."""
    filters = torch.zeros_like(like)
    rows = torch.arange(len(like), device=like.device)
    middle: tuple[Any, ...] = tuple(side // 2 for side in window.kernel)
    # a source of one channel goes to every row
    filters[(rows, rows % like.shape[1], *middle)] = 1.0
    return filters


def _with_groups(weight: Tensor, groups: int, fewer: int) -> Tensor:
    """Return the weight of a convolution of some groups as that of one with fewer: blocks on the diagonal of each."""
    finer = groups // fewer
    if finer == 1:
        return weight
    blocks = weight.unflatten(0, (fewer, finer, -1))  # (G, finer, out, in, ...)
    full = blocks.new_zeros(*blocks.shape[:3], finer, *blocks.shape[3:])
    index = torch.arange(finer, device=weight.device)
    full[:, index, :, index] = blocks.transpose(0, 1)
    return full.flatten(3, 4).flatten(0, 2)
