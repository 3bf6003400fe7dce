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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.gated.positions import centred_axis_attention, without_subnormals
from isomorph.layers.modes import on_cpu

# Fewest channels for which a CPU computes the heads one by one (measured at commit 495856f).
MIN_CHANNELS = 16

# Time of a multiplication head by head, relative to one of a convolution (measured by benchmarks/gpsa_stages.py).
BY_HEAD_COST = 1.5

# First index, and the one after the last.
Range = tuple[int, int]


def _read(grid: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the column maps of every query row, what all heads read along the rows, and along both axes.

    Shape: grid (H, W, B C), rows, columns -> (nh Hq, Wq, W), (nh Hq, W, B C), (nh Hq, Wq, B C)
    """
    lines = columns[:, None].expand(-1, rows.shape[1], -1, -1).flatten(0, 1)  # (nh Hq, Wq, W)
    halfway = torch.mm(rows.flatten(0, 1), grid.flatten(1)).unflatten(1, grid.shape[1:])  # (nh Hq, W, B C)
    return lines, halfway, torch.bmm(lines, halfway)


def _to_patches(read: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Arrange what heads read as a convolution does. Shape: (nh Hq, Wq, B C) -> (B, C nh, Hq Wq)"""
    each = read.unflatten(2, x.shape[:2]).unflatten(0, rows.shape[:2]).flatten(1, 2)  # (nh, Hq Wq, B, C)
    return each.permute(2, 3, 0, 1).flatten(1, 2)


class _TapsAtOnce(torch.autograd.Function):
    """Shape: x (B, C, H, W), rows (nh, Hq, H), columns (nh, Wq, W), filters (C_out, C nh / G, 1) -> as x, C_out wide"""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: Tensor, columns: Tensor, filters: Tensor, groups: int) -> Tensor:
        grid = x.permute(2, 3, 0, 1).flatten(2)  # (H, W, B C)
        read = _read(grid, rows, columns)[2]
        return F.conv1d(_to_patches(read, x, rows), filters, groups=groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.groups = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rows, columns, filters = ctx.saved_tensors
        grid = x.permute(2, 3, 0, 1).flatten(2)  # (H, W, B C)
        lines, halfway, read = _read(grid, rows, columns)
        patches = _to_patches(read, x, rows)
        arguments = (None, (1,), (0,), (1,), False, (0,), ctx.groups, (True, True, False))
        d_patches, d_filters, _ = torch.ops.aten.convolution_backward(grad, patches, filters, *arguments)
        each = d_patches.unflatten(1, (x.shape[1], rows.shape[0])).permute(2, 3, 0, 1).flatten(2)  # (nh, Hq Wq, B C)
        d_read = each.unflatten(1, (rows.shape[1], columns.shape[1])).flatten(0, 1)  # (nh Hq, Wq, B C)
        d_columns = torch.bmm(d_read, halfway.mT).unflatten(0, rows.shape[:2]).sum(1)
        d_halfway = torch.bmm(lines.mT, d_read).flatten(1)  # (nh Hq, W B C)
        d_rows = torch.mm(d_halfway, grid.flatten(1).t()).view_as(rows)
        d_grid = torch.mm(rows.flatten(0, 1).t(), d_halfway)  # (H, W B C)
        d_x = d_grid.view(x.shape[2], x.shape[3], *x.shape[:2]).permute(2, 3, 0, 1)
        return d_x, d_rows, d_columns, d_filters, None


def _taps(filters: Tensor) -> Tensor:
    """Make full or depthwise filters contiguous. Shape: (C_out, C / G, nh) -> (nh, C, C_out) or (nh, C)"""
    return (filters[:, 0].t() if filters.shape[1] == 1 else filters.permute(2, 1, 0)).contiguous()


def _apply(read: Tensor, taps: Tensor) -> Tensor:
    """Apply the filter of one head. Shape: read (N, C), taps (C, C_out) or (C,) -> (N, C_out)"""
    return read * taps if taps.ndim == 1 else torch.mm(read, taps)


class _TapsByHead(torch.autograd.Function):
    """Shape: grid (H, W, B, C), rows, columns, filters (C_out, C / G, nh), full or depthwise -> (Hq, Wq, B, C_out)"""

    generate_vmap_rule = True

    @staticmethod
    def forward(grid: Tensor, rows: Tensor, columns: Tensor, filters: Tensor) -> Tensor:
        flat, (B, C), total = grid.flatten(2), grid.shape[2:], None
        for row, column, taps in zip(rows, columns, _taps(filters), strict=True):
            y = _apply(_read(flat, row[None], column[None])[2].view(-1, C), taps)  # (N, C_out)
            total = y if total is None else total.add_(y)
        assert total is not None
        return total.view(rows.shape[1], columns.shape[1], B, len(filters))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grid, rows, columns, filters = ctx.saved_tensors
        flat, dy, d_grid, others = grid.flatten(2), grad.flatten(0, 2), None, []  # (H, W, B C), (N, C_out)
        for row, column, taps in zip(rows, columns, _taps(filters), strict=True):
            lines, halfway, read = _read(flat, row[None], column[None])
            near = read.reshape(-1, grid.shape[3])  # (N, C)
            d_taps = (dy * near).sum(0)[:, None] if taps.ndim == 1 else torch.mm(dy.t(), near)  # (C_out, C / G)
            d_read = _apply(dy, taps.t()).reshape(read.shape)  # (Hq, Wq, B C)
            d_halfway = torch.bmm(lines.mT, d_read).flatten(1)  # (Hq, W B C)
            d_flat = torch.mm(row.t(), d_halfway)
            d_grid = d_flat if d_grid is None else d_grid + d_flat
            d_row = torch.mm(d_halfway, flat.flatten(1).t())
            others.append((d_row, torch.bmm(d_read, halfway.mT).sum(0), d_taps))
        assert d_grid is not None
        d_rows, d_columns, d_filters = zip(*others, strict=True)
        return d_grid.view(grid.shape), torch.stack(d_rows), torch.stack(d_columns), torch.stack(d_filters, dim=2)


def soft_taps(x: Tensor, rows: Tensor, columns: Tensor, filters: Tensor) -> Tensor:
    """Return the convolution of x with soft taps.

    Shape: x (B, C, H, W), rows (nh, Hq, H), columns (nh, Wq, W), filters (C_out, C / G, nh) -> (B, C_out, Hq, Wq)
    """
    groups = x.shape[1] // filters.shape[1]
    by_head = groups == 1 or groups == x.shape[1] == len(filters)
    if on_cpu(x) and x.shape[1] >= MIN_CHANNELS and by_head:
        grid = x.permute(2, 3, 0, 1).contiguous()  # (H, W, B, C)
        return _TapsByHead.apply(grid, rows, columns, filters).permute(2, 3, 0, 1).contiguous()
    y = _TapsAtOnce.apply(x, rows, columns, filters.flatten(1)[:, :, None], groups)
    return y.unflatten(-1, (rows.shape[1], columns.shape[1]))


class TapAxis(NamedTuple):
    """Heads along one axis, and its queries and keys, without padding. Shape: centre and locality (nh,)"""

    kernel_size: int
    stride: int
    padding: int
    queries: int
    keys: int
    centre: Tensor
    locality: Tensor

    def reach(self) -> int | None:
        """Return the distance from a query beyond which no weight counts, or None if it is larger than the map.

        One counts above a seventh of the precision of the localities, relative to the head's largest one.
        """
        smallest = 2 - math.log(torch.finfo(self.centre.dtype).eps)
        off_grid = self.centre - self.centre.round()
        far = (self.centre.abs() + (smallest / self.locality + off_grid.square()).sqrt()).max()
        # a list of a tensor on the CPU is read from memory, without an operation
        reach: Any = far.tolist()
        return max(int(reach), self.kernel_size // 2) if reach < 2 * self.keys else None  # None for NaN too

    def window(self, reach: int) -> Tensor:
        """Return what a query far from the border reads at most `reach` steps away. Shape: -> (nh, 2 reach + 1)"""
        offsets = torch.arange(-reach, reach + 1, device=self.centre.device, dtype=self.centre.dtype)
        return centred_axis_attention(offsets[None], self.centre, self.locality)[:, 0]

    def interior(self, reach: int) -> Range:
        """Return the queries that have all positions at most `reach` steps away among their padded keys."""
        start = self.kernel_size // 2
        first = max(0, -((start - reach) // self.stride))
        last = (self.keys + 2 * self.padding - 1 - reach - start) // self.stride
        return first, min(last + 1, self.queries)

    def keys_near(self, queries: Range, reach: int) -> Range:
        """Return the keys that are at most `reach` steps from one of these queries."""
        start = self.kernel_size // 2 - self.padding
        first = start + self.stride * queries[0] - reach
        last = start + self.stride * (queries[1] - 1) + reach + 1
        first = min(max(first, 0), self.keys)
        return first, min(max(last, first), self.keys)


def folded_taps(
    x: Tensor, axes: Sequence[TapAxis], filters: Tensor, axis_maps: Callable[[], tuple[Tensor, ...]]
) -> Tensor | None:
    """Return the convolution of x with soft taps by one convolution, or None if that costs more than head by head.

    For eager mode, on a CPU. Only queries near the border need the axis maps, those of `soft_taps`.

    Shape: x (B, C, H, W), filters (C_out, C / G, nh) -> (B, C_out, Hq, Wq)
    """
    reach = [far for axis in axes if (far := axis.reach()) is not None]
    if len(reach) < len(axes):
        return None
    inner = [axis.interior(far) for axis, far in zip(axes, reach, strict=True)]
    (top, bottom), (left, right) = inner
    (B, C, H, W), (out, within, nh), (Hq, Wq) = x.shape, filters.shape, (axis.queries for axis in axes)
    saved = nh * (C * W * (H + Wq) / Wq + out * within) * max(bottom - top, 0) * max(right - left, 0)  # by head
    if out * within * math.prod(2 * far + 1 for far in reach) * (Hq * Wq + nh / max(B, 1)) >= BY_HEAD_COST * saved:
        return None

    high, wide = (axis.window(far) for axis, far in zip(axes, reach, strict=True))
    each_head = (high[:, :, None] * wide[:, None]).to(x.dtype)  # (nh, kh, kw)
    kernel = (filters @ without_subnormals(each_head).flatten(1)).unflatten(-1, each_head.shape[1:])
    padding = [axis.padding + far - axis.kernel_size // 2 for axis, far in zip(axes, reach, strict=True)]
    y = F.conv2d(x, kernel, None, [axis.stride for axis in axes], padding, groups=C // within)
    if (Hq, Wq) == (bottom - top, right - left):
        return y

    def by_head(*queries: Range) -> Tensor:
        if any(first == last for first, last in queries):
            return y.new_empty(B, out, *(last - first for first, last in queries))
        near = [axis.keys_near(own, far) for axis, own, far in zip(axes, queries, reach, strict=True)]
        parts = zip(axis_maps(), queries, near, strict=True)
        rows, columns = (maps[:, slice(*own), slice(*keys)] for maps, own, keys in parts)
        return soft_taps(x[:, :, slice(*near[0]), slice(*near[1])], rows, columns, filters)

    middle = by_head(inner[0], (0, left)), y[:, :, top:bottom, left:right], by_head(inner[0], (right, Wq))
    return torch.cat([by_head((0, top), (0, Wq)), torch.cat(middle, 3), by_head((bottom, Hq), (0, Wq))], 2)
