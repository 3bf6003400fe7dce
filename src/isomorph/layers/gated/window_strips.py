"""Attention to windows on a CPU: a strip of the map at a time, a few heads at a time, in its cache.

A strip is a row of tiles. Its rows of keys and values are copied once, column after column, so that the keys of a tile
are neighbours in memory, and those of two tiles overlap: they are read where they are. A map that does not leave its
tile, as that of a sharp position, is added to the content's before the values are read:

    A_h = scale_h softmax(q_h k_h^T + bias) + offset_h

The heads of one product share its keys: the queries of each are written among zeros. The backward pass computes the
maps again.

Letters: B images, R strips of S tiles, n queries and m keys of a tile, nh heads, hd head width, C channels, G groups.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from isomorph.layers.gated.window_tiles import AxisTiles, Tiles

# Heads of one product (measured by benchmarks/gpsa_stages.py): more multiply zeros, fewer make it too small.
HEADS = 3


def _parts(heads: int) -> Iterator[slice]:
    for first in range(0, heads, HEADS):
        yield slice(first, min(first + HEADS, heads))


def _read_strip(image: Tensor, strip: int, tiles: Tiles) -> Tensor:
    """Return the keys and values of the tiles of a strip. Shape: image (rows, height, width) -> (S, rows, m)"""
    rows, columns = tiles
    first = strip * rows.step
    near = image[:, first : first + rows.length].mT.contiguous().flatten(1)  # (rows, width length)
    return near.unfold(1, columns.length * rows.length, columns.step * rows.length).transpose(0, 1)


def _add_strip(tiles_of_strip: Tensor, strip: int, tiles: Tiles, image: Tensor) -> None:
    """Add what every tile has for its keys to those of the image: the adjoint of `_read_strip`."""
    rows, columns = tiles
    each = tiles_of_strip.transpose(0, 1).unflatten(2, (columns.length, rows.length))  # (rows, S, keys, length)
    steps = -(-columns.length // columns.step)
    near = image.new_zeros(len(image), columns.number - 1 + steps, columns.step, rows.length)
    for step in range(steps):
        part = each[:, :, step * columns.step : (step + 1) * columns.step]
        near[:, step : step + columns.number, : part.shape[2]].add_(part)
    first = strip * rows.step
    image[:, first : first + rows.length].add_(near.flatten(1, 2)[:, : image.shape[2]].mT)


def _spread(q: Tensor) -> Tensor:
    """Return the queries of every head among zeros for the others. Shape: (S, n, nh, hd) -> (S, n nh, nh hd)"""
    return torch.diag_embed(q.mT, dim1=2, dim2=3).flatten(3).flatten(1, 2)


def _collect(spread: Tensor, q: Tensor) -> Tensor:
    """Undo `_spread`: what is among the queries of other heads is left out. Shape: (S, n nh, nh hd) -> (S, n, nh, hd)"""
    return spread.view(*q.shape[:2], q.shape[2], *q.shape[2:]).diagonal(dim1=2, dim2=3).mT


def _by_group(read: Tensor, groups: int) -> Tensor:
    """Return what heads read, by group of channels. Shape: (S n, nh, C) -> (G, S n, nh C / G)"""
    return read.unflatten(2, (groups, -1)).permute(2, 0, 1, 3).flatten(2)


def _from_groups(patches: Tensor, heads: int) -> Tensor:
    """Undo `_by_group`. Shape: (G, S n, nh C / G) -> (S n, nh, C)"""
    return patches.unflatten(2, (heads, -1)).permute(1, 2, 0, 3).flatten(2)


def _filters_by_group(filters: Tensor, channels: int) -> Tensor:
    """Shape: filters (C_out, C / G, nh) -> (G, nh, C / G, C_out / G)"""
    groups = channels // filters.shape[1]
    return filters.unflatten(0, (groups, -1)).permute(0, 3, 2, 1).contiguous()


class _Strip:
    """The tiles of a strip: attention of some heads, and what they read. Shape: q (S, n, nh, hd)"""

    def __init__(self, q: Tensor, keys_values: Tensor, bias: Tensor) -> None:
        width = q.shape[2] * q.shape[3]
        self.q = q
        self.k = keys_values[:, :width]  # (S, nh hd, m)
        self.v = keys_values[:, width:]  # (S, C, m)
        self.bias = bias  # (S, n, 1, m)

    def keys(self, heads: slice) -> Tensor:
        width = self.q.shape[3]
        return self.k[:, heads.start * width : heads.stop * width]

    def content(self, heads: slice) -> Tensor:
        """Shape: -> (S, n, heads, m)"""
        scores = torch.bmm(_spread(self.q[:, :, heads]), self.keys(heads))
        return scores.unflatten(1, (self.q.shape[1], -1)).add_(self.bias).softmax(-1).to(self.v.dtype)

    def read(self, maps: Tensor) -> Tensor:
        """Shape: maps (S, n, heads, m) -> (S n, heads, C)"""
        read = torch.bmm(maps.flatten(1, 2), self.v.mT)
        return read.view(-1, maps.shape[2], read.shape[2])


def _strip_bias(rows: Tensor, columns: Tensor) -> Tensor:
    """Return what is added to scores. Shape: rows (t, rows), columns (S, t, columns) -> (S, n, 1, columns rows)"""
    bias = columns[:, None, :, :, None] + rows[:, None, None]  # (S, t, t, columns, rows)
    return bias.flatten(3).flatten(1, 2)[:, :, None]


def _mix(content: Tensor, scale: Tensor, offset: Tensor | None, heads: slice) -> Tensor:
    if offset is None:
        return content
    return torch.addcmul(offset[:, heads], content, scale[heads, None])


class _AttendStrips(torch.autograd.Function):
    """Shape: q (B, R, S, n, nh, hd), keys_values (B, nh hd + C, height, width), filters (C_out, C / G, nh), scale (nh,),
    offset (n, nh, m) or None, row_bias (R, t, rows), column_bias (S, t, columns) -> (B, C_out, R t, S t)
    """

    @staticmethod
    def forward(
        q: Tensor,
        keys_values: Tensor,
        filters: Tensor,
        scale: Tensor,
        offset: Tensor | None,
        row_bias: Tensor,
        column_bias: Tensor,
        tiles: Tiles,
    ) -> Tensor:
        B, R, S, _, nh, hd = q.shape
        taps = _filters_by_group(filters, keys_values.shape[1] - nh * hd)
        size = (tiles[0].size, tiles[1].size)
        y = q.new_empty(B, len(filters), R, size[0], S, size[1])
        for image in range(B):
            for row in range(R):
                near = _read_strip(keys_values[image], row, tiles)
                strip = _Strip(q[image, row], near, _strip_bias(row_bias[row], column_bias))
                total = None
                for heads in _parts(nh):
                    maps = _mix(strip.content(heads), scale, offset, heads)
                    patches = _by_group(strip.read(maps), len(taps))  # (G, S n, heads C / G)
                    some = taps[:, heads].flatten(1, 2)
                    total = torch.bmm(patches, some) if total is None else total.baddbmm_(patches, some)
                assert total is not None
                by_tile = total.unflatten(1, (S, *size)).permute(0, 4, 2, 1, 3)  # (G, C_out / G, t, S, t)
                y[image, :, row] = by_tile.flatten(0, 1)
        return y.flatten(4).flatten(2, 3)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.tiles = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, keys_values, filters, scale, offset, row_bias, column_bias = ctx.saved_tensors
        rows, columns = ctx.tiles
        B, R, S, n, nh, hd = q.shape
        taps = _filters_by_group(filters, keys_values.shape[1] - nh * hd)
        groups = len(taps)
        grad = grad.unflatten(3, (S, columns.size)).unflatten(2, (R, rows.size))  # (B, C_out, R, t, S, t)
        d_keys_values = torch.zeros_like(keys_values)
        d_taps = torch.zeros_like(taps)
        d_scale = torch.zeros_like(scale)
        d_offset = None if offset is None else torch.zeros_like(offset)
        d_queries = []
        for image in range(B):
            for row in range(R):
                near = _read_strip(keys_values[image], row, ctx.tiles)
                strip = _Strip(q[image, row], near, _strip_bias(row_bias[row], column_bias))
                dy = grad[image, :, row].unflatten(0, (groups, -1)).permute(0, 3, 2, 4, 1).flatten(1, 3)
                d_v = None
                d_near = []
                for heads in _parts(nh):
                    content = strip.content(heads)  # (S, n, heads, m)
                    maps = _mix(content, scale, offset, heads)
                    patches = _by_group(strip.read(maps), groups)
                    d_taps[:, heads].add_(torch.bmm(patches.mT, dy).view_as(taps[:, heads]))
                    d_read = torch.bmm(dy, taps[:, heads].flatten(1, 2).mT)
                    d_read = _from_groups(d_read, maps.shape[2]).view(S, -1, strip.v.shape[1])  # (S, n heads, C)
                    flat = maps.flatten(1, 2)
                    d_v = torch.bmm(d_read.mT, flat) if d_v is None else torch.baddbmm(d_v, d_read.mT, flat)
                    d_maps = torch.bmm(d_read, strip.v).view_as(maps)
                    product = content * d_maps
                    total = product.sum(-1, keepdim=True)
                    d_scores = torch.addcmul(product, content, total, value=-1).flatten(1, 2)
                    own = q[image, row, :, :, heads]
                    if d_offset is not None:
                        d_offset[:, heads].add_(d_maps.sum(0))
                        d_scale[heads].add_(total.sum((0, 1, 3)))
                        factor = scale[heads, None]
                    else:
                        factor = 1
                    d_own = _collect(torch.bmm(d_scores, strip.keys(heads).mT), own)
                    d_near.append((d_own * factor, torch.bmm(_spread(own * factor).mT, d_scores)))
                assert d_v is not None
                d_queries.append(torch.cat([each for each, _ in d_near], 2))
                d_k = torch.cat([each for _, each in d_near], 1)
                _add_strip(torch.cat([d_k, d_v], 1), row, ctx.tiles, d_keys_values[image])
        d_q = torch.stack(d_queries).view_as(q)
        d_filters = d_taps.permute(0, 3, 2, 1).flatten(0, 1)
        return d_q, d_keys_values, d_filters, d_scale, d_offset, None, None, None


def attend_strips(
    q: Tensor,
    keys_values: Tensor,
    filters: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    biases: tuple[Tensor, Tensor],
    tiles: Tiles,
) -> Tensor:
    """Return the sum over heads of A_h v filter_h, by strip.

    Without an offset, A_h is the softmax alone, and scales belong to the filters.

    Shape: q (B, nh hd, R t, S t), keys_values (B, nh hd + C, height, width), filters (C_out, C / G, nh), scale (nh,),
        offset (n, nh, m), keys column by column, or None, biases (R, t, rows), (S, t, columns) -> (B, C_out, R t, S t)
    """
    nh = filters.shape[2]
    rows, columns = tiles
    sizes = (rows.number, rows.size), (columns.number, columns.size)
    by_tile = q.unflatten(3, sizes[1]).unflatten(2, sizes[0]).unflatten(1, (nh, -1))  # (B, nh, hd, R, t, S, t)
    queries = by_tile.permute(0, 3, 5, 4, 6, 1, 2).flatten(3, 4)  # (B, R, S, n, nh, hd)
    return _AttendStrips.apply(queries.contiguous(), keys_values, filters, scale, offset, *biases, tiles)
