"""Edits of an attention map between the softmax and the values, for attention of any class.

Letters: B images or windows, H or nh heads, Nq queries, Nk keys, k kernel size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.layers.gated.positions import (
    axis_scores,
    gated_mix,
    image_axis,
    kronecker,
    mix_weights,
    outer_sum,
)
from isomorph.layers.gated.token_heads import TokenPositions
from isomorph.layers.grid import GridSize, fit_grid
from isomorph.layers.modes import is_eager, is_functorch_tensor, upcast
from isomorph.layers.refined.refiner import Expansion, MapConvolution, SpatialRefiner

# Scores of a float mask up to this value forbid attention; larger ones are a bias. Swin's shift
# mask has -100.
BLOCKED_SCORE = -100.0


class MapCall(NamedTuple):
    """Mask, grid and prefix tokens of one call of a layer, for the edit of its map.

    `mask` is the layer's attention mask, or None. `shapes` are sizes of windows, feature maps or the image. The tokens
    cover one of them evenly, from which their grid follows. `prefix` tokens come before the grid. `places`, for tokens
    that are not on a grid in its order, returns the (row, column) of queries and keys from their numbers.
    `other_queries`: queries are other tokens than keys.

    Example:
        >>> iso.layers.MapCall(shapes=((14, 14),), prefix=1)
        MapCall(mask=None, shapes=((14, 14),), prefix=1, places=None, other_queries=False)
    """

    mask: Tensor | None = None
    shapes: tuple[GridSize, ...] = ()
    prefix: int = 0
    places: Callable[[int, int], tuple[Tensor, Tensor]] | None = None
    other_queries: bool = False


def allowed_pairs(mask: Tensor, maps: Tensor) -> Tensor:
    """Return where a mask of any kind that timm's layers take, boolean or added to the scores, allows attention.

    Shape: mask (B, Nk), (Nq, Nk), (windows, Nq, Nk) or (B, 1, Nq, Nk) -> (B or 1, 1 or nh, Nq, Nk)
    """
    if mask.ndim == 4 and mask.stride(-2) == 0:
        mask = mask[:, :, :1]  # expanded again below, with a stride of 0: `_real_tokens` reads it
    allowed = mask if mask.dtype == torch.bool else mask > BLOCKED_SCORE
    B, _, Nq, Nk = maps.shape
    if allowed.ndim == 3:  # the windows of an image are neighbours in the batch
        allowed = allowed.repeat(B // allowed.shape[0], 1, 1)[:, None]
    elif allowed.ndim == 2 and mask.dtype == torch.bool and len(mask) == B:
        # the real tokens of padded sequences
        allowed = allowed[:, None, None]
    elif allowed.ndim == 2:  # one mask for all
        allowed = allowed[None, None]
    return allowed.expand(-1, -1, Nq, Nk)


def merge_queries(mask: Tensor) -> Tensor:
    """Expand a mask that is the same for every query, as that of padding, along the queries; others are unchanged.

    `RefinedMap` refines under such a mask several times as fast. Values, where known, are compared once for each mask.
    """
    if mask.ndim != 4 or mask.stride(-2) == 0:
        return mask
    if not is_eager() or mask.is_meta or is_functorch_tensor(mask):
        return mask
    merged = mask[:, :, :1].expand_as(mask)
    if mask.is_inference():  # it counts no versions
        return merged if torch.equal(mask, merged) else mask
    version, is_same = getattr(mask, "isomorph_padding", (-1, False))
    if version != mask._version:
        is_same = torch.equal(mask, merged)
        mask.isomorph_padding = (mask._version, is_same)  # type: ignore[attr-defined]
    return merged if is_same else mask


def _masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)


def _neighbours_allowed(allowed: Tensor, offset: int) -> Tensor:
    """Return whether token i may attend to token i + offset. Shape: (B, h, N, N) -> (B, h, N)"""
    if offset == 0:  # padding may attend to real tokens, but not to itself
        return torch.ones_like(allowed[..., 0])
    diagonal = torch.diagonal(allowed, offset, -2, -1)  # (B, h, N - |offset|)
    before = max(-offset, 0)
    after = max(offset, 0)
    return F.pad(diagonal, (before, after))


def convolve_within(maps: Tensor, kernel: Tensor, allowed: Tensor) -> Tensor:
    """Convolve maps along queries and keys without a leak across a mask.

    A'[o, i, j] = sum over heads and taps (s, t) of W[o, h, s, t] A[h, i + s, j + t], where token i may attend to i + s,
    j to j + t, and i to j; other terms are left out.

    Shape: maps (B, H, N, N), kernel (H, H, k, k), or (H, 1, k, k) for a kernel of each head, allowed (B, h, N, N)
    """
    k = kernel.shape[-1]
    N = maps.shape[-1]
    padded = F.pad(maps.masked_fill(~allowed, 0), (k // 2,) * 4)
    allowed_at = [_neighbours_allowed(allowed, tap - k // 2) for tap in range(k)]
    groups = maps.shape[1] // kernel.shape[1]
    total = torch.zeros_like(maps)
    for s in range(k):
        for t in range(k):
            pairs = allowed_at[s][..., :, None] & allowed_at[t][..., None, :]
            shifted = padded[..., s : s + N, t : t + N]
            tap = kernel[:, :, s : s + 1, t : t + 1].to(shifted.dtype)
            total = total + F.conv2d(shifted.masked_fill(~pairs, 0), tap, groups=groups)
    return total.masked_fill(~allowed, 0)


def _real_tokens(allowed: Tensor) -> Tensor | None:
    """Return the real tokens if the strides say that the mask is one of padding. Shape: (B, h, N, N) -> (B, 1, N)"""
    _, h, Nq, Nk = allowed.shape
    if h == 1 and Nq == Nk and allowed.stride(-2) == 0:
        return allowed[:, :, 0]
    return None


class RefinedMap(nn.Module):
    """Refine the attention map of any layer: A' = refine(A), never across the layer's mask (Refiner).

    `refine` is a `Refiner`, `MapConvolution` or `SpatialRefiner`. Unless it is spatial, the map is convolved in the
    order of the tokens, prefix tokens included, as `RefinedAttention` does. Padding adds nothing to the map of real
    tokens; rows of the map that belong to padding stay as they were. Where queries are other tokens than keys, what the
    mask forbids is 0 before and after.

    Shape: maps (B, H, Nq, Nk) -> the same
    Source: Refiner Fig. 3; differs: regions that a mask separates are convolved separately

    Example:
        >>> edit = iso.layers.RefinedMap(iso.layers.Refiner(num_heads=4))
        >>> maps = torch.randn(2, 4, 10, 10).softmax(-1)
        >>> torch.allclose(edit(maps, iso.layers.MapCall()), maps, atol=1e-6)  # at initialisation
        True
    """

    def __init__(self, refine: Expansion | MapConvolution) -> None:
        super().__init__()
        self.refine = refine

    def forward(self, maps: Tensor, call: MapCall) -> Tensor:
        spatial = isinstance(self.refine, SpatialRefiner)
        if call.mask is None:
            return self._refine_over_grid(maps, call) if spatial else self.refine(maps)
        allowed = allowed_pairs(call.mask, maps)
        has_other_queries = call.other_queries or maps.shape[-2] != maps.shape[-1]
        if has_other_queries and not spatial:
            return self.refine(maps.masked_fill(~allowed, 0)).masked_fill(~allowed, 0)
        if spatial:
            refined = self._refine_over_grid(maps.masked_fill(~allowed, 0), call)
            return refined.masked_fill(~allowed, 0)
        real = _real_tokens(allowed)
        if real is None:
            attends_to_itself = torch.diagonal(allowed, 0, -2, -1)[
                ..., None
            ]  # padding may not attend to itself
            return torch.where(
                attends_to_itself, convolve_within(maps, self.refine.kernel(), allowed), maps
            )
        queries = real[..., None]
        pairs = queries & real[..., None, :]
        refined = self.refine(maps.masked_fill(~pairs, 0)).masked_fill(~pairs, 0)
        return torch.where(queries, refined, maps)

    def _refine_over_grid(self, maps: Tensor, call: MapCall) -> Tensor:
        grid_size, prefix = fit_grid(maps.shape[-1], call.shapes, call.prefix)
        return self.refine(maps, grid_size, prefix)


class GatedMap(TokenPositions):
    """Mix the attention map of any layer with position attention: A' = (1 - s) A + s P, s = sigmoid(gate) (ConViT).

    P is the position attention of `GPSA` on the grid of queries and keys: of the image, of the window in which the
    layer attends, or of pooled keys. Under a mask P is the softmax over the keys that the mask allows. Prefix tokens
    attend, and are attended to, by content only; a class token that is the only query stands for the whole image, and
    is in its middle.

    Shape: maps (B, nh, Nq, Nk) -> the same
    Source: ConViT eq. 7; differs: heads start at the taps of the rectangle closest to a square, prefix tokens

    Example:
        >>> edit = iso.layers.GatedMap(num_heads=4)
        >>> maps = torch.randn(2, 4, 13, 13).softmax(-1)
        >>> edit(maps, iso.layers.MapCall(shapes=((3, 4),), prefix=1)).sum(-1).allclose(torch.ones(2, 4, 13))
        True
    """

    def __init__(
        self,
        num_heads: int,
        locality: float = 1.0,
        gate: float = 1.0,
        **kind: Any,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.position = nn.Parameter(torch.empty(num_heads, 3, **kind))
        self.gate = nn.Parameter(torch.empty(num_heads, **kind))
        self._set_position(self.tap_offsets(), locality)
        self.set_gating(gate=gate)

    def position_map(
        self,
        queries: GridSize,
        keys: GridSize,
        allowed: Tensor | None = None,
    ) -> Tensor:
        """Return P between two grids on an image, to allowed keys. Shape: -> (nh, Nq, Nk) or (B, nh, Nq, Nk)"""
        rows, columns = axis_scores(self.position, map(image_axis, queries, keys))
        if allowed is None:
            return kronecker(rows.softmax(-1), columns.softmax(-1))
        return _masked_softmax(outer_sum(rows, columns), allowed)  # (B, nh, Nq, Nk)

    def scaled_map(
        self,
        queries: GridSize,
        keys: GridSize,
        prefix: int,
        dtype: torch.dtype,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return s P, 0 for `prefix` keys, and 1 - s. Shape: -> (nh, Nq, p + Nk) or (B, nh, Nq, p + Nk), (nh, 1, 1)"""
        share, content_share = mix_weights(self.gate).to(dtype)[:, :, None, None]
        position = F.pad(self.position_map(queries, keys, allowed), (prefix, 0))
        return position.to(dtype) * share, content_share

    def place_map(self, queries: Tensor, keys: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return P between places (row, column) in steps of the keys, to the allowed keys only.

        Shape: queries (Nq, 2), keys (Nk, 2) -> (nh, Nq, Nk), or (B, nh, Nq, Nk) under a mask
        """
        position = upcast(self.position)[:, :, None, None]  # (nh, 3, 1, 1)
        offsets = keys.to(position) - queries.to(position)[:, None]  # (Nq, Nk, 2)
        rows, columns = offsets.unbind(-1)
        along_x, along_y, square = position.unbind(1)  # (nh, 1, 1) each
        distance = rows.square() + columns.square()
        scores = along_x * columns + along_y * rows + square * distance
        return scores.softmax(-1) if allowed is None else _masked_softmax(scores, allowed)

    def forward(self, maps: Tensor, call: MapCall) -> Tensor:
        allowed = None if call.mask is None else allowed_pairs(call.mask, maps)
        if call.places is not None:
            queries, keys = call.places(*maps.shape[-2:])
            position = self.place_map(queries, keys, allowed)
            return gated_mix(maps, position.to(maps.dtype), self.gate)
        return self._mix_on_grids(maps, call, allowed)

    def _mix_on_grids(self, maps: Tensor, call: MapCall, allowed: Tensor | None) -> Tensor:
        """Mix maps with position attention among the tokens on the grid; those of prefix tokens stay."""
        if maps.shape[-2] == 1:  # a class token, in the middle of the image
            queries = (1, 1)
            prefix = 0
            keys, first = fit_grid(maps.shape[-1], call.shapes, call.prefix)
        else:
            queries, prefix = fit_grid(maps.shape[-2], call.shapes, call.prefix)
            keys, first = fit_grid(maps.shape[-1], (queries,), prefix)
        if allowed is None:
            parameters = (self.position, self.gate)
            scaled, content_share = self.cached(
                parameters, self.scaled_map, queries, keys, first, maps.dtype
            )
        else:
            on_grids = allowed[..., prefix:, first:]
            scaled, content_share = self.scaled_map(queries, keys, first, maps.dtype, on_grids)
        if not prefix:
            return torch.addcmul(scaled, maps, content_share)
        mixed = torch.addcmul(scaled, maps[..., prefix:, :], content_share)
        return torch.cat([maps[..., :prefix, :], mixed], dim=-2)
