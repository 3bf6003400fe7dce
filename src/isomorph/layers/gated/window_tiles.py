"""Tiles of queries and the rectangles of keys that they attend to: what windows on large maps are computed in.

t x t' queries, neighbours on the map, need the keys of one rectangle, little larger than the tile and the window, in
which the keys outside of a query's window are masked. Work and memory are linear in the number of queries.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.grid import GridSize

# Queries of a tile along an axis, for a stride of 1 (measured by benchmarks/gpsa_stages.py): on any device, and for
# the rows and columns of a CPU, where fewer keys cost less and only the rows of keys are written out.
TILE = 4
CPU_TILE = (4, 2)


class AxisTiles(NamedTuple):
    """Tiles along an axis: their number, queries, first key, step and number of keys; padding and keys of the map."""

    number: int
    size: int
    first: int
    step: int
    length: int
    padding: int
    keys: int

    @property
    def pads(self) -> tuple[int, int]:
        """Positions to add before and after the map, so that it has the keys of every tile, and no others."""
        stop = self.first + self.step * (self.number - 1) + self.length
        return -self.first, stop - self.keys

    def cut(self, tile: int) -> tuple[int, int]:
        """Return the number of keys before and after the padded map that a tile has."""
        first = self.first + self.step * tile
        stop = first + self.length
        return max(0, -self.padding - first), max(0, stop - self.keys - self.padding)

    def inside(self, window: int, device: torch.device) -> Tensor:
        """Return the keys of a tile that are in the padded map and in the window of a query.

        Shape: -> (number, size, length)
        """
        stride = self.step // self.size
        reach = window // 2
        firsts = self.first + self.step * torch.arange(self.number, device=device)
        keys = firsts[:, None] + torch.arange(self.length, device=device)  # (number, length)
        last = stride * (self.size - 1)
        queries = keys[:, : last + 1 : stride] + reach  # (number, size)
        in_window = (keys[:, None] - queries[..., None]).abs() <= reach
        in_map = (keys >= -self.padding) & (keys < self.keys + self.padding)
        return in_window & in_map[:, None]


# Rows and columns.
Tiles = tuple[AxisTiles, AxisTiles]


def tile_bias(tiles: Tiles, window: GridSize, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return 0 for keys of a tile in the window, and a very low score outside. Shape: -> (T, 1, n, m)

    It is finite: a softmax over low scores only would not be.
    """
    rows = tiles[0].inside(window[0], device)
    columns = tiles[1].inside(window[1], device)
    inside = (
        rows[:, None, :, None, :, None] & columns[None, :, None, :, None, :]
    )  # (R, S, t, t, keys, keys)
    outside = ~inside.flatten(4).flatten(2, 3).flatten(0, 1)[:, None]
    zeros = torch.zeros(outside.shape, dtype=dtype, device=device)
    return zeros.masked_fill(outside, torch.finfo(dtype).min / 2)


def axis_bias(tiles: AxisTiles, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the same along one axis, half as low: those of both axes are added. Shape: -> (number, size, length)"""
    outside = ~tiles.inside(window, device)
    zeros = torch.zeros(outside.shape, dtype=dtype, device=device)
    return zeros.masked_fill(outside, torch.finfo(dtype).min / 4)


def attend_tiles(
    q: Tensor, keys_values: Tensor, bias: Tensor, filters: Tensor, tiles: Tiles
) -> Tensor:
    """Return the sum over heads of softmax(q k^T + bias) v filter_h for every tile, all of them at once.

    Shape: q (B, nh hd, R t, S t), keys_values (B, nh hd + C, height, width), bias (T, 1, n, m),
        filters (C_out, C / groups, nh) -> (B, C_out, R t, S t)
    """
    rows, columns = tiles
    _, channels_of_group, nh = filters.shape
    width = q.shape[1]  # nh hd
    tile = (rows.size, columns.size)
    queries_of_row = q.shape[3]

    q = F.unfold(q, tile, stride=tile)  # (B, nh hd n, T)
    q = q.unflatten(1, (nh, -1, rows.size * columns.size))
    q = q.permute(0, 4, 1, 3, 2)  # (B, T, nh, n, hd)
    keys_values_of_tile = F.unfold(
        keys_values, (rows.length, columns.length), stride=(rows.step, columns.step)
    )
    keys_values_of_tile = keys_values_of_tile.unflatten(1, (keys_values.shape[1], -1))
    keys_values_of_tile = keys_values_of_tile.permute(0, 3, 1, 2)  # (B, T, nh hd + C, m)
    k, v = keys_values_of_tile.split([width, keys_values_of_tile.shape[2] - width], 2)

    scores = q @ k.unflatten(2, (nh, -1)) + bias
    maps = scores.softmax(-1).to(v.dtype)  # (B, T, nh, n, m)
    attended = maps.flatten(2, 3) @ v.mT  # (B, T, nh n, C)
    patches = attended.unflatten(2, (nh, -1)).permute(0, 4, 2, 1, 3)  # (B, C, nh, T, n)
    patches = patches.flatten(3).flatten(1, 2)
    groups = v.shape[2] // channels_of_group
    y = F.conv1d(patches, filters.flatten(1)[:, :, None], None, groups=groups)  # (B, C_out, T n)

    y = y.unflatten(2, (-1, queries_of_row // columns.size, *tile))
    y = y.transpose(3, 4)  # (B, C_out, R, t, S, t)
    return y.flatten(4).flatten(2, 3)
