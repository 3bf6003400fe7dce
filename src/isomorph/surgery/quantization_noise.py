"""Rounding weights and activations as int8 inference does, and the signal-to-noise ratio that is left, in decibels."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.errors import UserError


def sqnr(signal: Tensor, rounded: Tensor) -> float:
    """Return the signal-to-quantisation-noise ratio in decibels.

        SQNR = 10 log10(sum(signal^2) / sum((signal - rounded)^2))

    6 dB are one bit. It is infinite if nothing was rounded.

    Example:
        >>> signal = torch.tensor([3.0, 4.0])
        >>> round(iso.surgery.sqnr(signal, signal + torch.tensor([0.3, 0.4])), 3)
        20.0
    """
    signal, rounded = signal.detach().double(), rounded.detach().double()
    noise = float((signal - rounded).square().sum())
    power = float(signal.square().sum())
    return math.inf if noise == 0 else -math.inf if power == 0 else 10 * math.log10(power / noise)


def round_weight(weight: Tensor, bits: int = 8, per_channel: bool = True) -> Tensor:
    """Return a weight rounded to signed integers times a scale, one for each output channel or one for all.

        scale = max|w| / (2^(bits - 1) - 1)

    Shape: (out, ...) -> (out, ...)
    """
    rows = weight.flatten(1) if per_channel else weight.reshape(1, -1)
    scale = rows.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (torch.round(rows / scale) * scale).view_as(weight)


def round_activation(x: Tensor, bits: int = 8) -> Tensor:
    """Return activations rounded to unsigned integers with one scale and zero point, over the range of x and 0."""
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    if not scale > 0:
        return x
    zero = torch.round(-low / scale)
    return (torch.clamp(torch.round(x / scale) + zero, 0, 2**bits - 1) - zero) * scale


def apply_layer(layer: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """Return the output of a linear layer or convolution for another weight, without its bias."""
    if not isinstance(layer, nn.Conv2d):
        return F.linear(x, weight)
    if layer.padding_mode != "zeros":
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        return F.conv2d(x, weight, None, layer.stride, 0, layer.dilation, layer.groups)
    return F.conv2d(x, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)


@torch.no_grad()
def weight_sqnr(model: nn.Module, bits: int = 8, per_channel: bool = True) -> dict[str, float]:
    """Return the SQNR in decibels of every linear layer's and convolution's weight rounded to integers, by name.

    Layers with outlier weights, for example fused branches, have a low one: most of their weights get few of the 256
    values.

    Args:
        model: a model; fuse it first, because branches are rounded after they are added.
        bits: bits of an integer.
        per_channel: one scale for each output channel instead of one for the layer.

    Raises: UserError for fewer than 2 or more than 16 bits.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> decibels = iso.surgery.weight_sqnr(cnn)
        >>> len(decibels), 30 < decibels["layer1.0.conv1"] < 60
        (20, True)
    """
    if not 2 <= bits <= 16:
        raise UserError(f"bits={bits} must be from 2 to 16")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    return {n: sqnr(m.weight, round_weight(m.weight, bits, per_channel)) for n, m in layers.items()}
