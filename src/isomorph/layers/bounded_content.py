"""Content attention of tap heads that reads a bounded number of keys: the base of windows.

The layers compute y = sum_h A_h V weight_h + bias in two sums, position and content, each scaled by its share in the
gate. Heads without query rows (where there are more taps than channels) attend uniformly: they are one head, whose
filter is the sum of theirs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.content_heads import ContentHeads, group_rows_by_head
from isomorph.layers.gpsa2d import GPSA2d


class BoundedContentHeads(ContentHeads):
    """Base of layers whose heads attend by content to a window of the map."""

    @property
    def distinct_heads(self) -> int:
        """Number of heads with queries, and one more for all heads without."""
        return min(self.in_channels + 1, self.num_heads)

    def distinct_rows(self, weight: Tensor) -> Tensor:
        """Return the rows of a projection by distinct head. Shape: weight (rows, C) -> (heads, hd, C)"""
        rows = group_rows_by_head(weight, self.num_heads).unflatten(0, (self.num_heads, -1))
        return rows[: self.distinct_heads]

    def distinct_filters(self, share: Tensor | None = None) -> Tensor:
        """Return the filters of the distinct heads, scaled by a share of each head.

        Shape: share (nh,) -> (C_out, C / groups, heads)
        """
        filters = self.scaled_filters(share)
        own = self.distinct_heads - 1
        if own == self.num_heads - 1:
            return filters
        return torch.cat([filters[..., :own], filters[..., own:].sum(-1, keepdim=True)], dim=-1)

    def scaled_queries(self, x: Tensor) -> Tensor:
        """Return a query per window and distinct head, divided by sqrt(hd). Shape: x (B, C, H, W) -> (B, Hq, Wq, n)"""
        rows = self.distinct_rows(self.query.weight) * self.head_width**-0.5
        return F.linear(self.query_positions(x).permute(0, 2, 3, 1).contiguous(), rows.flatten(0, 1))

    def content_taps(self, x: Tensor, values: Tensor, share: Tensor | None = None) -> Tensor:
        """Return the sum over heads of content attention times values times filter, scaled by a share of each head.

        Shape: x, values (B, C, H, W), share (nh,) -> (B, C_out, Hq, Wq)
        """
        raise NotImplementedError

    def maps_are_smaller(self, H: int, W: int) -> bool:
        """True for a feature map on which forming the whole map of attention takes less time than bounded keys."""
        raise NotImplementedError


class BoundedGPSA2d(BoundedContentHeads, GPSA2d):
    """Base of gated attention whose content is bounded: the sum of the position and the content of every head."""

    def forward(self, x: Tensor) -> Tensor:
        if self.maps_are_smaller(*self.check_map(x)):
            return super().forward(x)
        values = self.map_values(x).unflatten(-1, x.shape[-2:])
        position = self.position_taps(values, self.position_share)
        content = self.content_taps(x, values, torch.sigmoid(-self.gate))
        return self.with_bias(position + content)
