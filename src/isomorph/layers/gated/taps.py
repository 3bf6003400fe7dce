"""A convolution with soft taps: each filter reads a weighted mean that is separable in rows and columns.

    y = sum_h (rows_h (x) columns_h) x filter_h

The backward pass computes what the heads have read again, and keeps only x: work and memory are linear in the number
of positions. A CPU computes the heads one after the other, so that a working set of the size of x stays in its cache (2
to 5 times as fast there); elsewhere all heads are computed at once, in few operations.

On a CPU, heads that read only near positions are one convolution. Far from the border a head reads the same kernel
around every query, and beyond some reach its weights are below the precision of the numbers:

    kernel[o, c, u, v] = sum_h filter_h[o, c] rows_h[u] columns_h[v]

Queries whose reach crosses the border read a kernel that is normalised over fewer keys: they are computed by head. With
centres on the taps and a high locality, a layer is therefore the convolution that it was recast from, at its cost.

Letters: B batch, C channels, H W key grid, Hq Wq query grid, nh heads, G groups of channels, N = Hq Wq B.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.gated.positions import centred_axis_attention, without_subnormals
from isomorph.layers.modes import Gradients, SavesInputs, on_cpu

# Fewest channels for which a CPU computes the heads one by one (measured at commit 495856f).
MIN_CHANNELS = 16

# Time of a multiplication head by head, relative to one of a convolution (measured by
# benchmarks/gpsa_stages.py).
BY_HEAD_COST = 1.5

# First index, and the one after the last.
Range = tuple[int, int]


def _swap_grid(x: Tensor) -> Tensor:
    """Move the grid to the front, or back. Shape: (B, C, H, W) -> (H, W, B, C), or the other way round"""
    return x.permute(2, 3, 0, 1)


def _attend_axes(grid: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the column maps of every query row, what all heads read along the rows, and along both axes.

    Shape: grid (H, W, B C), rows, columns -> (nh Hq, Wq, W), (nh Hq, W, B C), (nh Hq, Wq, B C)
    """
    nh, Hq, _ = rows.shape
    lines = columns[:, None].expand(nh, Hq, -1, -1).flatten(0, 1)  # (nh Hq, Wq, W)
    halfway = torch.mm(rows.flatten(0, 1), grid.flatten(1))  # (nh Hq, W B C)
    halfway = halfway.unflatten(1, grid.shape[1:])  # (nh Hq, W, B C)
    return lines, halfway, torch.bmm(lines, halfway)


def _to_patches(attended: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Arrange what heads read as a convolution does. Shape: (nh Hq, Wq, B C) -> (B, C nh, Hq Wq)"""
    by_image = attended.unflatten(2, x.shape[:2])  # (nh Hq, Wq, B, C)
    by_head = by_image.unflatten(0, rows.shape[:2]).flatten(1, 2)  # (nh, Hq Wq, B, C)
    return by_head.permute(2, 3, 0, 1).flatten(1, 2)


class _TapsAtOnce(SavesInputs):
    """Shape: x (B, C, H, W), rows (nh, Hq, H), columns (nh, Wq, W), filters (C_out, C nh / G, 1) -> as x, C_out wide"""

    @staticmethod
    def forward(x: Tensor, rows: Tensor, columns: Tensor, filters: Tensor, groups: int) -> Tensor:
        grid = _swap_grid(x).flatten(2)  # (H, W, B C)
        attended = _attend_axes(grid, rows, columns)[2]
        return F.conv1d(_to_patches(attended, x, rows), filters, groups=groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, rows, columns, filters = ctx.saved_tensors
        B, C, H, W = x.shape
        nh, Hq, _ = rows.shape
        Wq = columns.shape[1]
        grid = _swap_grid(x).flatten(2)  # (H, W, B C)
        lines, halfway, attended = _attend_axes(grid, rows, columns)
        patches = _to_patches(attended, x, rows)
        output_mask = (True, True, False)
        d_patches, d_filters, _ = torch.ops.aten.convolution_backward(
            grad, patches, filters, None, (1,), (0,), (1,), False, (0,), *ctx.options, output_mask
        )
        by_head = d_patches.unflatten(1, (C, nh)).permute(2, 3, 0, 1).flatten(2)  # (nh, Hq Wq, B C)
        d_attended = by_head.unflatten(1, (Hq, Wq)).flatten(0, 1)  # (nh Hq, Wq, B C)
        d_columns = torch.bmm(d_attended, halfway.mT).unflatten(0, (nh, Hq)).sum(1)
        d_halfway = torch.bmm(lines.mT, d_attended).flatten(1)  # (nh Hq, W B C)
        d_rows = torch.mm(d_halfway, grid.flatten(1).t()).view_as(rows)
        d_grid = torch.mm(rows.flatten(0, 1).t(), d_halfway)  # (H, W B C)
        d_x = _swap_grid(d_grid.view(H, W, B, C))
        return d_x, d_rows, d_columns, d_filters, None


def _taps(filters: Tensor) -> Tensor:
    """Make full or depthwise filters contiguous. Shape: (C_out, C / G, nh) -> (nh, C, C_out) or (nh, C)"""
    if filters.shape[1] == 1:
        return filters[:, 0].t().contiguous()
    return filters.permute(2, 1, 0).contiguous()


def _apply(attended: Tensor, taps: Tensor) -> Tensor:
    """Apply the filter of one head. Shape: attended (N, C), taps (C, C_out) or (C,) -> (N, C_out)"""
    return attended * taps if taps.ndim == 1 else torch.mm(attended, taps)


def _filter_gradient(dy: Tensor, attended: Tensor, taps: Tensor) -> Tensor:
    """Return the gradient of `_apply` by the filter. Shape: dy (N, C_out), attended (N, C) -> (C_out, C) or (C, 1)"""
    if taps.ndim == 1:
        return (dy * attended).sum(0)[:, None]
    return torch.mm(dy.t(), attended)


class _TapsByHead(SavesInputs):
    """Shape: grid (H, W, B, C), rows, columns, filters (C_out, C / G, nh), full or depthwise -> (Hq, Wq, B, C_out)"""

    @staticmethod
    def forward(grid: Tensor, rows: Tensor, columns: Tensor, filters: Tensor) -> Tensor:
        flat = grid.flatten(2)  # (H, W, B C)
        _, _, B, C = grid.shape
        total = None
        for row, column, taps in zip(rows, columns, _taps(filters), strict=True):
            attended = _attend_axes(flat, row[None], column[None])[2]
            y = _apply(attended.view(-1, C), taps)  # (N, C_out)
            total = y if total is None else total.add_(y)
        assert total is not None
        return total.view(rows.shape[1], columns.shape[1], B, len(filters))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        grid, rows, columns, filters = ctx.saved_tensors
        flat = grid.flatten(2)  # (H, W, B C)
        dy = grad.flatten(0, 2)  # (N, C_out)
        d_grid = None
        d_rows = []
        d_columns = []
        d_filters = []
        for row, column, taps in zip(rows, columns, _taps(filters), strict=True):
            lines, halfway, attended = _attend_axes(flat, row[None], column[None])
            patches = attended.reshape(-1, grid.shape[3])  # (N, C)
            d_attended = _apply(dy, taps.t()).reshape(attended.shape)  # (Hq, Wq, B C)
            d_halfway = torch.bmm(lines.mT, d_attended).flatten(1)  # (Hq, W B C)
            d_flat = torch.mm(row.t(), d_halfway)
            d_grid = d_flat if d_grid is None else d_grid + d_flat
            d_rows.append(torch.mm(d_halfway, flat.flatten(1).t()))
            d_columns.append(torch.bmm(d_attended, halfway.mT).sum(0))
            d_filters.append(_filter_gradient(dy, patches, taps))
        assert d_grid is not None
        d_taps = torch.stack(d_filters, dim=2)
        return d_grid.view(grid.shape), torch.stack(d_rows), torch.stack(d_columns), d_taps


def soft_taps(x: Tensor, rows: Tensor, columns: Tensor, filters: Tensor) -> Tensor:
    """Return the convolution of x with soft taps.

    Shape: x (B, C, H, W), rows (nh, Hq, H), columns (nh, Wq, W), filters (C_out, C / G, nh) -> (B, C_out, Hq, Wq)
    """
    groups = x.shape[1] // filters.shape[1]
    by_head = groups == 1 or groups == x.shape[1] == len(filters)
    if on_cpu(x) and x.shape[1] >= MIN_CHANNELS and by_head:
        y = _TapsByHead.apply(_swap_grid(x).contiguous(), rows, columns, filters)
        return _swap_grid(y).contiguous()
    as_convolution = filters.flatten(1)[:, :, None]  # (C_out, C nh / G, 1)
    y = _TapsAtOnce.apply(x, rows, columns, as_convolution, groups)
    return y.unflatten(-1, (rows.shape[1], columns.shape[1]))


@dataclass(frozen=True, eq=False)
class TapAxis:
    """Heads along one axis, and its queries and keys, without padding. Shape: centre and locality (nh,)"""

    kernel_size: int
    stride: int
    padding: int
    queries: int
    keys: int
    centre: Tensor
    locality: Tensor

    @cached_property
    def reach(self) -> int:
        """Distance from a query beyond which no weight counts; the number of padded keys if it leaves the map.

        A weight counts above a seventh of the precision of the localities, relative to the head's largest one.
        """
        smallest = 2 - math.log(torch.finfo(self.centre.dtype).eps)
        off_grid = self.centre - self.centre.round()
        span = (smallest / self.locality + off_grid.square()).sqrt()
        farthest = (self.centre.abs() + span).max()
        # a list of a tensor on the CPU is read from memory, without an operation
        reach: Any = farthest.tolist()
        if reach < 2 * self.keys:
            return max(int(reach), self.kernel_size // 2)
        return self.keys + 2 * self.padding  # for NaN too

    @property
    def taps(self) -> Tensor:
        """What a query far from the border reads within reach. Shape: -> (nh, 2 reach + 1)"""
        offsets = torch.arange(
            -self.reach, self.reach + 1, device=self.centre.device, dtype=self.centre.dtype
        )
        return centred_axis_attention(offsets[None], self.centre, self.locality)[:, 0]

    @cached_property
    def interior(self) -> Range:
        """The queries that have all positions within reach among their padded keys."""
        start = self.kernel_size // 2
        # (reach - start) / stride, rounded up
        first = max(0, -((start - self.reach) // self.stride))
        last = (self.keys + 2 * self.padding - 1 - self.reach - start) // self.stride
        return first, max(first, min(last + 1, self.queries))

    @property
    def window_padding(self) -> int:
        """Padding of the convolution whose kernel is the window."""
        return self.padding + self.reach - self.kernel_size // 2

    def keys_near(self, queries: Range) -> Range:
        """Return the keys that are within reach of one of these queries."""
        start = self.kernel_size // 2 - self.padding
        first = start + self.stride * queries[0] - self.reach
        last = start + self.stride * (queries[1] - 1) + self.reach + 1
        first = min(max(first, 0), self.keys)
        return first, min(max(last, first), self.keys)


def _is_cheaper_folded(x: Tensor, filters: Tensor, rows: TapAxis, columns: TapAxis) -> bool:
    """True if one convolution on all queries costs less than the inner ones head by head, in multiplications."""
    B, C, H, W = x.shape
    out, within, nh = filters.shape
    Hq = rows.queries
    Wq = columns.queries
    top, bottom = rows.interior
    left, right = columns.interior
    inner_queries = (bottom - top) * (right - left)
    filters_cost = out * within
    by_head = nh * (C * W * (H + Wq) / Wq + filters_cost) * inner_queries
    kernel_taps = (2 * rows.reach + 1) * (2 * columns.reach + 1)
    folded = filters_cost * kernel_taps * (Hq * Wq + nh / max(B, 1))
    return folded < BY_HEAD_COST * by_head


def folded_taps(
    x: Tensor, axes: Sequence[TapAxis], filters: Tensor, axis_maps: Callable[[], tuple[Tensor, ...]]
) -> Tensor | None:
    """Return the convolution of x with soft taps by one convolution, or None if that costs more than head by head.

    For eager mode, on a CPU. Only queries near the border need the axis maps, those of `soft_taps`.

    Shape: x (B, C, H, W), filters (C_out, C / G, nh) -> (B, C_out, Hq, Wq)
    """
    rows, columns = axes
    if not _is_cheaper_folded(x, filters, rows, columns):
        return None
    taps = (rows.taps[:, :, None] * columns.taps[:, None]).to(x.dtype)  # (nh, kh, kw)
    kernel = filters @ without_subnormals(taps).flatten(1)  # (C_out, C / G, kh kw)
    kernel = kernel.unflatten(-1, taps.shape[1:])
    stride = (rows.stride, columns.stride)
    padding = (rows.window_padding, columns.window_padding)
    y = F.conv2d(x, kernel, None, stride, padding, groups=x.shape[1] // filters.shape[1])
    return _replace_border(y, x, axes, filters, axis_maps)


def _replace_border(
    y: Tensor,
    x: Tensor,
    axes: Sequence[TapAxis],
    filters: Tensor,
    axis_maps: Callable[[], tuple[Tensor, ...]],
) -> Tensor:
    """Return y with the queries whose reach crosses the border computed head by head, from the keys near them."""
    rows, columns = axes
    top, bottom = rows.interior
    left, right = columns.interior
    Hq, Wq = y.shape[2:]
    if (top, bottom) == (0, Hq) and (left, right) == (0, Wq):
        return y

    def by_head(row_range: Range, column_range: Range) -> Tensor:
        size = (row_range[1] - row_range[0], column_range[1] - column_range[0])
        if 0 in size:
            return y.new_empty(*y.shape[:2], *size)
        query_rows = slice(*row_range)
        query_columns = slice(*column_range)
        key_rows = slice(*rows.keys_near(row_range))
        key_columns = slice(*columns.keys_near(column_range))
        row_maps, column_maps = axis_maps()
        row_maps = row_maps[:, query_rows, key_rows]
        column_maps = column_maps[:, query_columns, key_columns]
        return soft_taps(x[:, :, key_rows, key_columns], row_maps, column_maps, filters)

    before = by_head(rows.interior, (0, left))
    after = by_head(rows.interior, (right, Wq))
    middle = torch.cat([before, y[:, :, top:bottom, left:right], after], 3)
    above = by_head((0, top), (0, Wq))
    below = by_head((bottom, Hq), (0, Wq))
    return torch.cat([above, middle, below], 2)
