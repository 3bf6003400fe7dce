"""Position attention of tap heads as one convolution, where every head reads only a few positions.

Far from the border a head reads the same soft kernel around every query. Beyond some reach its weights are below the
precision of the numbers; the rest of all heads' kernels, weighted by their filters, is one convolution:

    kernel[o, c, u, v] = sum_h filter_h[o, c] rows_h[u] columns_h[v]

Queries whose reach crosses the border read a kernel that is normalised over fewer keys: each border row and column has
one of its own, and the corners are computed head by head. With centres on the taps and a high locality, a layer is
therefore the convolution that it was recast from, at the same cost.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.gated.positions import centred_axis_attention
from isomorph.layers.gated.soft_taps import soft_taps
from isomorph.layers.grid import axis_offsets, conv_output_size

Range = tuple[int, int]
"""First index, and the one after the last."""


class TapAxis(NamedTuple):
    """Queries in the middle of the windows of a convolution along one axis, over zero-padded keys.

    Shape: centre and locality (nh,)
    """

    keys: int
    kernel_size: int
    stride: int
    padding: int
    centre: Tensor
    locality: Tensor

    @property
    def queries(self) -> int:
        """Number of queries."""
        return conv_output_size(self.keys, self.kernel_size, self.stride, self.padding)

    def maps(self, queries: Range | None = None) -> Tensor:
        """Return the position attention of these queries, by default of all. Shape: -> (nh, Nq, keys + 2 padding)"""
        first, last = queries or (0, self.queries)
        start = self.kernel_size // 2 + self.stride * first
        padded, dtype = self.keys + 2 * self.padding, self.centre.dtype
        offsets = axis_offsets(last - first, padded, start, self.stride, self.centre.device, dtype)
        return centred_axis_attention(offsets, self.centre, self.locality)

    def unpadded_maps(self, queries: Range | None = None, keys: Range | None = None) -> Tensor:
        """Return the maps of these queries to these keys, counted without padding; by default of all to all.

        Shape: -> (nh, Nq, Nk)
        """
        first, last = keys or (0, self.keys)
        return self.maps(queries)[..., self.padding + first : self.padding + last]

    def window(self, reach: int) -> Tensor:
        """Return what a query far from the border reads at most `reach` steps away. Shape: -> (nh, 2 reach + 1)"""
        offsets = torch.arange(-reach, reach + 1, device=self.centre.device, dtype=self.centre.dtype)
        return centred_axis_attention(offsets[None], self.centre, self.locality)[:, 0]

    def interior(self, reach: int) -> Range:
        """Return the queries that have all positions at most `reach` steps away among their padded keys."""
        start, last = self.kernel_size // 2, self.keys + 2 * self.padding - 1
        first = max(0, -((start - reach) // self.stride))
        return first, min((last - reach - start) // self.stride + 1, self.queries)

    def keys_near(self, queries: Range, reach: int) -> Range:
        """Return the keys without padding that are at most `reach` steps from one of these queries."""
        start = self.kernel_size // 2 - self.padding
        first, last = start + self.stride * queries[0] - reach, start + self.stride * (queries[1] - 1) + reach + 1
        first = min(max(first, 0), self.keys)
        return first, min(max(last, first), self.keys)


BY_HEAD_COST = 1.5
"""Time of a multiplication head by head, relative to one of a convolution (measured by benchmarks/gpsa_stages.py)."""


def head_reach(axis: TapAxis) -> float:
    """Return the distance from a query beyond which no head's weight counts at the precision of the localities.

    A weight counts if it is above a seventh of the precision, relative to the head's largest one.
    """
    smallest = 2 - math.log(torch.finfo(axis.centre.dtype).eps)
    off_grid = axis.centre - axis.centre.round()
    # a list of a tensor on the CPU is read from memory, without an operation
    return (axis.centre.abs() + (smallest / axis.locality + off_grid.square()).sqrt()).max().tolist()  # type: ignore[return-value]


def folded_reach(x: Tensor, rows: TapAxis, columns: TapAxis, filters: Tensor) -> tuple[int, int] | None:
    """Return the reach of the heads along both axes, or None if a convolution of that reach costs more than its heads.

    The reach is a fact about parameters, which a graph cannot branch on: it is asked for in eager mode, on a CPU.

    Shape: x (B, C, H, W), filters (C_out, C / groups, nh)
    """
    found = []
    for axis in (rows, columns):
        reach = head_reach(axis)
        if not reach < 2 * axis.keys:  # NaN too
            return None
        found.append(max(int(reach), axis.kernel_size // 2))
    reach_rows, reach_columns = found
    return (reach_rows, reach_columns) if _is_cheaper(x, rows, columns, found, filters) else None


def _is_cheaper(x: Tensor, rows: TapAxis, columns: TapAxis, reach: list[int], filters: Tensor) -> bool:
    """True if the convolution of this reach, with its border, costs less than all heads one by one."""
    (B, C, H, W), (out, within, nh), Hq, Wq = x.shape, filters.shape, rows.queries, columns.queries
    inner = [axis.interior(each) for axis, each in zip((rows, columns), reach, strict=True)]
    if not all(first < last for first, last in inner):
        return False
    kernels = 1 + Hq + Wq - sum(last - first for first, last in inner)
    folded = out * within * math.prod(2 * each + 1 for each in reach) * (B * Hq * Wq + nh * kernels)
    return folded < BY_HEAD_COST * B * nh * (C * Hq * W * (H + Wq) + Hq * Wq * out * within)


def fold_kernel(filters: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the kernel of all heads together.

    Shape: filters (C_out, C / groups, nh), rows (nh, kh), columns (nh, kw) -> (C_out, C / groups, kh, kw)
    """
    each_head = rows[:, :, None] * columns[:, None, :]  # (nh, kh, kw)
    # products with numbers below the smallest normal one take up to forty times as long
    each_head = F.threshold(each_head, torch.finfo(each_head.dtype).tiny ** 0.5, 0.0)
    return (filters @ each_head.flatten(1).to(filters.dtype)).unflatten(-1, each_head.shape[1:])


def folded_taps(x: Tensor, rows: TapAxis, columns: TapAxis, reach: tuple[int, int], filters: Tensor) -> Tensor:
    """Return the convolution of x with soft taps, of which none reads further than `reach`.

    Shape: x (B, C, H, W), filters (C_out, C / groups, nh) -> (B, C_out, Hq, Wq)
    """
    axes = (rows, columns)
    kernel = fold_kernel(filters, *(axis.window(far) for axis, far in zip(axes, reach, strict=True)))
    y = F.conv2d(x, kernel, None, (rows.stride, columns.stride), _padding(axes, reach), groups=_groups(x, filters))
    inner = [axis.interior(far) for axis, far in zip(axes, reach, strict=True)]
    parts = [[(0, first), (first, last), (last, n)] for (first, last), n in zip(inner, y.shape[-2:], strict=True)]

    def block(own: tuple[Range, Range]) -> Tensor:
        if own == tuple(inner):
            return y[:, :, slice(*own[0]), slice(*own[1])]
        if own[0] != inner[0] and own[1] != inner[1]:
            return _corner(x, axes, own, reach, filters)
        line = 0 if own[1] == inner[1] else 1
        lines = [_line(x, axes, line, query, reach, filters) for query in range(*own[line])]
        return torch.cat(lines, 2 + line).narrow(3 - line, inner[1 - line][0], inner[1 - line][1] - inner[1 - line][0])

    def join(blocks: list[Tensor], dim: int) -> Tensor:
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)

    high, wide = ([part for part in each if part[0] < part[1]] for each in parts)
    return join([join([block((row, column)) for column in wide], -1) for row in high], -2)


def _groups(x: Tensor, filters: Tensor) -> int:
    return x.shape[1] // filters.shape[1]


def _padding(axes: tuple[TapAxis, TapAxis], reach: tuple[int, int]) -> list[int]:
    """Return the padding with which a convolution of this reach has the same queries."""
    return [axis.padding + far - axis.kernel_size // 2 for axis, far in zip(axes, reach, strict=True)]


def _line(
    x: Tensor, axes: tuple[TapAxis, TapAxis], line: int, query: int, reach: tuple[int, int], filters: Tensor
) -> Tensor:
    """Return the outputs of one row (line 0) or column (line 1) of queries, as a convolution along it."""
    axis, other = axes[line], axes[1 - line]
    first, last = axis.keys_near((query, query + 1), reach[line])
    maps = axis.unpadded_maps((query, query + 1), (first, last))[:, 0]  # (nh, keys)
    across = other.window(reach[1 - line])
    kernel = fold_kernel(filters, *((maps, across) if line == 0 else (across, maps)))
    stride, padding = [other.stride] * 2, [_padding(axes, reach)[1 - line]] * 2
    stride[line], padding[line] = 1, 0
    near = x.narrow(2 + line, first, last - first)
    if first == last:  # it reads the padding only
        near, kernel = F.pad(near, (0, line, 0, 1 - line)), F.pad(kernel, (0, line, 0, 1 - line))
    return F.conv2d(near, kernel, None, stride, padding, groups=_groups(x, filters))


def _corner(
    x: Tensor, axes: tuple[TapAxis, TapAxis], queries: tuple[Range, Range], reach: tuple[int, int], filters: Tensor
) -> Tensor:
    """Return the outputs of some queries, computed head by head from the keys that they reach."""
    near = [axis.keys_near(own, far) for axis, own, far in zip(axes, queries, reach, strict=True)]
    parts = zip(axes, queries, near, strict=True)
    rows, columns = (axis.unpadded_maps(own, keys).to(x.dtype) for axis, own, keys in parts)
    (up, down), (left, right) = near
    return soft_taps(x[:, :, up:down, left:right], rows, columns, filters)
