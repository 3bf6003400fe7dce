"""One axis of a layer of tap heads: where its queries and keys lie, and what each head reads along it."""

from typing import NamedTuple

import torch
from torch import Tensor

from isomorph.layers.grid import axis_offsets, conv_output_size
from isomorph.layers.positional_attention import centred_axis_attention

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
