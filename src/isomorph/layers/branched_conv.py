"""A convolution whose training form is a sum of units, as MobileOne's: each a convolution and a BatchNorm.

    y = sum_i BN_i(conv_i(x)) + BN_s(1x1 conv(x)) + BN_id(x)

Every unit is linear in the patches that the k x k convolutions read: a 1x1 convolution and the identity read their
middle. So the sum is one convolution, and the statistics of all BatchNorms follow from the moments of the patches,
which are measured once.

Letters: G groups of c channels, n taps of a patch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.layers.affine_chain import Affine, apply_batchnorms, matvec, uses_batch_statistics, weight_matrix
from isomorph.layers.moments import Moments, disable_autocast, measure_moments
from isomorph.layers.pyramid import Pyramid, collapse_centred
from isomorph.layers.pyramid_conv import PyramidConv2d, convolve
from isomorph.layers.tokens import Window


class Unit(NamedTuple):
    """A convolution, or a pyramid, and the BatchNorm after it; None stands for the identity."""

    conv: PyramidConv2d | nn.Conv2d | None
    norm: _BatchNorm


def convolve_units(x: Tensor, units: Sequence[Unit], window: Window, group: Any) -> Tensor:
    """Return the sum of units in training, computed as one convolution.

    `group` are the processes that share BatchNorm statistics.

    Shape: x (B, C, H, W) -> (B, out, H', W')
    """
    moments = measure_moments(x, window, group)
    with disable_autocast(x.device):
        weight, bias = collapse_units(units, window, moments)
    return convolve(moments.source, weight, bias, window)


def collapse_units(units: Sequence[Unit], window: Window, moments: Moments) -> tuple[Tensor, Tensor]:
    """Return the sum of units as one affine map of the patches of `moments.source`.

    Shape: -> (G, out, n c), (G, out); no G where there is one group
    """
    pyramids = [unit.conv for unit in units if isinstance(unit.conv, Pyramid)]
    collapsed = iter(collapse_centred(pyramids, moments) if pyramids else ())
    maps = [
        next(collapsed) if isinstance(conv, Pyramid) else _read_patches(conv, norm, window, moments.mean)
        for conv, norm in units
    ]
    normed = apply_batchnorms([unit.norm for unit in units], maps, moments)
    weights, biases = zip(*(each.scaled() for each in normed), strict=True)
    weight, bias = sum(weights[1:], weights[0]), sum(biases[1:], biases[0])
    return weight, bias if moments.offset is None else bias - matvec(weight, moments.offset)


def _read_patches(conv: nn.Conv2d | None, norm: _BatchNorm, window: Window, mean: Tensor) -> Affine:
    """Return a unit's convolution, or the identity, as an affine map of centred patches. Shape: mean (G, n c)"""
    taps = window.kernel_size[0] * window.kernel_size[1]
    if conv is None:
        one = torch.eye(mean.shape[-1] // taps, dtype=mean.dtype, device=mean.device)
        weight = one.expand(*mean.shape[:-1], -1, -1)
    else:
        weight = weight_matrix(conv)
    if weight.shape[-1] < mean.shape[-1]:  # reads the middle of each patch
        weight = F.pad(weight.unsqueeze(-1), (taps // 2, taps // 2)).flatten(-2)
    # batch statistics subtract the bias again: its gradient is 0, so skip the outer product
    bias = matvec(weight.detach() if uses_batch_statistics(norm) else weight, mean)
    own = getattr(conv, "bias", None)
    return Affine(weight, None, bias if own is None else bias + own.view(bias.shape).to(bias.dtype))
