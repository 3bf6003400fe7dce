"""Attention to windows on a CPU: a strip of the map at a time, a few heads at a time, in its cache.

A strip is a row of tiles. Its keys and values are copied once, column after column, so that those of a tile are
neighbours in memory; where tiles overlap they are read where they are. A position map that does not leave the tile is
added to the content's before the values are read:

    A_h = scale_h softmax(q_h k_h^T + bias) + offset_h

Some heads share one product: the queries of each stand among zeros for the keys of the others. The backward pass
computes the maps again.

Letters: B images, R strips of S tiles, n = t t' queries and m keys of a tile, P parts of h heads, hd head width,
C channels, G groups.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from isomorph.layers.gated.window_tiles import Tiles
from isomorph.layers.modes import Gradients, SavesInputs

# Most heads of one product.
MAX_HEADS = 7


def _heads_at_once(nh: int) -> int:
    return max(h for h in range(1, MAX_HEADS + 1) if nh % h == 0)


def _by_tile(q: Tensor, tiles: Tiles) -> Tensor:
    """View queries by strip, part and tile. Shape: (B, R t, S t', nh, hd) -> (B, R, P, S, t, t', h, hd)"""
    rows, columns = tiles
    B, _, _, nh, hd = q.shape
    heads = _heads_at_once(nh)
    split = q.view(B, rows.number, rows.size, columns.number, columns.size, nh // heads, heads, hd)
    return split.permute(0, 1, 5, 3, 2, 4, 6, 7)


def _from_tiles(by_tile: Tensor) -> Tensor:
    """Undo `_by_tile`."""
    return by_tile.permute(0, 1, 4, 3, 5, 2, 6, 7).flatten(5, 6).flatten(3, 4).flatten(1, 2)


def _spread(by_tile: Tensor) -> Tensor:
    """Write the queries of each head of a part among zeros. Shape: (P, S, t, t', h, hd) -> (P, S, n h, h hd)"""
    *outer, h, hd = by_tile.shape
    spread = by_tile.new_zeros(*outer, h, h, hd)
    spread.diagonal(dim1=-3, dim2=-2).copy_(by_tile.mT)
    return spread.flatten(-2).flatten(2, -2)


def _collect(spread: Tensor, by_tile: torch.Size) -> Tensor:
    """Return what stands at the queries of each head: the adjoint of `_spread`."""
    *outer, h, hd = by_tile
    return spread.view(*outer, h, h, hd).diagonal(dim1=-3, dim2=-2).mT


def _read_strip(image: Tensor, strip: int, tiles: Tiles) -> Tensor:
    """Return the keys and values of the tiles of a strip. Shape: image (width, height, rows) -> (S, m, rows)"""
    rows, columns = tiles
    first = strip * rows.step
    rows_of_strip = image[:, first : first + rows.length].contiguous()  # (width, length, rows)
    width = rows_of_strip.shape[2]
    size = (columns.number, columns.length * rows.length, width)
    # neighbouring tiles share columns: each begins one step after the one before
    return rows_of_strip.as_strided(size, (columns.step * rows.length * width, width, 1))


def _add_strip(each_tile: Tensor, strip: int, tiles: Tiles, image: Tensor) -> None:
    """Add what every tile has for its keys to those of the image: the adjoint of `_read_strip`."""
    rows, columns = tiles
    by_tile = each_tile.unflatten(1, (columns.length, rows.length))  # (S, columns, rows, width)
    steps = -(-columns.length // columns.step)
    rows_of_strip = image.new_zeros(columns.number - 1 + steps, columns.step, *by_tile.shape[2:])
    for step in range(steps):
        part = by_tile[:, step * columns.step : (step + 1) * columns.step]
        rows_of_strip[step : step + columns.number, : part.shape[1]].add_(part)
    first = strip * rows.step
    image[:, first : first + rows.length].add_(rows_of_strip.flatten(0, 1)[: len(image)])


def _filters_by_part(filters: Tensor, channels: int) -> Tensor:
    """Shape: filters (C_out, C / G, nh) -> (P, G, h C / G, C_out / G)"""
    groups = channels // filters.shape[1]
    heads = _heads_at_once(filters.shape[2])
    by_part = filters.unflatten(2, (-1, heads))  # (C_out, C / G, P, h)
    split = by_part.unflatten(0, (groups, -1))  # (G, C_out / G, C / G, P, h)
    return split.permute(3, 0, 4, 2, 1).flatten(2, 3)


def _filters_from_parts(taps: Tensor, heads: int) -> Tensor:
    """Undo `_filters_by_part`."""
    return taps.unflatten(2, (heads, -1)).permute(1, 4, 3, 0, 2).flatten(3).flatten(0, 1)


def _to_patches(attended: Tensor, heads: int, groups: int) -> Tensor:
    """Arrange what heads read for their filters. Shape: (S, n h, C) -> (G, S n, h C / G)"""
    by_query = attended.view(-1, heads, groups, attended.shape[2] // groups)  # (S n, h, G, C / G)
    return by_query.permute(2, 0, 1, 3).flatten(2)


def _from_patches(patches: Tensor, heads: int, tiles: int) -> Tensor:
    """Undo `_to_patches`. Shape: -> (S, n h, C)"""
    by_query = patches.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)  # (S n, h, G, C / G)
    return by_query.flatten(2).flatten(0, 1).unflatten(0, (tiles, -1))


def _strip_bias(rows: Tensor, columns: Tensor, heads: int) -> Tensor:
    """Return what is added to scores. Shape: rows (t, rows), columns (S, t', columns) -> (S, n h, columns rows)"""
    bias = columns[:, None, :, :, None] + rows[:, None, None]  # (S, t, t', columns, rows)
    bias = bias.flatten(3).flatten(1, 2)[:, :, None]  # (S, n, 1, m)
    return bias.expand(-1, -1, heads, -1).flatten(1, 2)


def _strip_biases(row_bias: Tensor, column_bias: Tensor, tiles: Tiles, heads: int) -> list[Tensor]:
    """Return what is added to the scores of every strip: the same for all strips that no border cuts."""
    by_cut: dict[tuple[int, int], Tensor] = {}
    biases = []
    for strip, rows in enumerate(row_bias):
        cut = tiles[0].cut(strip)
        if cut not in by_cut:
            by_cut[cut] = _strip_bias(rows, column_bias, heads)
        biases.append(by_cut[cut])
    return biases


def _attend(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """Return content attention. Shape: q (S, n h, h hd), k (S, m, h hd), bias (S, n h, m) -> (S, n h, m)"""
    return torch.baddbmm(bias, q, k.mT).softmax(-1).to(k.dtype)


class _Parts(NamedTuple):
    """What all strips share, by part. Shape: taps (G, h C / G, C_out / G), scales and offsets (n h, m) or none of them,
    biases (S, n h, m) of every strip
    """

    heads: int
    width: int
    taps: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    offsets: tuple[Tensor, ...]
    biases: list[Tensor]

    @classmethod
    def make(
        cls,
        q: Tensor,
        keys_values: Tensor,
        filters: Tensor,
        scale: Tensor,
        offset: Tensor | None,
        row_bias: Tensor,
        column_bias: Tensor,
        tiles: Tiles,
    ) -> Self:
        """Arrange filters, scales, offsets and biases by part: heads that are computed together."""
        nh, hd = q.shape[3:]
        heads = _heads_at_once(nh)
        scales: tuple[Tensor, ...] = ()
        offsets: tuple[Tensor, ...] = ()
        if offset is not None:
            by_part = offset.unflatten(0, (-1, heads)).transpose(1, 2)  # (P, n, h, m)
            offsets = by_part.flatten(1, 2).unbind()
            scales = scale.view(-1, 1, heads, 1).expand_as(by_part).flatten(1, 2).unbind()
        taps = _filters_by_part(filters, keys_values.shape[3] - nh * hd).unbind()
        biases = _strip_biases(row_bias, column_bias, tiles, heads)
        return cls(heads, heads * hd, taps, scales, offsets, biases)

    def of_strip(self, keys_values: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the keys of every part, and the values. Shape: keys_values (S, m, nh hd + C)"""
        parts = len(self.taps)
        *keys, values = keys_values.split(
            [self.width] * parts + [keys_values.shape[2] - parts * self.width], 2
        )
        return keys, values

    def mix(self, content: Tensor, part: int) -> Tensor:
        """Return the maps of a part. Shape: content (S, n h, m) -> (S, n h, m)"""
        if not self.offsets:
            return content
        return torch.addcmul(self.offsets[part], content, self.scales[part])


class AttendStrips(SavesInputs):
    """Compute the sum over heads of A_h v filter_h. Without an offset, A_h is the softmax alone, whatever the scale.

    Shape: q (B, R t, S t', nh, hd), keys_values (B, width, height, nh hd + C), filters (C_out, C / G, nh), scale (nh,),
        offset (nh, n, m), keys column by column, or None, row_bias (R, t, rows), column_bias (S, t', columns)
        -> (B, R, S, t, t', C_out)
    """

    generate_vmap_rule = False

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
        rows, columns = tiles
        shared = _Parts.make(q, keys_values, filters, scale, offset, row_bias, column_bias, tiles)
        groups = len(shared.taps[0])
        by_tile = _by_tile(q, tiles)
        queries_of_strip = columns.number * rows.size * columns.size
        y = q.new_empty(len(q), rows.number, queries_of_strip, len(filters))
        for image, keys_values_of_image in enumerate(keys_values):
            for row in range(rows.number):
                queries = _spread(by_tile[image, row])
                keys, v = shared.of_strip(_read_strip(keys_values_of_image, row, tiles))
                total = None
                for part, (q_of_part, k) in enumerate(zip(queries, keys, strict=True)):
                    maps = shared.mix(_attend(q_of_part, k, shared.biases[row]), part)
                    patches = _to_patches(torch.bmm(maps, v), shared.heads, groups)
                    taps = shared.taps[part]
                    if total is None:
                        total = torch.bmm(patches, taps)
                    else:
                        total.baddbmm_(patches, taps)
                assert total is not None
                y[image, row] = total.transpose(0, 1).flatten(1)
        return y.unflatten(2, (columns.number, rows.size, columns.size))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        q, keys_values, filters, scale, offset, row_bias, column_bias = ctx.saved_tensors
        (tiles,) = ctx.options
        rows, columns = tiles
        shared = _Parts.make(q, keys_values, filters, scale, offset, row_bias, column_bias, tiles)
        groups = len(shared.taps[0])
        by_tile = _by_tile(q, tiles)
        d_by_tile = []
        d_keys_values = torch.zeros_like(keys_values)
        d_taps = [torch.zeros_like(tensor) for tensor in shared.taps]
        d_scales = [torch.zeros_like(tensor[:, :1]) for tensor in shared.scales]
        d_offsets = [torch.zeros_like(tensor) for tensor in shared.offsets]
        for image, keys_values_of_image in enumerate(keys_values):
            for row in range(rows.number):
                queries = _spread(by_tile[image, row])
                keys, v = shared.of_strip(_read_strip(keys_values_of_image, row, tiles))
                dy = grad[image, row].flatten(0, 2).unflatten(1, (groups, -1))
                dy = dy.transpose(0, 1)  # (G, S n, C_out / G)
                d_v = None
                d_queries = []
                d_keys = []
                for part, (q_of_part, k) in enumerate(zip(queries, keys, strict=True)):
                    content = _attend(q_of_part, k, shared.biases[row])  # (S, n h, m)
                    maps = shared.mix(content, part)
                    patches = _to_patches(torch.bmm(maps, v), shared.heads, groups)
                    d_taps[part].baddbmm_(patches.mT, dy)
                    d_patches = torch.bmm(dy, shared.taps[part].mT)
                    d_attended = _from_patches(d_patches, shared.heads, columns.number)
                    if d_v is None:
                        d_v = torch.bmm(maps.mT, d_attended)
                    else:
                        d_v.baddbmm_(maps.mT, d_attended)
                    d_maps = torch.bmm(d_attended, v.mT)
                    product = content * d_maps
                    sums = product.sum(-1, keepdim=True)
                    d_scores = torch.addcmul(product, content, sums, value=-1)  # but for the scale
                    d_q = torch.bmm(d_scores, k)  # (S, n h, h hd)
                    if shared.offsets:
                        d_offsets[part].add_(d_maps.sum(0))
                        d_scales[part].add_(sums.sum(0))
                        scale_of_row = shared.scales[part][:, :1]
                        d_q = d_q * scale_of_row
                        q_of_part = q_of_part * scale_of_row
                    d_queries.append(d_q)
                    d_keys.append(torch.bmm(d_scores.mT, q_of_part))
                assert d_v is not None
                d_by_tile.append(_collect(torch.stack(d_queries), by_tile.shape[2:]))
                _add_strip(torch.cat([*d_keys, d_v], 2), row, tiles, d_keys_values[image])
        d_q = torch.zeros_like(q)
        if d_by_tile:  # not of an empty batch
            d_q = _from_tiles(torch.stack(d_by_tile).unflatten(0, by_tile.shape[:2]))
        d_filters = _filters_from_parts(torch.stack(d_taps), shared.heads)
        if not shared.offsets:
            return d_q, d_keys_values, d_filters, None, None, None, None, None
        d_scale = torch.stack(d_scales).unflatten(1, (-1, shared.heads)).sum((1, 3)).flatten()
        d_offset = torch.stack(d_offsets).unflatten(1, (-1, shared.heads))  # (P, n, h, m)
        d_offset = d_offset.transpose(1, 2).flatten(0, 1)
        return d_q, d_keys_values, d_filters, d_scale, d_offset, None, None, None
