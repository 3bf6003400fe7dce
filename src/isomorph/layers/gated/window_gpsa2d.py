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
from isomorph.layers.gated.window_strips import AttendStrips
from isomorph.layers.gated.window_tiles import AxisTiles, Tiles, attend_tiles, axis_bias, tile_bias
from isomorph.layers.grid import GridSize, Sides, odd_window, pad_to_multiple
from isomorph.layers.modes import (
    can_keep,
    constant,
    disable_autocast,
    in_functorch,
    is_eager,
    on_cpu,
    recomputed,
)

# Default height and width of the window.
WINDOW = 7

# Most entries of maps that are in memory at the same time, of one image at least.
MAX_ENTRIES = 2**26


def _project(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows times the features of every position, by position. Shape: (B, C, H, W), (n, C) -> (B, H, W, n)"""
    tokens = x.flatten(2).mT  # (B, H W, C), read where they are
    return torch.bmm(tokens, rows.t().expand(len(x), -1, -1)).unflatten(1, x.shape[2:])


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

    def __init__(self, *args: Any, window: Sides = WINDOW, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.window = self.content_window = odd_window(window)

    def without_maps(self, x: Tensor, H: int, W: int) -> Tensor:
        """On a CPU without gradients attend strip by strip, otherwise tile by tile."""
        if not (on_cpu(x) and can_keep(x.detach(), *self.parameters()) and not in_functorch()):
            return super().without_maps(x, H, W)
        tiles = self.tiles(H, W, window_tiles.CPU_TILE)
        q, keys_values = self.queries_keys_values_by_position(x)
        values = keys_values[..., -self.in_channels :]  # (B, H, W, C)
        offset = self.tile_positions(tiles, H, W, values.dtype)
        if offset is not None:
            y = self._attend_strips(q, keys_values, self.weight.flatten(2), offset, tiles)
            return self.with_bias(y)
        position = self.position_taps(values.permute(0, 3, 1, 2), self.position_share)
        content = self._attend_strips(q, keys_values, self.content_filters(), None, tiles)
        return self.with_bias(position + content)

    def content_taps(self, q: Tensor, k: Tensor, values: Tensor, H: int, W: int) -> Tensor:
        """Return the part of the content heads, tile by tile. Shape: -> (B, C_out, Hq, Wq)"""
        heads = self.content_heads
        Hq, Wq = self.query_grid(H, W)
        tiles = self.tiles(H, W, (window_tiles.TILE, window_tiles.TILE))
        rows, columns = tiles
        joint = torch.cat([k[:, :heads].flatten(1, 2), values], 1)
        joint = F.pad(joint.unflatten(2, (H, W)), (*columns.pads, *rows.pads))
        queries = (q[:, :heads] * self.head_width**-0.5).flatten(1, 2)
        queries = pad_to_multiple(queries.unflatten(2, (Hq, Wq)), rows.size, columns.size)
        bias = constant(tile_bias, q, tiles, self.window, q.dtype)
        filters = self.content_filters().to(values.dtype)
        if is_eager():
            images = max(1, MAX_ENTRIES // (bias.numel() * heads))
            parts = zip(queries.split(images), joint.split(images), strict=True)
            y = torch.cat([recomputed(attend_tiles, *part, bias, filters, tiles) for part in parts])
        else:
            y = recomputed(attend_tiles, queries, joint, bias, filters, tiles)
        return self.with_bias(y[:, :, :Hq, :Wq])

    @property
    def content_heads(self) -> int:
        """Number of heads with rows of W_qry, and one for all others, which attend uniformly: there, C < k k."""
        return min(self.num_heads, self.in_channels + 1)

    def content_filters(self) -> Tensor:
        """Return the filters of the heads of content, by its share in the gate. Shape: -> (C_out, C / groups, heads)"""
        filters = self.weight.flatten(2) * torch.sigmoid(-self.gate)
        last_head = self.content_heads - 1
        if last_head == self.num_heads - 1:
            return filters
        own, shared = filters.tensor_split([last_head], -1)
        return torch.cat([own, shared.sum(-1, keepdim=True)], -1)

    def queries_keys_values_by_position(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries of the heads of content, by sqrt(hd), and keys and values.

        Shape: x (B, C, H, W) -> (B, Hq, Wq, heads, hd), (B, H, W, heads hd + C)
        """
        weight = self.cached(self.projections(), self.joint_weight)[:, :, 0]
        every = self.num_heads * self.head_width
        width = self.content_heads * self.head_width
        of_queries = weight[:width] * self.head_width**-0.5
        of_keys_values = torch.cat([weight[every : every + width], weight[2 * every :]])
        if self.queries_every_position:
            joint = _project(x, torch.cat([of_queries, of_keys_values]))
            q, keys_values = joint.tensor_split([width], 3)
        else:
            q = _project(self.query_positions(x), of_queries)
            keys_values = _project(x, of_keys_values)
        if self.value is None:
            keys_values = torch.cat([keys_values, x.permute(0, 2, 3, 1).to(keys_values.dtype)], 3)
        return q.unflatten(3, (self.content_heads, -1)), keys_values

    def _attend_strips(
        self, q: Tensor, keys_values: Tensor, filters: Tensor, offset: Tensor | None, tiles: Tiles
    ) -> Tensor:
        """Shape: as `AttendStrips`, without padding -> (B, C_out, Hq, Wq)"""
        rows, columns = tiles
        _, Hq, Wq, _, _ = q.shape
        dtype = keys_values.dtype
        queries = F.pad(q, (0, 0, 0, 0, 0, -Wq % columns.size, 0, -Hq % rows.size))
        joint = F.pad(keys_values.transpose(1, 2), (0, 0, *rows.pads, *columns.pads))
        axes = zip(tiles, self.window, strict=True)
        biases = [constant(axis_bias, q, *axis, dtype) for axis in axes]
        scale = torch.sigmoid(-self.gate[: q.shape[3]]).to(dtype)
        with disable_autocast(q.device):
            y = AttendStrips.apply(
                queries, joint, filters.to(dtype), scale, offset, *biases, tiles
            )  # (B, R, S, t, t', C_out)
        y = y.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)
        return y[:, :, :Hq, :Wq].contiguous()

    def tile_positions(self, tiles: Tiles, H: int, W: int, dtype: torch.dtype) -> Tensor | None:
        """Return position attention in a tile, times its share, where it ends within the window and the padded map.

        Shape: -> (nh, n, m), keys column by column, or None
        """
        if (
            self.content_heads < self.num_heads
        ):  # the last one stands for several, each with positions of its own
            return None
        maps = []
        for axis, tile, window in zip(self.tap_axes(H, W), tiles, self.window, strict=True):
            first = window // 2 - axis.reach
            if first < 0 or axis.interior != (0, axis.queries):
                return None
            taps = axis.taps
            taps = F.pad(taps, (first, tile.length - first - taps.shape[1]))  # (nh, keys)
            # turns round zeros alone: a tile has as many keys as all its queries reach
            shifted = [taps.roll(axis.stride * query, 1) for query in range(tile.size)]
            maps.append(torch.stack(shifted, 1))  # (nh, t, keys)
        rows, columns = maps
        products = (
            rows[:, :, None, None, :] * columns[:, None, :, :, None]
        )  # (nh, t, t', columns, rows)
        share = mix_weights(self.gate)[0]
        return without_subnormals(
            (products.flatten(3).flatten(1, 2) * share[:, None, None]).to(dtype)
        )

    def tiles(self, H: int, W: int, size: GridSize) -> Tiles:
        """Return the tiles of an H x W map, of `size` queries without a stride and fewer with one."""
        sizes = zip(
            size, self.query_grid(H, W), (H, W), self.stride, self.padding, self.window, strict=True
        )
        rows, columns = (self._axis_tiles(*axis_sizes) for axis_sizes in sizes)
        return rows, columns

    def _axis_tiles(
        self, size: int, queries: int, keys: int, stride: int, padding: int, window: int
    ) -> AxisTiles:
        # rounded up without negative numbers, which ONNX rounds towards 0
        number = (queries + size - 1) // size
        first = self.kernel_size // 2 - padding - window // 2
        return AxisTiles(
            number, size, first, stride * size, stride * (size - 1) + window, padding, keys
        )
