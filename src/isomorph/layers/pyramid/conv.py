"""Convolutions trained as a sum of branches and computed as one: pyramids, and blocks of parallel BatchNorm units.

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
from isomorph.layers.grid import batched
from isomorph.layers.pyramid.base import Pyramid, Rectify
from isomorph.layers.pyramid.closed_form import Chains, collapse
from isomorph.layers.pyramid.moments import autocast_dtype, cast_clamped, disable_autocast, measure_moments, sync_group
from isomorph.layers.pyramid.tokens import Window


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

    Layers that are not plain run one after the other, as in `PyramidLinear`.

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

    window: Window

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

    @batched
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.in_features:
            raise UserError(f"the input has shape {tuple(x.shape)}; the pyramid needs (B, {self.in_features}, H, W)")
        kind, chains = self.parts()
        if kind == "branches":
            return self.run_branches(x)
        if chains is None:
            weight, bias = self.keep(tuple(self.own_tensors()), self.fold)
            return _convolve(x, weight, bias, self.window)
        moments = measure_moments(x, self.window, sync_group(self))
        with disable_autocast(x.device):
            weight, bias = collapse([chains], moments)
        return _convolve(moments.source, weight, bias, self.window)

    fuse = Pyramid.fuse

    def extra_repr(self) -> str:
        window = ", ".join(f"{name}={value}" for name, value in self.window._asdict().items())
        return f"{super().extra_repr()}, {window}"


class BranchedConv2d(PyramidConv2d):
    """A `PyramidConv2d` that runs every branch on all positions, as the paper does: the same function and state.

    Shape: x (B, C, H, W) -> (B, out, H', W')
    Source: TDRL eq. 8

    Example:
        >>> iso.layers.BranchedConv2d(8, 16, kernel_size=3, padding=1)(torch.randn(2, 8, 6, 6)).shape
        torch.Size([2, 16, 6, 6])
    """

    @batched
    def forward(self, x: Tensor) -> Tensor:
        return self.run_branches(x)

    fuse = Pyramid.fuse


def _convolve(x: Tensor, weight: Tensor, bias: Tensor, window: Window) -> Tensor:
    """Convolve with a matrix on patches as filters, in autocast's dtype.

    Shape: x (B, C, H, W), weight (G, out, n c), bias (G, out) -> (B, out, H', W')
    """
    dtype, filters = autocast_dtype(x), weight.flatten(0, 1).unflatten(1, (-1, *window.kernel_size))
    return F.conv2d(x, cast_clamped(filters, dtype), bias.flatten().to(dtype), *window[1:])


class Unit(NamedTuple):
    """A convolution, or a pyramid, and the BatchNorm after it; None stands for the identity."""

    conv: PyramidConv2d | nn.Conv2d | None
    norm: _BatchNorm


def convolve_units(x: Tensor, units: Sequence[Unit], window: Window, group: Any) -> Tensor | None:
    """Return the sum of units in training, computed as one convolution; None if they cannot be.

    `group` are the processes that share BatchNorm statistics.

    Shape: x (B, C, H, W) -> (B, out, H', W')
    """
    chains: list[Chains] = []
    plain: list[Any] = []
    for conv, norm in units:
        if isinstance(conv, Pyramid):
            kind, own = conv.parts()
            if own is None or own.rectifier is not None or kind != "batch":
                return None
            chains.append(own._replace(rectifier=norm))
        else:
            plain.append([(*_filters(conv, window, x), norm)])
    norms = [norm for conv, norm in units] + [norm for each in chains for norm in each.norms]
    if not all(norm.training or norm.running_mean is None for norm in norms) or len({norm.eps for norm in norms}) > 1:
        return None
    chains += [Chains(plain, [], None, None, 1.0)] if plain else []
    moments = measure_moments(x, window, group)
    with disable_autocast(x.device):
        weight, bias = collapse(chains, moments)
        if len(chains) > 1:
            weight, bias = (each.unflatten(1, (len(chains), -1)).sum(1) for each in (weight, bias))
    return _convolve(moments.source, weight, bias, window)


def _filters(conv: nn.Conv2d | None, window: Window, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the filters of a convolution, or of the identity, on whole patches. Shape: -> (out, c, k, k)"""
    if conv is None:
        channels = x.shape[1] // window.groups
        weight = torch.eye(channels, device=x.device, dtype=x.dtype).repeat(window.groups, 1).view(-1, channels, 1, 1)
    else:
        weight = conv.weight
    high, wide = (size // 2 for size in window.kernel_size)
    if weight.shape[-2:] != window.kernel_size:  # reads the middle of each patch
        weight = F.pad(weight, (wide, wide, high, high))
    return weight, None if conv is None else conv.bias
