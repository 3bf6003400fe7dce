"""Attention on feature maps with relative positions by row and by column, over the whole map or in windows (ViTDet).

The position scores are products with the queries, so they can be written into longer queries and keys:

    [q / sqrt(hd), q . R_rows, q . R_columns] . [k, row of the key as one-hot, column of the key as one-hot]

is the whole score. No N x N bias is formed, and memory grows linearly with the number of tokens.

Letters: B batch, H W grid, N = H W, C channels, nh heads, hd head width, h w window, n windows per image.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, register_notrace_module
from timm.models.swin_transformer import window_partition, window_reverse
from torch import Tensor, nn

from isomorph.layers.attention_base import (
    AttentionBase,
    factory_kwargs,
    join_heads,
    like_attention,
    split_heads,
)
from isomorph.layers.grid import GridSize, no_mask, require_map
from isomorph.layers.modes import constant
from isomorph.layers.relative.attention import offset_entries, resize_table


def offset_vectors(table: Tensor, size: int) -> Tensor:
    """Return R[i - i'] for every query and key of an axis, from a table for any size, interpolated linearly.

    Shape: table (2 s - 1, hd) -> (size, size, hd)
    """
    resized = resize_table(table.T.unsqueeze(-1), (size, 1))  # (hd, 2 size - 1, 1)
    table = resized.squeeze(-1).T
    entries = constant(offset_entries, table, size)
    return table.index_select(0, entries.flatten()).unflatten(0, entries.shape)


def _one_hot_positions(grid_size: GridSize, dtype: torch.dtype, device: torch.device) -> Tensor:
    H, W = grid_size
    rows = torch.eye(H, dtype=dtype, device=device)
    columns = torch.eye(W, dtype=dtype, device=device)
    positions = torch.cat([rows[:, None].expand(H, W, H), columns.expand(H, W, W)], -1)
    return positions.flatten(0, 1)  # (N, H + W)


@register_notrace_module
class DecomposedAttention(AttentionBase):
    """Self-attention on feature maps with relative positions by row and by column, in windows if wanted (ViTDet).

        y = proj(softmax(q k^T / sqrt(hd) + q . R_rows[i - i'] + q . R_columns[j - j']) v)

    `window` (h, w) limits attention to windows of that size; None is the whole map. The tables `rel_pos_h` and
    `rel_pos_w` hold the vectors R; they start at zero, where the layer is plain attention. They are created for a map
    of `grid_size`, by default the window or 14 x 14, and resized to others. The other arguments are those of timm's
    Attention.

    A map that the windows do not fill is padded with zero tokens on the right and below, which are keys too. Their
    queries, keys and values are computed once, from a single zero token: in train mode a BatchNorm in the projection
    would otherwise count all of them in its statistics.

    Shape: x (B, H, W, C) -> (B, H, W, C)
    Source: ViTDet (Li et al., 2022), section 3, with the positions of MViTv2 (Li et al., 2022), eq. 4 and 5; differs:
    the padding is not part of the statistics of a pyramid
    Raises: ValueError for an empty window, a mask, or tokens instead of a feature map.

    Example:
        >>> layer = iso.layers.DecomposedAttention(dim=64, num_heads=4, window=(7, 7))
        >>> layer(torch.randn(2, 16, 10, 64)).shape
        torch.Size([2, 16, 10, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        window: GridSize | None = None,
        grid_size: GridSize | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        H, W = grid_size or window or (14, 14)
        if min(H, W) < 1 or (window and min(window) < 1):
            raise ValueError(
                f"window {window} and grid_size {grid_size} must be (height, width), both at least 1",
            )
        factory = factory_kwargs(kwargs)
        self.window = window
        self.rel_pos_h = nn.Parameter(torch.zeros(2 * H - 1, self.head_dim, **factory))
        self.rel_pos_w = nn.Parameter(torch.zeros(2 * W - 1, self.head_dim, **factory))

    @classmethod
    def from_attention(
        cls, attention: Attention, window: GridSize | None, grid_size: GridSize | None = None
    ) -> "DecomposedAttention":
        """Return this layer with the weights of timm's Attention, whose projections may be pyramids."""
        return like_attention(attention, cls, window=window, grid_size=grid_size)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        no_mask(self, attn_mask, is_causal)
        require_map(x)
        queries, keys, v = self.longer_queries_keys(x)
        # torch's fast kernels need q, k and v of one width
        values = F.pad(v, (0, sum(self.window_of(x))))
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, dropout_p=self.drop_probability, scale=1.0
        )
        return self.project_windows(mixed[..., : self.head_dim], x)

    def content_scores(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        """Return the longer queries and keys, whose products are the scores, position included."""
        queries, keys, _v = self.longer_queries_keys(x)
        return queries, keys, None

    def longer_queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shape: x (B, H, W, C) -> two of (B n, nh, h w, hd + h + w), values (B n, nh, h w, hd)"""
        q, k, v = self.queries_keys_values_in_windows(x)
        window = self.window_of(x)
        rows = offset_vectors(self.rel_pos_h, window[0]).to(q.dtype)  # (h, h, hd)
        columns = offset_vectors(self.rel_pos_w, window[1]).to(q.dtype)  # (w, w, hd)
        placed = q.unflatten(2, window)  # (B n, nh, h, w, hd)
        by_row = torch.einsum("bnhwc,hkc->bnhwk", placed, rows)  # (B n, nh, h, w, h)
        by_column = torch.einsum("bnhwc,wkc->bnhwk", placed, columns)  # (B n, nh, h, w, w)
        queries = torch.cat([placed * self.scale, by_row, by_column], -1).flatten(2, 3)
        positions = constant(_one_hot_positions, k, window, k.dtype)  # (h w, h + w)
        positions = positions.expand(*k.shape[:2], -1, -1)
        return queries, torch.cat([k, positions], -1), v

    def window_of(self, x: Tensor) -> GridSize:
        """Return the height and width of the windows of this call, by default of the whole map."""
        return self.window or (x.shape[1], x.shape[2])

    def queries_keys_values_in_windows(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shape: x (B, H, W, C) -> three of (B n, nh, h w, hd)"""
        window = self.window_of(x)
        windows = window_partition(self.padded_projection(x), window)  # (B n, h, w, 3 nh hd)
        return self.split_projection(windows.flatten(1, 2))

    def padded_projection(self, x: Tensor) -> Tensor:
        """Return the joint projection, padded with that of a zero token. Shape: (B, H, W, C) -> (B, H', W', 3 nh hd)"""
        B, H, W, C = x.shape
        h, w = self.window_of(x)
        below = -H % h
        right = -W % w
        if not (below or right):
            return self.qkv(x)
        tokens = torch.cat([x.flatten(0, 2), x.new_zeros(1, C)])
        projected = self.qkv(tokens)  # (B H W + 1, 3 nh hd)
        padding = projected[-1]
        projected = projected[:-1].unflatten(0, (B, H, W))
        at_right = padding.expand(B, H, right, -1)
        projected = torch.cat([projected, at_right], 2)
        at_bottom = padding.expand(B, below, W + right, -1)
        return torch.cat([projected, at_bottom], 1)

    def project_windows(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Join heads and windows. Shape: mixed (B n, nh, h w, hd), x (B, H, W, C) -> (B, H, W, C)"""
        _, H, W, _ = x.shape
        h, w = self.window_of(x)
        tokens = join_heads(mixed).unflatten(1, (h, w))  # (B n, h, w, nh hd)
        height = H + -H % h
        width = W + -W % w
        padded = window_reverse(tokens, (h, w), height, width)  # (B, H', W', nh hd)
        joined = padded[:, :H, :W].flatten(1, 2)  # (B, N, nh hd)
        heads = split_heads(joined, self.num_heads)
        return self.project_output(heads, x.flatten(1, 2)).unflatten(1, (H, W))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, window={self.window}"
