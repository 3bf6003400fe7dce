"""Gated attention on feature maps whose content attention reads a window around every query.

The layer computes y = sum_h A_h V weight_h + bias in two sums, position and content, each scaled by its share in the
gate. Content is computed in tiles: t x t queries need the keys of one rectangle, little larger than the tile and the
window, in which the keys outside of a query's window are masked. The backward pass computes the maps again. Work and
memory are linear in the number of queries.

Letters: B batch, R S tiles, T = R S, n queries and m keys of a tile, nh heads, hd head width, C channels.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor

from isomorph.layers.gated.gpsa2d import GPSA2d
from isomorph.layers.grid import GridSize, odd_window
from isomorph.layers.modes import constant, is_eager, recomputed

# Default height and width of the window.
WINDOW = 7

# Queries of a tile along an axis (measured by benchmarks/gpsa_stages.py).
TILE = 4

# Most entries of maps that are in memory at the same time, of one image at least.
MAX_ENTRIES = 2**26


class AxisTiles(NamedTuple):
    """Tiles along an axis: their number, first key, step and number of keys; and padding and keys of the map."""

    number: int
    first: int
    step: int
    length: int
    padding: int
    keys: int


def _inside(tiles: AxisTiles, stride: int, window: int, device: torch.device) -> Tensor:
    """Return the keys of a tile that are in the window of a query, and in the padded map. Shape: -> (tiles, t, keys)"""
    number, first, step, length, padding, keys = tiles
    near = first + step * torch.arange(number, device=device)[:, None] + torch.arange(length, device=device)
    queries = near[:, : stride * (TILE - 1) + 1 : stride] + window // 2  # (tiles, t)
    inside = (near[:, None] - queries[..., None]).abs() <= window // 2
    return inside & ((near >= -padding) & (near < keys + padding))[:, None]


def _tile_bias(
    axes: tuple[AxisTiles, AxisTiles], stride: GridSize, window: GridSize, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return 0 for keys of a tile in the window, and a very low score outside. Shape: -> (T, 1, n, m)

    It is finite: a softmax over low scores only would not be.
    """
    rows, columns = (_inside(*axis, device) for axis in zip(axes, stride, window, strict=True))
    inside = rows[:, None, :, None, :, None] & columns[None, :, None, :, None, :]  # (R, S, t, t, keys, keys)
    outside = ~inside.flatten(4).flatten(2, 3).flatten(0, 1)[:, None]
    return torch.zeros(outside.shape, dtype=dtype, device=device).masked_fill(outside, torch.finfo(dtype).min / 2)


def _attend_tiles(q: Tensor, keys_values: Tensor, bias: Tensor, filters: Tensor, lengths: Any, steps: Any) -> Tensor:
    """Return the sum over heads of softmax(q k^T + bias) v filter_h for every tile.

    Shape: q (B, nh hd, R t, S t), keys_values (B, nh hd + C, height, width), bias (T, 1, n, m),
        filters (C_out, C / groups, nh) -> (B, C_out, R t, S t)
    """
    _, within, nh = filters.shape
    grid, tiles = q.shape[2:], F.unfold(keys_values, lengths, stride=steps)
    tiles = tiles.unflatten(1, (keys_values.shape[1], -1)).permute(0, 3, 1, 2)  # (B, T, nh hd + C, m)
    k, v = tiles.split([q.shape[1], tiles.shape[2] - q.shape[1]], 2)
    q = F.unfold(q, TILE, stride=TILE).unflatten(1, (nh, -1, TILE**2)).permute(0, 4, 1, 3, 2)  # (B, T, nh, n, hd)
    maps = (q @ k.unflatten(2, (nh, -1)) + bias).softmax(-1).to(v.dtype)  # (B, T, nh, n, m)
    read = maps.flatten(2, 3) @ v.mT  # (B, T, nh n, C)
    patches = read.unflatten(2, (nh, -1)).permute(0, 4, 2, 1, 3).flatten(3).flatten(1, 2)  # (B, C nh, T n)
    y = F.conv1d(patches, filters.flatten(1)[:, :, None], None, groups=v.shape[2] // within)
    y = y.unflatten(2, (-1, grid[1] // TILE, TILE, TILE)).transpose(3, 4)  # (B, C_out, R, t, S, t)
    return y.flatten(4).flatten(2, 3)


@register_notrace_module
class WindowGPSA2d(GPSA2d):
    """Gated attention on feature maps whose heads attend by content to a window around the query.

        y = sum_h A_h V weight_h + bias
        A_h = (1 - sigma(gate_h)) softmax_window(q_h k_h^T / sqrt(hd)) + sigma(gate_h) softmax(position_h)

    It is `GPSA2d` with the softmax of content over the keys of a window of `window` positions (height and width, odd)
    around the query. The window is clipped at the border of the zero-padded map; one that covers the map gives GPSA2d.
    On large maps, work and memory are linear in the number of positions, so early stages can be recast too; small maps
    (256 x 256 query-key pairs at most) are formed whole, which is faster. The other arguments are those of `GPSA2d`.

    Shape: x (B, C, H, W) -> (B, C_out, Hq, Wq), sizes as nn.Conv2d
    Source: T-CNN eq. 4-7; differs: the window, besides what differs in GPSA2d
    Raises: ValueError for an even window, or as GPSA2d.

    Example:
        >>> layer = iso.layers.WindowGPSA2d(8, 16, kernel_size=3, padding=1, window=5)
        >>> layer(torch.randn(2, 8, 20, 30)).shape
        torch.Size([2, 16, 20, 30])
        >>> layer.set_gating(locality=30.0, gate=20.0)  # so local that it is a convolution
        >>> layer.to_conv()
        Conv2d(8, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """

    max_dense_pairs = 256 * 256

    def __init__(self, *args: Any, window: int | tuple[int, int] = WINDOW, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.window = self.content_window = odd_window(window)

    def content_taps(self, q: Tensor, k: Tensor, values: Tensor, H: int, W: int) -> Tensor:
        Hq, Wq = self.query_grid(H, W)
        sizes = zip((Hq, Wq), (H, W), self.stride, self.padding, self.window, strict=True)
        axes = tuple(self._axis_tiles(*each) for each in sizes)
        after = [axis.first + axis.step * (axis.number - 1) + axis.length - axis.keys for axis in axes]
        pads = (-axes[1].first, after[1], -axes[0].first, after[0])
        joint = F.pad(torch.cat([k.flatten(1, 2), values], 1).unflatten(2, (H, W)), pads)
        queries = (q * self.head_width**-0.5).flatten(1, 2).unflatten(2, (Hq, Wq))
        queries = F.pad(queries, (0, -Wq % TILE, 0, -Hq % TILE))
        bias = constant(_tile_bias, q, axes, self.stride, self.window, q.dtype)
        filters = (self.weight.flatten(2) * torch.sigmoid(-self.gate)).to(values.dtype)
        lengths, steps = [axis.length for axis in axes], [axis.step for axis in axes]
        count = max(1, MAX_ENTRIES // (bias.numel() * self.num_heads))
        parts = zip(queries.split(count), joint.split(count), strict=True) if is_eager() else [(queries, joint)]
        y = torch.cat([recomputed(_attend_tiles, *part, bias, filters, lengths, steps) for part in parts])
        return self.with_bias(y[:, :, :Hq, :Wq])

    def _axis_tiles(self, queries: int, keys: int, stride: int, padding: int, window: int) -> AxisTiles:
        number = (queries + TILE - 1) // TILE  # rounded up without negative numbers, which ONNX rounds towards 0
        first = self.kernel_size // 2 - padding - window // 2
        return AxisTiles(number, first, stride * TILE, stride * (TILE - 1) + window, padding, keys)
