"""Convolutions trained as a sum of branches and computed as one: pyramids, and the units of MobileOne's blocks.

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
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers.pyramid.affine_chain import Affine, apply_batchnorms, matvec, uses_batch_statistics, weight_matrix
from isomorph.layers.pyramid.base import Pyramid, Rectify, collapse_centred
from isomorph.layers.pyramid.moments import (
    Moments,
    autocast_dtype,
    cast_clamped,
    disable_autocast,
    measure_moments,
    sync_group,
)
from isomorph.layers.pyramid.tokens import Window
from isomorph.layers.shapes import batched


class PyramidConv2d(Pyramid):
    """A convolution with extra branches during training, which fuse to one nn.Conv2d for inference.

    The extra parameters and BatchNorms make training easier; the trained model costs the same as one with a plain
    convolution.

        y = Rectify(Conv(x) + sum_n f_n(x))

    Branch f_n is Conv + BatchNorm, further 1x1 Conv + BatchNorm units, and a last 1x1 Conv. A convolution is a linear
    layer on the patches that it reads, so the arguments `layout`, `rectify`, `affine` and `rescale_by`, and training in
    closed form, are those of `PyramidLinear`, with patches as tokens. With `groups`, every layer of a branch is
    grouped, so that a depthwise convolution fuses to a depthwise one.

    The first unit is as wide as the input, or as the rank of the map (min(C k k, out)) if that is larger: a patch
    embedding of 768 input values per patch is not squeezed through 3 channels.

    Shape: x (B, C, H, W) -> (B, out, H', W'), sizes as nn.Conv2d
    Source: TDRL eq. 8 and appendix A.3, A.4; differs: computed in closed form, exactly
    Raises: UserError for an unknown layout or rectification, or an input of another shape; ValueError when training on
    a single patch.

    Example:
        >>> layer = iso.layers.PyramidConv2d(8, 16, kernel_size=3, padding=1)
        >>> layer(torch.randn(2, 8, 6, 6)).shape
        torch.Size([2, 16, 6, 6])
        >>> layer.eval().fuse()
        Conv2d(8, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 1,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        layout: str = "P-W2S",
        rectify: Rectify = "rescale",
        affine: bool = True,
        rescale_by: float | None = None,
    ) -> None:
        self.window = Window(to_2tuple(kernel_size), to_2tuple(stride), to_2tuple(padding), to_2tuple(dilation), groups)
        taps = self.window.kernel_size[0] * self.window.kernel_size[1]
        reads, gives = in_channels // groups, out_channels // groups
        first = max(reads, min(reads * taps, gives)) * groups
        super().__init__(in_channels, out_channels, first, layout, rectify, affine, rescale_by)
        # also under the names of nn.Conv2d, which networks read
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride, self.padding, self.dilation, self.groups = self.window

    def make_linear(self, in_features: int, out_features: int, reads_input: bool) -> nn.Conv2d:
        kernel_size, stride, padding, dilation, groups = self.window
        if reads_input:
            return nn.Conv2d(in_features, out_features, kernel_size, stride, padding, dilation, groups)
        return nn.Conv2d(in_features, out_features, 1, groups=groups)

    def make_norm(self, features: int, affine: bool) -> nn.BatchNorm2d:
        return nn.BatchNorm2d(features, affine=affine)

    def zero_mean(self) -> Tensor:
        """Return a mean of zeros for the patches. Shape: -> (C k k,), or (G, C k k / G)"""
        weight = next(self.parameters())
        groups, taps = self.window.groups, self.window.kernel_size[0] * self.window.kernel_size[1]
        reads = self.in_features // groups * taps
        shape = (reads,) if groups == 1 else (groups, reads)
        return weight.new_zeros(shape, dtype=torch.promote_types(weight.dtype, torch.float32))

    def as_filters(self, weight: Tensor) -> Tensor:
        """Reshape a matrix on patches into filters.

        Shape: (out, C k k) or (G, out / G, C k k / G) -> (out, C / G, k, k)
        """
        return as_filters(weight, self.window)

    @batched
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.in_features:
            raise UserError(f"the input has shape {tuple(x.shape)}; the pyramid needs (B, {self.in_features}, H, W)")
        moments: Moments | None = None
        if self.needs_moments:
            moments = measure_moments(x, self.window, sync_group(self))
            x = moments.source
        with disable_autocast(x.device):
            weight, bias = self.collapse(moments)
        return convolve(x, weight, bias, self.window)

    @torch.no_grad()
    def fuse(self) -> nn.Conv2d:
        """Return one nn.Conv2d that computes the same function, fused in float64. Raises: UserError in train mode."""
        weight, bias = self.collapse_in_float64()
        conv = self.make_linear(self.in_features, self.out_features, reads_input=True).to(next(self.parameters()))
        conv.weight.copy_(self.as_filters(weight))
        conv.bias.copy_(bias.flatten())  # type: ignore[union-attr]
        return conv

    def extra_repr(self) -> str:
        kernel_size, stride, padding, dilation, groups = self.window
        window = f"kernel_size={kernel_size}, stride={stride}, padding={padding}, dilation={dilation}, groups={groups}"
        return f"{super().extra_repr()}, {window}"


def as_filters(weight: Tensor, window: Window) -> Tensor:
    """Reshape a matrix on patches into filters. Shape: (out, C k k) or (G, out / G, C k k / G) -> (out, C / G, k, k)"""
    return weight.flatten(0, -2).unflatten(-1, (-1, *window.kernel_size))


def convolve(x: Tensor, weight: Tensor, bias: Tensor, window: Window) -> Tensor:
    """Convolve with a matrix on patches as filters, in autocast's dtype.

    Shape: x (B, C, H, W), weight (G, out, n c), bias (G, out) -> (B, out, H', W')
    """
    dtype = autocast_dtype(x)
    return F.conv2d(x, cast_clamped(as_filters(weight, window), dtype), bias.flatten().to(dtype), *window[1:])


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
