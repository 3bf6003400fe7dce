"""Attention to a window around every query, computed in tiles of queries that share their keys.

A tile of t x t queries needs the keys of one rectangle, which is little larger than the tile and the window: its scores
are one small matrix for each head, in which the keys outside of a query's window are masked. The backward pass computes
the maps again, a few tiles at a time; only queries, keys and values are kept. Work and memory are linear in the
number of queries.

Letters: B images, T tiles of all images, n queries and m keys of a tile, nh heads, hd head width, C channels, G groups.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isomorph.layers.eager import is_eager, is_functorch_tensor, on_cpu

TILE = 4
"""Most queries of a tile along an axis (measured by benchmarks/gpsa_stages.py)."""

MAX_ENTRIES = 2**19
"""Entries of maps that are in memory at the same time on a CPU, a size that its cache holds."""

MAX_ENTRIES_ELSEWHERE = 2**26
"""The same on other devices."""


class AxisTiles(NamedTuple):
    """Tiles of the queries along one axis.

    Shape: queries (tiles, t), positions among the padded keys; keys (tiles, m); inside (tiles, t, m), True for keys in
        the window of a query
    """

    queries: Tensor
    keys: Tensor
    inside: Tensor


def axis_tiles(queries: int, keys: int, start: int, stride: int, window: int, device: torch.device) -> AxisTiles:
    """Return tiles of about equal size. The last one repeats the last query if the others do not divide the axis.

    The queries are at start, start + stride, ... of the padded keys. In a graph, whose sizes may be open, all tiles are
    of the full size.
    """
    eager = is_eager()
    count = (queries + TILE - 1) // TILE  # rounded up without negative numbers, which ONNX rounds towards 0
    size = -(-queries // count) if eager else TILE
    length = stride * (size - 1) + window
    steps = torch.arange(count * size, device=device).clamp(max=queries - 1).view(count, size)
    positions = start + stride * steps  # (tiles, t)
    first = positions[:, :1] - window // 2
    if eager:  # no more keys than there are, and none beyond the border
        length = min(keys, length)
        first = first.clamp(0, keys - length)
    near = first + torch.arange(length, device=device)  # (tiles, m)
    inside = (near[:, None] - positions[..., None]).abs() <= window // 2
    return AxisTiles(steps, near.clamp(0, keys - 1), inside & ((near >= 0) & (near < keys))[:, None])


def window_bias(rows: AxisTiles, columns: AxisTiles, dtype: torch.dtype) -> Tensor:
    """Return the score added to every key of a tile: 0 inside of the window, very low outside. Shape: -> (tiles, n, m)

    It is finite: a softmax over low scores only would not be.
    """
    inside = rows.inside[:, None, :, None, :, None] & columns.inside[None, :, None, :, None, :]
    flat = inside.flatten(4).flatten(2, 3).flatten(0, 1)  # (tiles, n, m)
    return torch.zeros(flat.shape, dtype=dtype, device=flat.device).masked_fill(~flat, torch.finfo(dtype).min / 2)


def gather_tiles(grid: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the positions of every tile. Shape: grid (B, H, W, C), rows (R, r), columns (S, s) -> (B R S, r s, C)"""
    places = rows[:, None, :, None] * grid.shape[2] + columns[None, :, None, :]  # (R, S, r, s)
    tiles = grid.flatten(1, 2).index_select(1, places.flatten())
    return tiles.unflatten(1, (rows.shape[0] * columns.shape[0], -1)).flatten(0, 1)


def scatter_tiles(tiles: Tensor, rows: Tensor, columns: Tensor, grid_size: torch.Size) -> Tensor:
    """Return outputs by tile as a map, without repeated queries. Shape: tiles (B R S, r s, C) -> (B, C, H, W)"""
    (R, r), (S, s) = rows.shape, columns.shape
    grid = tiles.unflatten(1, (r, s)).unflatten(0, (-1, R, S))  # (B, R, S, r, s, C)
    whole = grid.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)  # (B, C, R r, S s)
    return whole[:, :, : grid_size[0], : grid_size[1]]


def _chunks(q: Tensor, m: int) -> Iterator[slice]:
    """Yield the tiles to be processed together; all of them in a graph. Shape: q (T, nh, n, hd)"""
    tiles, nh, n = q.shape[:3]
    if not is_eager() or is_functorch_tensor(q):
        yield slice(None)
        return
    most = MAX_ENTRIES if on_cpu(q) else MAX_ENTRIES_ELSEWHERE
    step = max(1, most // max(nh * n * m, 1))
    yield from (slice(first, first + step) for first in range(0, max(tiles, 1), step))


def _by_group(read: Tensor, groups: int) -> Tensor:
    """Return what heads read by group of channels. Shape: read (T, nh, n, C) -> (G, T n, nh C / G)"""
    return read.unflatten(3, (groups, -1)).permute(3, 0, 2, 1, 4).flatten(3, 4).flatten(1, 2)


def _filters_by_group(filters: Tensor, channels: int) -> Tensor:
    """Return one matrix for each group. Shape: filters (C_out, C / G, nh) -> (G, nh C / G, C_out / G)"""
    grouped = filters.unflatten(0, (channels // filters.shape[1], -1))  # (G, C_out / G, C / G, nh)
    return grouped.permute(0, 3, 2, 1).flatten(1, 2)


def _maps_and_reads(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maps of some tiles, and what each head reads. Shape: -> (T, nh, n, m), (T, nh, n, C)"""
    scores = torch.matmul(q, _keys_by_head(k, q).transpose(2, 3)).add_(bias[:, None])
    maps = torch.softmax(scores, dim=-1).to(v.dtype)
    return maps, torch.bmm(maps.flatten(1, 2), v).unflatten(1, maps.shape[1:3])


def _keys_by_head(k: Tensor, q: Tensor) -> Tensor:
    """Return the keys of every head, of the width of the queries. Shape: k (T, m, nh hd) -> (T, nh, m, hd)"""
    return k.unflatten(2, (q.shape[1], q.shape[3])).transpose(1, 2)


class _WindowTaps(torch.autograd.Function):
    """Compute the sum over heads of softmax(q k^T + bias) v filter_h for every tile, keeping only the arguments.

    Shape: q (T, nh, n, hd), k (B, H, W, nh hd), v (B, H, W, C), rows (R, r), columns (S, s), bias (R S, n, m),
        filters (C_out, C / G, nh) -> (T, n, C_out)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, bias: Tensor, filters: Tensor
    ) -> Tensor:
        every, parts = _bias_of_tiles(bias, k.shape[0]), []
        k, v = (gather_tiles(grid, rows, columns) for grid in (k, v))
        taps = _filters_by_group(filters, v.shape[2])
        for some in _chunks(q, k.shape[1]):
            read = _maps_and_reads(q[some], k[some], v[some], bias[every[some]])[1]
            y = torch.bmm(_by_group(read, len(taps)), taps)  # (G, T n, C_out / G)
            parts.append(y.transpose(0, 1).flatten(1))
        return torch.cat(parts).view(q.shape[0], q.shape[2], filters.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, *grids, rows, columns, bias, filters = ctx.saved_tensors
        k, v = (gather_tiles(grid, rows, columns) for grid in grids)
        taps, every = _filters_by_group(filters, v.shape[2]), _bias_of_tiles(bias, grids[0].shape[0])
        parts, d_taps = [], None
        for some in _chunks(q, k.shape[1]):
            *d_inputs, d_part = _tile_gradients(grad[some], q[some], k[some], v[some], bias[every[some]], taps)
            d_taps = d_part if d_taps is None else d_taps + d_part
            parts.append(d_inputs)
        d_q, *d_tiles = (torch.cat(each) for each in zip(*parts, strict=True))
        d_k, d_v = (_add_tiles(d, rows, columns, grid.shape[1:3]) for d, grid in zip(d_tiles, grids, strict=True))
        assert d_taps is not None
        d_filters = d_taps.unflatten(1, (filters.shape[2], -1)).permute(0, 3, 2, 1).flatten(0, 1)
        return d_q, d_k, d_v, None, None, None, d_filters


def _add_tiles(tiles: Tensor, rows: Tensor, columns: Tensor, size: torch.Size) -> Tensor:
    """Return the sum of the tiles at every position, the transpose of `gather_tiles`. Shape: as there"""
    (R, r), (S, s) = rows.shape, columns.shape
    grid = tiles.unflatten(1, (r, s)).unflatten(0, (-1, R, S)).transpose(2, 3)  # (B, R, r, S, s, C)
    grid = grid.flatten(3, 4).flatten(1, 2)  # (B, R r, S s, C)
    across = grid.new_zeros(len(grid), size[0], *grid.shape[2:]).index_add(1, rows.flatten(), grid)  # (B, H, S s, C)
    return grid.new_zeros(len(grid), *size, grid.shape[3]).index_add(2, columns.flatten(), across)


def _bias_of_tiles(bias: Tensor, images: int) -> Tensor:
    """Return the index of the bias of every tile, image after image. Shape: bias (tiles of an image, n, m) -> (T,)"""
    return torch.arange(bias.shape[0], device=bias.device).expand(images, -1).flatten()


def _tile_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, taps: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the taps of some tiles. Shape: grad (T, n, C_out)"""
    (T, nh, n, _), groups = q.shape, len(taps)
    maps, read = _maps_and_reads(q, k, v, bias)
    dy = grad.flatten(0, 1).unflatten(1, (groups, -1)).transpose(0, 1)  # (G, T n, C_out / G)
    d_taps = torch.bmm(_by_group(read, groups).transpose(1, 2), dy)  # (G, nh C / G, C_out / G)
    d_read = torch.bmm(dy, taps.transpose(1, 2))  # (G, T n, nh C / G)
    d_read = d_read.unflatten(2, (nh, -1)).unflatten(1, (T, n)).permute(1, 3, 2, 0, 4).flatten(3)  # (T, nh, n, C)
    flat = d_read.flatten(1, 2)  # (T, nh n, C)
    d_v = torch.bmm(maps.flatten(1, 2).transpose(1, 2), flat)
    d_maps = torch.bmm(flat, v.transpose(1, 2)).unflatten(1, (nh, n))
    d_scores = maps * (d_maps - (maps * d_maps).sum(-1, keepdim=True))
    d_q = torch.matmul(d_scores, _keys_by_head(k, q))
    d_k = torch.matmul(d_scores.transpose(2, 3), q).transpose(1, 2).flatten(2)
    return d_q, d_k, d_v, d_taps


def window_taps(q: Tensor, k: Tensor, v: Tensor, tiles: tuple[AxisTiles, AxisTiles], filters: Tensor) -> Tensor:
    """Return the sum over heads of softmax(q k^T) v filter_h over the window of every query, without keeping maps.

    Shape: q (B, Hq, Wq, nh hd), k (B, H, W, nh hd) and v (B, H, W, C) of the padded map, filters (C_out, C / G, nh)
        -> (B, C_out, Hq, Wq)
    """
    rows, columns = tiles
    nh, dtype = filters.shape[2], v.dtype
    queries = gather_tiles(q, rows.queries, columns.queries).unflatten(2, (nh, -1)).transpose(1, 2)  # (T, nh, n, hd)
    bias = window_bias(rows, columns, dtype)
    y = _WindowTaps.apply(queries.to(dtype), k.to(dtype), v, rows.keys, columns.keys, bias, filters.to(dtype))
    return scatter_tiles(y, rows.queries, columns.queries, q.shape[1:3])
