"""A convolution with soft taps: each filter reads a weighted mean that is separable in rows and columns.

    y = sum_h (rows_h (x) columns_h) x filter_h

The heads are computed one after the other, so that a working set of the size of x stays in a CPU's cache; the backward
pass computes what each head has read again, and keeps only x. Work and memory are linear in the number of positions.

Letters: B batch, C channels, H W key grid, Hq Wq query grid, nh heads, G groups of channels, N = Hq Wq B.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.gated.positions import centred_axis_attention
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


MIN_CHANNELS = 16
"""Fewest channels for which heads are computed one by one; below, all at once (measured at commit 495856f)."""


def _read(rows: Tensor, columns: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Return what one head reads along the rows, and along both axes.

    Shape: rows (Hq, H), columns (Wq, W), grid (H, W, M) -> (Hq, W, M), (Hq, Wq, M)
    """
    halfway = torch.mm(rows, grid.flatten(1)).unflatten(1, grid.shape[1:])  # (Hq, W, M)
    return halfway, torch.bmm(columns.expand(rows.shape[0], -1, -1), halfway)


def _by_head(filters: Tensor, channels: int) -> Tensor:
    """Return a copy with one matrix after the other. Shape: (C_out, C / G, nh) -> (nh, G, C / G, C_out / G)"""
    groups = channels // filters.shape[1]
    return filters.unflatten(0, (groups, -1)).permute(3, 0, 2, 1).contiguous()


def _to_groups(values: Tensor, groups: int) -> Tensor:
    """Return the channels of each group. Shape: values (N, C) -> (G, N, C / G)"""
    return values.unflatten(1, (groups, -1)).transpose(0, 1)


def _from_groups(values: Tensor) -> Tensor:
    """Undo `_to_groups`. Shape: values (G, N, C / G) -> (N, C)"""
    return values.transpose(0, 1).flatten(1)


def _apply(read: Tensor, taps: Tensor) -> Tensor:
    """Apply the filter of one head. Shape: read (N, C), taps (G, C / G, C_out / G) -> (N, C_out)"""
    if len(taps) == 1:
        return torch.mm(read, taps[0])
    if taps.shape[1:] == (1, 1):  # one filter for each channel
        return read * taps.flatten()
    return _from_groups(torch.bmm(_to_groups(read, len(taps)), taps))


def _filter_gradient(grad: Tensor, read: Tensor, groups: int) -> Tensor:
    """Return the gradient of one head's filter. Shape: grad (N, C_out), read (N, C) -> (C_out, C / G)"""
    if groups == 1:
        return torch.mm(grad.t(), read)
    if groups == read.shape[1] == grad.shape[1]:
        return (grad * read).sum(0)[:, None]
    products = torch.bmm(_to_groups(grad, groups).transpose(1, 2), _to_groups(read, groups))
    return products.flatten(0, 1)


class _SoftTaps(torch.autograd.Function):
    """Compute the sum over heads of what each reads times its filter, keeping only the arguments.

    Shape: grid (H, W, B, C), rows (nh, Hq, H), columns (nh, Wq, W), filters (C_out, C / G, nh) -> (Hq, Wq, B, C_out)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(grid: Tensor, rows: Tensor, columns: Tensor, filters: Tensor) -> Tensor:
        flat, (B, C) = grid.flatten(2), grid.shape[2:]
        total = None
        for row, column, taps in zip(rows, columns, _by_head(filters, grid.shape[3]), strict=True):
            read = _read(row, column, flat)[1].view(-1, C)  # (Hq Wq B, C)
            if total is not None and len(taps) == 1:
                total.addmm_(read, taps[0])
            else:
                total = _apply(read, taps) if total is None else total.add_(_apply(read, taps))
        assert total is not None
        return total.view(rows.shape[1], columns.shape[1], B, filters.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grid, rows, columns, filters = ctx.saved_tensors
        flat, dy = grid.flatten(2), grad.flatten(0, 2)  # (H, W, B C), (Hq Wq B, C_out)
        size = (rows.shape[1], columns.shape[1], flat.shape[2])
        d_grid, others = None, []
        for row, column, taps in zip(rows, columns, _by_head(filters, grid.shape[3]), strict=True):
            halfway, read = _read(row, column, flat)
            d_taps = _filter_gradient(dy, read.reshape(dy.shape[0], -1), len(taps))
            d_read = _apply(dy, taps.transpose(1, 2)).reshape(size)  # (Hq, Wq, B C)
            d_halfway = torch.bmm(column.t().expand(size[0], -1, -1), d_read)  # (Hq, W, B C)
            d_column = torch.bmm(d_read, halfway.transpose(1, 2)).sum(0)
            d_row = torch.mm(d_halfway.flatten(1), flat.flatten(1).t())
            d_flat = torch.mm(row.t(), d_halfway.flatten(1))
            d_grid = d_flat if d_grid is None else d_grid + d_flat
            others.append((d_row, d_column, d_taps))
        assert d_grid is not None
        d_rows, d_columns, d_filters = zip(*others, strict=True)
        return d_grid.view(grid.shape), torch.stack(d_rows), torch.stack(d_columns), torch.stack(d_filters, dim=2)


def _soft_columns(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return what all heads read, columns first. Shape: x (B, C, H, W) -> (B, C nh, Hq Wq)"""
    along_columns = torch.einsum("bchw,nqw->bcnhq", x, columns)  # (B, C, nh, H, Wq)
    return torch.matmul(rows, along_columns).flatten(3).flatten(1, 2)  # (B, C nh, Hq Wq)


def soft_taps(x: Tensor, rows: Tensor, columns: Tensor, filters: Tensor) -> Tensor:
    """Return the convolution of x with soft taps.

    The number of groups G is that of the channels of x, divided by the size of the filters' second axis.

    Shape: x (B, C, H, W), rows (nh, Hq, H), columns (nh, Wq, W), filters (C_out, C / G, nh) -> (B, C_out, Hq, Wq)
    """
    groups = x.shape[1] // filters.shape[1]
    if x.shape[1] < MIN_CHANNELS:
        read, taps = _soft_columns(x, rows, columns), filters.flatten(1)
        y = torch.matmul(taps, read) if groups == 1 else F.conv1d(read, taps[:, :, None], groups=groups)
        return y.unflatten(-1, (rows.shape[1], columns.shape[1]))
    grid = x.permute(2, 3, 0, 1).contiguous()  # (H, W, B, C)
    y = _SoftTaps.apply(grid, rows, columns, filters)  # (Hq, Wq, B, C_out)
    return y.permute(2, 3, 0, 1).contiguous()
