"""The patches that a convolution reads, as tokens of a linear layer, and sums over patches that overlap.

Taps a and b of a patch at p read x[p + a] and x[p + b]. Their product, summed over all positions p, depends on the taps
by the lag b - a alone, but for what the border cuts off. So the weight gradient of one convolution gives the sums of
all pairs of taps. The patches, h w times as large as the map, are not formed:

    T[d] = sum_u x[u] x[u + d]^T
    (sum_p p p^T)[a, b] = T[b - a] - (positions that are no outputs, but from which both taps read the map)

Letters: M tokens, or L positions in each image; G groups of c channels, C = G c; kernels of h x w taps.
"""

import math
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from isomorph.layers.grid import GridSize
from isomorph.layers.modes import is_arithmetic_bound


class Window(NamedTuple):
    """The window of a convolution: the patches that it reads as its tokens."""

    kernel_size: GridSize
    stride: GridSize
    padding: GridSize
    dilation: GridSize
    groups: int

    @property
    def is_pointwise(self) -> bool:
        """True for a 1x1 convolution without stride and padding, whose patches are the positions themselves."""
        return self.kernel_size == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)

    def output_size(self, x: Tensor) -> GridSize:
        """Return the height and width of the map that the convolution gives."""
        H, W = x.shape[-2:]
        return self._positions(0, H), self._positions(1, W)

    def _positions(self, axis: int, size: int) -> int:
        extent = self.dilation[axis] * (self.kernel_size[axis] - 1) + 1
        return (size + 2 * self.padding[axis] - extent) // self.stride[axis] + 1


def read_tokens(x: Tensor, window: Window | None) -> Tensor:
    """Shape: x (*, C) -> (1, M, C); with a window x (B, C, H, W) -> (G, M, C k k / G)"""
    if window is None:
        return x.flatten(0, -2).unsqueeze(0)
    if window.is_pointwise:
        patches = x.flatten(2)
    else:
        patches = F.unfold(x, window.kernel_size, window.dilation, window.padding, window.stride)
    by_channel = patches.permute(1, 0, 2).flatten(1)  # (C k k, M)
    return by_channel.unflatten(0, (window.groups, -1)).mT


def scatter_tokens(tokens: Tensor, shape: torch.Size, window: Window | None) -> Tensor:
    """Add every token's values where they were read: the adjoint of `read_tokens`."""
    if window is None:
        return tokens.view(shape)
    images = shape[0]
    by_channel = tokens.mT.flatten(0, 1)  # (C k k, M)
    by_image = by_channel.unflatten(1, (images, -1 if images else 0))
    patches = by_image.permute(1, 0, 2)  # (B, C k k, L)
    if window.is_pointwise or not images:
        return patches.reshape(shape)  # torch's fold does not accept an empty batch
    return F.fold(
        patches, shape[-2:], window.kernel_size, window.dilation, window.padding, window.stride
    )


def count_tokens(x: Tensor, window: Window | None) -> int:
    """Return the number of tokens that `read_tokens` gives in each group."""
    if window is None:
        return x.shape[:-1].numel()
    return len(x) * math.prod(window.output_size(x))


# Least variance of a tap, in rounding units of the largest sum of squares of its channel. A tap
# that reads almost only zeros would otherwise have the rounding error of the other taps, which may
# be negative.
FLOOR_ULPS = 1024


def is_summed_by_lag(x: Tensor, window: Window) -> bool:
    """True if sums over patches are computed by lag: on a CPU, as a GPU takes longer for the additional operations.

    The kernel is padded by half its size or more: elsewhere the border is most of the map.
    """
    h, w = window.kernel_size
    top, side = window.padding
    if not is_arithmetic_bound(x) or len(x) == 0:
        return False
    dense = window.stride == window.dilation == (1, 1) != window.kernel_size
    padded = h <= 2 * top + 1 and w <= 2 * side + 1
    fits = x.shape[2] >= h and x.shape[3] >= w
    return dense and padded and fits


def _border_strips(x: Tensor, window: Window) -> list[tuple[Tensor, tuple[Any, ...], Window]]:
    """Return the strips of a map that are read from positions that are no outputs, with the taps and the window."""
    h, w = window.kernel_size
    top, side = window.padding
    every = slice(None)
    strips = []
    for n in range(1, h - top):  # n rows of a patch are inside the map
        row_window = Window((n, w), (1, 1), (0, w - 1), (1, 1), window.groups)
        last_rows = (slice(h - n, h), every)
        first_rows = (slice(n), every)
        strips.append((x[:, :, :n], last_rows, row_window))
        strips.append((x[:, :, -n:], first_rows, row_window))
    for n in range(1, w - side):
        column_window = Window((h, n), (1, 1), (top, 0), (1, 1), window.groups)
        last_columns = (every, slice(w - n, w))
        first_columns = (every, slice(n))
        strips.append((x[..., :n], last_columns, column_window))
        strips.append((x[..., -n:], first_columns, column_window))
    return strips


def sum_products(x: Tensor, window: Window) -> Tensor:
    """Return the sum of p p^T over all patches p, for a window that `is_summed_by_lag` accepts.

    The entry for the taps a and b is a sum over the whole map that depends on b - a alone, T[b - a], less what is read
    at the border from positions that are no outputs.

    Shape: x (B, C, H, W), kernel h x w -> (G, c h w, c h w)
    """
    h, w = window.kernel_size
    not_above = _sum_by_lag(x, window)  # T[d], d of 0 to h - 1 rows
    above = not_above[..., 1:, :].transpose(1, 2).flip(-2, -1)  # T[-d] = T[d]^T
    by_lag = torch.cat([above, not_above], -2)  # (G, c, c, 2 h - 1, 2 w - 1)
    # a window of lags that begins at h - 1 - a holds T[b - a] for all b
    by_taps = by_lag.unfold(-2, h, 1).unfold(-2, w, 1).flip(3, 4)  # (G, c, c, a, b), a and b (h, w)
    sums = by_taps.permute(0, 1, 3, 4, 2, 5, 6).contiguous()  # (G, c, a, c, b)
    for strip, (rows, columns), strip_window in _border_strips(x, window):
        tokens = read_tokens(strip, strip_window)
        block = sums[:, :, rows, columns, :, rows, columns]
        block -= torch.bmm(tokens.mT, tokens).view(block.shape)
    return sums.flatten(4).flatten(1, 3)


def _sum_by_lag(x: Tensor, window: Window) -> Tensor:
    """Return T[d] for lags d of 0 to h - 1 rows and of 1 - w to w - 1 columns. Shape: -> (G, c, c, h, 2 w - 1)"""
    h, w = window.kernel_size
    groups = window.groups
    channels = x.shape[1]
    size = (channels, channels // groups, h, 2 * w - 1)
    sixteenth = math.ceil(len(x) / 16)
    within_8192 = 8192 // x.shape[-2:].numel()
    chunk = max(1, min(sixteenth, within_8192))  # images at a time: long sums lose digits
    padded = F.pad(x, (w - 1, w - 1, 0, h - 1))
    parts = []
    for padded_images, images in zip(padded.split(chunk), x.split(chunk), strict=True):
        parts.append(conv2d_weight(padded_images, size, images, groups=groups))
    return reduce(torch.add, parts).unflatten(0, (groups, -1))


def apply_to_patches(x: Tensor, slope: Tensor, window: Window) -> Tensor:
    """Return the sum of slope p over all patches p, each added where p was read, for a symmetric slope.

    It is half the gradient of the sum of p^T slope p.

    Shape: x (B, C, H, W), slope (G, c h w, c h w) -> (B, C, H, W)
    """
    h, w = window.kernel_size
    below = h - 1
    right = w - 1
    pairs = slope.unflatten(2, (-1, h, w)).unflatten(1, (-1, h, w))  # (G, c, h, w, c, h, w)
    by_tap = []
    for i in range(h):
        for j in range(w):
            by_tap.append(F.pad(pairs[:, :, i, j], (right - j, j, below - i, i)))
    lags = reduce(torch.add, by_tap)
    added = F.conv2d(x, lags.flatten(0, 1), padding=(below, right), groups=window.groups)
    strips = zip(_border_strips(x, window), _border_strips(added, window), strict=True)
    for (strip, (rows, columns), strip_window), (part, *_) in strips:
        pairs_of_strip = pairs[:, :, rows, columns, :, rows, columns]
        block = pairs_of_strip.flatten(4).flatten(1, 3)
        if max(window.kernel_size) > 3:
            tokens = torch.bmm(read_tokens(strip, strip_window), block)
            part -= scatter_tokens(tokens, strip.shape, strip_window)
        else:  # nine small convolutions in all
            part -= apply_to_patches(strip, block, strip_window)
    return added


def measure_patches(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Return the mean and covariance of all patches.

    A level of each channel is subtracted first: the result is the same for any, and its mean loses the fewest digits.

    Shape: x (B, C, H, W) -> (G, c h w), (G, c h w, c h w)
    """
    average = x.mean(0, keepdim=True)
    level = average.mean((2, 3), keepdim=True)
    one_patch = level.expand(-1, -1, *window.kernel_size)
    levels = read_tokens(one_patch, window._replace(padding=(0, 0)))  # (G, 1, c h w)
    inside = read_tokens(average - level, window)  # (G, L, c h w): 0 outside the map
    patches = read_tokens(average, window) - levels
    positions = patches.shape[1]
    mean = patches.mean(1, keepdim=True)
    outside = torch.bmm(patches.mT, patches) - torch.bmm(inside.mT, inside)
    products = sum_products(x - level, window) / (len(x) * positions)
    covariance = products + outside / positions - mean.mT * mean
    covariance.diagonal(dim1=1, dim2=2).clamp_(min=_least_variance(products, patches, window))
    return (mean + levels).squeeze(1), covariance


def _least_variance(products: Tensor, patches: Tensor, window: Window) -> Tensor:
    """Return what rounding leaves of the variance of each tap. Shape: -> (G, c h w)"""
    taps = math.prod(window.kernel_size)
    squares = products.diagonal(dim1=1, dim2=2).unflatten(1, (-1, taps))  # (G, c, h w)
    largest = squares.amax(2).repeat_interleave(taps, 1)
    floor = FLOOR_ULPS * torch.finfo(products.dtype).eps
    return (largest + patches.square().mean(1)) * floor
