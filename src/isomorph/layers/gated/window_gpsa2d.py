"""Gated attention on feature maps whose content attention reads a window around every query.

The layer computes y = sum_h A_h V weight_h + bias. Content is computed in tiles: t x t queries need the keys of one
rectangle, little larger than the tile and the window, in which the keys outside of a query's window are masked. The
backward pass computes the maps again. Work and memory are linear in the number of queries.

Position is a sum of its own, each scaled by its share in the gate. On a CPU, heads whose position attention ends within
the window are one map with their content.

Letters: B batch, R S tiles, n queries and m keys of a tile, nh heads, hd head width, C channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor

from isomorph.layers.gated import window_tiles
from isomorph.layers.gated.gpsa2d import GPSA2d
from isomorph.layers.gated.positions import mix_weights, without_subnormals
from isomorph.layers.gated.window_strips import attend_strips
from isomorph.layers.gated.window_tiles import AxisTiles, Tiles, attend_tiles, axis_bias, pad_to_tiles, tile_bias
from isomorph.layers.grid import GridSize, odd_window
from isomorph.layers.modes import can_keep, constant, disable_autocast, in_functorch, is_eager, on_cpu, recomputed

# Default height and width of the window.
WINDOW = 7

# Most entries of maps that are in memory at the same time, of one image at least.
MAX_ENTRIES = 2**26


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

    def wide_map(self, q: Tensor, k: Tensor, v: Tensor, H: int, W: int) -> Tensor:
        if not self.takes_strips(q):
            return super().wide_map(q, k, v, H, W)
        tiles = self.tiles(H, W, window_tiles.CPU_TILE)
        offset = self.tile_positions(tiles, H, W, v.dtype)
        if offset is None:
            return super().wide_map(q, k, v, H, W)
        return self.attend_strips(q, k, v, tiles, self.weight.flatten(2), offset)

    def content_taps(self, q: Tensor, k: Tensor, values: Tensor, H: int, W: int) -> Tensor:
        q, k, filters = self.distinct_heads(q, k)
        if self.takes_strips(q):
            return self.attend_strips(q, k, values, self.tiles(H, W, window_tiles.CPU_TILE), filters)
        Hq, Wq = self.query_grid(H, W)
        tiles = self.tiles(H, W, (window_tiles.TILE, window_tiles.TILE))
        queries, joint = self._padded(q, k, values, tiles, H, W)
        bias = constant(tile_bias, q, tiles, self.window, q.dtype)
        count = max(1, MAX_ENTRIES // (bias.numel() * q.shape[1]))
        filters = filters.to(values.dtype)
        parts = zip(queries.split(count), joint.split(count), strict=True) if is_eager() else [(queries, joint)]
        y = torch.cat([recomputed(attend_tiles, *part, bias, filters, tiles) for part in parts])
        return self.with_bias(y[:, :, :Hq, :Wq])

    def takes_strips(self, q: Tensor) -> bool:
        """True on a CPU, where windows are computed by strip, unless something traces or transforms the call."""
        return on_cpu(q) and can_keep(q.detach()) and not in_functorch()

    def distinct_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and filters of content, with one head for all that have no rows of W_qry.

        There are such heads where there are more taps than channels. They attend uniformly: their filters add up.
        Shape: q, k (B, nh, hd, n) -> (B, heads, hd, n), filters (C_out, C / groups, heads)
        """
        filters = self.weight.flatten(2) * torch.sigmoid(-self.gate)
        own = self.in_channels
        if self.num_heads <= own + 1:
            return q, k, filters
        uniform = filters[..., own:].sum(-1, keepdim=True)
        return q[:, : own + 1], k[:, : own + 1], torch.cat([filters[..., :own], uniform], -1)

    def attend_strips(
        self, q: Tensor, k: Tensor, values: Tensor, tiles: Tiles, filters: Tensor, offset: Tensor | None = None
    ) -> Tensor:
        """Return the sum over heads of content, and position where there is an offset, times values times filter."""
        H, W = tiles[0].keys, tiles[1].keys
        Hq, Wq = self.query_grid(H, W)
        queries, joint = self._padded(q, k, values, tiles, H, W)
        axes = zip(tiles, self.window, strict=True)
        row_bias, column_bias = (constant(axis_bias, q, *axis, q.dtype) for axis in axes)
        scale = torch.sigmoid(-self.gate).to(values.dtype)
        with disable_autocast(q.device):
            y = attend_strips(queries, joint, filters.to(values.dtype), scale, offset, (row_bias, column_bias), tiles)
        return self.with_bias(y[:, :, :Hq, :Wq])

    def tile_positions(self, tiles: Tiles, H: int, W: int, dtype: torch.dtype) -> Tensor | None:
        """Return position attention in a tile, times its share, where it ends within the window and the padded map.

        Shape: -> (n, nh, m), keys column by column, or None
        """
        if not can_keep(self.centre, self.raw_locality) or self.num_heads > self.in_channels + 1:
            return None
        maps = []
        for axis, own, window in zip(self.tap_axes(H, W), tiles, self.window, strict=True):
            reach = axis.reach()
            if reach is None or reach > window // 2 or axis.interior(reach) != (0, axis.queries):
                return None
            near = axis.window(reach)  # (nh, 2 reach + 1)
            before = (window // 2 - reach + axis.stride * query for query in range(own.size))
            each = [F.pad(near, (n, own.length - n - near.shape[1])) for n in before]
            maps.append(torch.stack(each))  # (t, nh, keys)
        rows, columns = maps
        both = rows[:, None, :, None, :] * columns[None, :, :, :, None]  # (t, t, nh, columns, rows)
        share = mix_weights(self.gate)[0]
        return without_subnormals((both.flatten(3).flatten(0, 1) * share[:, None]).to(dtype))

    def tiles(self, H: int, W: int, size: tuple[int, int]) -> Tiles:
        """Return the tiles of an H x W map, of `size` queries without stride, and as few with a stride."""
        sizes = zip(size, self.query_grid(H, W), (H, W), self.stride, self.padding, self.window, strict=True)
        rows, columns = (self._axis_tiles(*each) for each in sizes)
        return rows, columns

    def _axis_tiles(self, size: int, queries: int, keys: int, stride: int, padding: int, window: int) -> AxisTiles:
        number = (queries + size - 1) // size  # rounded up without negative numbers, which ONNX rounds towards 0
        first = self.kernel_size // 2 - padding - window // 2
        return AxisTiles(number, size, first, stride * size, stride * (size - 1) + window, padding, keys)

    def _padded(
        self, q: Tensor, k: Tensor, values: Tensor, tiles: Tiles, H: int, W: int
    ) -> tuple[Tensor, Tensor]:
        """Return scaled queries for whole tiles, and keys and values, as maps."""
        Hq, Wq = self.query_grid(H, W)
        joint = pad_to_tiles(torch.cat([k.flatten(1, 2), values], 1).unflatten(2, (H, W)), tiles)
        queries = (q * self.head_width**-0.5).flatten(1, 2).unflatten(2, (Hq, Wq))
        return F.pad(queries, (0, -Wq % tiles[1].size, 0, -Hq % tiles[0].size)), joint
