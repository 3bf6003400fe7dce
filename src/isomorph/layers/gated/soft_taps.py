"""A convolution with soft taps: each filter reads a weighted mean that is separable in rows and columns.

    y = sum_h (rows_h (x) columns_h) x filter_h

The backward pass computes what the heads have read again, and keeps only x: work and memory are linear in the number
of positions. A CPU computes the heads one after the other, so that a working set of the size of x stays in its cache (2
to 5 times as fast there); elsewhere all heads are computed at once, in few operations.

Letters: B batch, C channels, H W key grid, Hq Wq query grid, nh heads, G groups of channels, N = Hq Wq B.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.eager import on_cpu

MIN_CHANNELS = 16
"""Fewest channels for which a CPU computes the heads one by one (measured at commit 495856f)."""


def _read(grid: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the column maps of every query row, what all heads read along the rows, and along both axes.

    Shape: grid (H, W, B C), rows (nh, Hq, H), columns (nh, Wq, W) -> (nh Hq, Wq, W), (nh Hq, W, B C), (nh Hq, Wq, B C)
    """
    lines = columns[:, None].expand(-1, rows.shape[1], -1, -1).flatten(0, 1)  # (nh Hq, Wq, W)
    halfway = torch.mm(rows.flatten(0, 1), grid.flatten(1)).unflatten(1, grid.shape[1:])  # (nh Hq, W, B C)
    return lines, halfway, torch.bmm(lines, halfway)


def _to_patches(read: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Arrange what heads read as a convolution does. Shape: read (nh Hq, Wq, B C) -> (B, C nh, Hq Wq)"""
    each = read.unflatten(2, x.shape[:2]).unflatten(0, rows.shape[:2]).flatten(1, 2)  # (nh, Hq Wq, B, C)
    return each.permute(2, 3, 0, 1).flatten(1, 2)


class _TapsAtOnce(torch.autograd.Function):
    """Compute the sum over heads of what each reads times its filter, keeping only the arguments.

    Shape: x (B, C, H, W), rows (nh, Hq, H), columns (nh, Wq, W), filters (C_out, C nh / G, 1) -> (B, C_out, Hq Wq)
    """

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
        d_patches, d_filters, _ = torch.ops.aten.convolution_backward(
            grad, patches, filters, None, (1,), (0,), (1,), False, (0,), ctx.groups, (True, True, False)
        )
        each = d_patches.unflatten(1, (x.shape[1], rows.shape[0])).permute(2, 3, 0, 1).flatten(2)  # (nh, Hq Wq, B C)
        d_read = each.unflatten(1, (rows.shape[1], columns.shape[1])).flatten(0, 1)  # (nh Hq, Wq, B C)
        d_columns = torch.bmm(d_read, halfway.mT).unflatten(0, rows.shape[:2]).sum(1)
        d_halfway = torch.bmm(lines.mT, d_read).flatten(1)  # (nh Hq, W B C)
        d_rows = torch.mm(d_halfway, grid.flatten(1).t()).view_as(rows)
        d_grid = torch.mm(rows.flatten(0, 1).t(), d_halfway)  # (H, W B C)
        d_x = d_grid.view(x.shape[2], x.shape[3], *x.shape[:2]).permute(2, 3, 0, 1)
        return d_x, d_rows, d_columns, d_filters, None


def _by_head(filters: Tensor, groups: int) -> Tensor:
    """Return a copy with one matrix after the other. Shape: (C_out, C / G, nh) -> (nh, G, C / G, C_out / G)"""
    return filters.unflatten(0, (groups, -1)).permute(3, 0, 2, 1).contiguous()


def _apply(read: Tensor, taps: Tensor) -> Tensor:
    """Apply the filter of one head. Shape: read (N, C), taps (G, C / G, C_out / G) -> (N, C_out)"""
    if len(taps) == 1:
        return torch.mm(read, taps[0])
    if taps.shape[1:] == (1, 1):  # one filter for each channel
        return read * taps.flatten()
    each = torch.bmm(read.unflatten(1, (len(taps), -1)).transpose(0, 1), taps)  # (G, N, C_out / G)
    return each.transpose(0, 1).flatten(1)


def _filter_gradient(grad: Tensor, read: Tensor, groups: int) -> Tensor:
    """Return the gradient of one head's filter. Shape: grad (N, C_out), read (N, C) -> (C_out, C / G)"""
    if groups == 1:
        return torch.mm(grad.t(), read)
    if groups == read.shape[1] == grad.shape[1]:
        return (grad * read).sum(0)[:, None]
    dy, x = (t.unflatten(1, (groups, -1)).transpose(0, 1) for t in (grad, read))  # (G, N, C / G)
    return torch.bmm(dy.mT, x).flatten(0, 1)


class _TapsByHead(torch.autograd.Function):
    """The same as `_TapsAtOnce`, one head after the other.

    Shape: grid (H, W, B, C), rows (nh, Hq, H), columns (nh, Wq, W), filters (C_out, C / G, nh) -> (Hq, Wq, B, C_out)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(grid: Tensor, rows: Tensor, columns: Tensor, filters: Tensor) -> Tensor:
        flat, (B, C) = grid.flatten(2), grid.shape[2:]
        total = None
        for row, column, taps in zip(rows, columns, _by_head(filters, C // filters.shape[1]), strict=True):
            read = _read(flat, row[None], column[None])[2].view(-1, C)  # (N, C)
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
        flat, dy, C = grid.flatten(2), grad.flatten(0, 2), grid.shape[3]  # (H, W, B C), (N, C_out)
        d_grid, others = None, []
        for row, column, taps in zip(rows, columns, _by_head(filters, C // filters.shape[1]), strict=True):
            lines, halfway, read = _read(flat, row[None], column[None])
            d_taps = _filter_gradient(dy, read.reshape(-1, C), len(taps))
            d_read = _apply(dy, taps.mT).reshape(read.shape)  # (Hq, Wq, B C)
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

    The number of groups G is that of the channels of x, divided by the size of the filters' second axis.

    Shape: x (B, C, H, W), rows (nh, Hq, H), columns (nh, Wq, W), filters (C_out, C / G, nh) -> (B, C_out, Hq, Wq)
    """
    if on_cpu(x) and x.shape[1] >= MIN_CHANNELS:
        grid = x.permute(2, 3, 0, 1).contiguous()  # (H, W, B, C)
        return _TapsByHead.apply(grid, rows, columns, filters).permute(2, 3, 0, 1).contiguous()
    groups = x.shape[1] // filters.shape[1]
    y = _TapsAtOnce.apply(x, rows, columns, filters.flatten(1)[:, :, None], groups)
    return y.unflatten(-1, (rows.shape[1], columns.shape[1]))
