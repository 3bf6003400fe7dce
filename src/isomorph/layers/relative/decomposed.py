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
from torch import Tensor, nn

from isomorph.layers.attention_base import AttentionBase, factory_kwargs
from isomorph.layers.eager import constant
from isomorph.layers.map_grid import GridSize
from isomorph.layers.refined.attention import copy_parts


def offset_vectors(table: Tensor, size: int) -> Tensor:
    """Return the vector R[i - i'] for every query i and key i' of an axis, from a table for any size.

    A table for another size is interpolated linearly; offset 0 stays in the middle.

    Shape: table (2 s - 1, hd) -> (size, size, hd)
    """
    if table.shape[0] != 2 * size - 1:
        exact = table.to(torch.promote_types(table.dtype, torch.float32))
        table = F.interpolate(exact.T[None], 2 * size - 1, mode="linear")[0].T.to(table.dtype)
    return table[constant(_offset_entries, table, size)]


def _offset_entries(size: int, device: torch.device) -> Tensor:
    positions = torch.arange(size, device=device)
    return positions[:, None] - positions + size - 1


def attend_decomposed(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, grid_size: GridSize, drop: float = 0.0
) -> Tensor:
    """Return softmax(q k^T / sqrt(hd) + q . R_rows + q . R_columns) v without forming the map.

    The values get zeros to the width of the longer queries and keys, as torch's fast kernels need equal widths.

    Shape: q, k, v (B, nh, N, hd), rows (H, H, hd), columns (W, W, hd) -> (B, nh, N, hd)
    """
    queries, keys = decomposed_queries(q, rows, columns, grid_size), decomposed_keys(k, grid_size)
    values = F.pad(v, (0, sum(grid_size)))
    return F.scaled_dot_product_attention(queries, keys, values, dropout_p=drop, scale=1.0)[..., : v.shape[-1]]


def decomposed_queries(q: Tensor, rows: Tensor, columns: Tensor, grid_size: GridSize) -> Tensor:
    """Return [q / sqrt(hd), score of every key row, score of every key column].

    Shape: q (B, nh, N, hd) -> (B, nh, N, hd + H + W)
    """
    placed = q.unflatten(2, grid_size)  # (B, nh, H, W, hd)
    by_row = torch.einsum("bnhwc,hkc->bnhwk", placed, rows.to(q.dtype))  # (B, nh, H, W, H)
    by_column = torch.einsum("bnhwc,wkc->bnhwk", placed, columns.to(q.dtype))  # (B, nh, H, W, W)
    return torch.cat([placed * q.shape[-1] ** -0.5, by_row, by_column], -1).flatten(2, 3)


def decomposed_keys(k: Tensor, grid_size: GridSize) -> Tensor:
    """Return [k, row as one-hot, column as one-hot]. Shape: k (B, nh, N, hd) -> (B, nh, N, hd + H + W)"""
    positions = constant(_one_hot_positions, k, grid_size, k.dtype)  # (N, H + W)
    return torch.cat([k, positions.expand(*k.shape[:2], -1, -1)], -1)


def _one_hot_positions(grid_size: GridSize, dtype: torch.dtype, device: torch.device) -> Tensor:
    H, W = grid_size
    rows = torch.eye(H, dtype=dtype, device=device)[:, None].expand(H, W, H)
    columns = torch.eye(W, dtype=dtype, device=device).expand(H, W, W)
    return torch.cat([rows, columns], -1).flatten(0, 1)  # (N, H + W)


def split_windows(x: Tensor, window: GridSize) -> Tensor:
    """Cut a map, whose size is a multiple of the window's, into windows. Shape: (B, H, W, C) -> (B n, h w, C)"""
    (B, H, W, C), (h, w) = x.shape, window
    return x.view(B, H // h, h, W // w, w, C).transpose(2, 3).reshape(-1, h * w, C)


def join_windows(x: Tensor, window: GridSize, grid_size: GridSize) -> Tensor:
    """Put windows together to a map. Shape: (B n, h w, C) -> (B, H, W, C)"""
    (H, W), (h, w), C = grid_size, window, x.shape[-1]
    return x.view(-1, H // h, W // w, h, w, C).transpose(2, 3).reshape(-1, H, W, C)


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
        sizes = grid_size or window or (14, 14)
        if min(sizes) < 1 or (window and min(window) < 1):
            raise ValueError(f"window {window} and grid_size {grid_size} must be (height, width), both at least 1")
        self.window = window
        H, W = sizes
        self.rel_pos_h = nn.Parameter(torch.zeros(2 * H - 1, self.head_dim, **factory_kwargs(kwargs)))
        self.rel_pos_w = nn.Parameter(torch.zeros(2 * W - 1, self.head_dim, **factory_kwargs(kwargs)))

    @classmethod
    def from_attention(
        cls, attention: Attention, window: GridSize | None, grid_size: GridSize | None = None
    ) -> "DecomposedAttention":
        """Return this layer with the weights of timm's Attention, whose projections may be pyramids."""
        first = next(attention.parameters())
        layer = cls(attention.attn_dim, attention.num_heads, window, grid_size, device=first.device, dtype=first.dtype)
        copy_parts(attention, layer)
        return layer

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        self._check_call(x, attn_mask, is_causal)
        q, k, v = self.queries_keys_values_in_windows(x)
        rows, columns = self.axis_vectors(x)
        drop = self.attn_drop.p if self.training else 0.0
        mixed = attend_decomposed(q, k, v, rows, columns, self.window_of(x), drop)  # (B n, nh, h w, hd)
        return self.project_windows(mixed, x)

    def attention(self, x: Tensor) -> Tensor:
        """Return the attention map of every window that `forward` applies. Shape: x (B, H, W, C) -> (B n, nh, N, N)"""
        q, k, _ = self.queries_keys_values_in_windows(x)
        window, (rows, columns) = self.window_of(x), self.axis_vectors(x)
        scores = decomposed_queries(q, rows, columns, window) @ decomposed_keys(k, window).mT
        return scores.softmax(-1)

    def window_of(self, x: Tensor) -> GridSize:
        """Return the size of the windows of a map, which is that of the map by default. Shape: x (B, H, W, C)"""
        return self.window or (x.shape[1], x.shape[2])

    def axis_vectors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors R of rows and of columns. Shape: x (B, H, W, C) -> (h, h, hd), (w, w, hd)"""
        h, w = self.window_of(x)
        return offset_vectors(self.rel_pos_h, h), offset_vectors(self.rel_pos_w, w)

    def queries_keys_values_in_windows(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of every window. Shape: x (B, H, W, C) -> three of (B n, nh, h w, hd)"""
        (B, H, W, _), (h, w) = x.shape, self.window_of(x)
        right, below = -W % w, -H % h
        if right or below:
            tokens = x.flatten(0, 2)
            projected = self.qkv(torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])]))  # (B H W + 1, 3 nh hd)
            padding = projected[-1]
            projected = projected[:-1].unflatten(0, (B, H, W))
            projected = torch.cat([projected, padding.expand(B, H, right, -1)], 2)
            projected = torch.cat([projected, padding.expand(B, below, W + right, -1)], 1)
        else:
            projected = self.qkv(x)
        return self.split_projection(split_windows(projected, (h, w)))

    def project_windows(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Join heads and windows, cut off the padding, and project.

        Shape: mixed (B n, nh, h w, hd), x (B, H, W, C) -> (B, H, W, C)
        """
        (H, W), (h, w) = x.shape[1:3], self.window_of(x)
        tokens = mixed.transpose(1, 2).flatten(2)  # (B n, h w, nh hd)
        joined = join_windows(tokens, (h, w), (H + -H % h, W + -W % w))[:, :H, :W].flatten(1, 2)  # (B, N, nh hd)
        heads = joined.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, nh, N, hd)
        return self.project_output(heads, x.flatten(1, 2)).unflatten(1, (H, W))

    def _check_call(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
        """Check the arguments of a call. Raises: ValueError for tokens instead of a map, or a mask."""
        if attn_mask is not None or is_causal:
            raise ValueError("DecomposedAttention does not support attn_mask or is_causal; leave them out")
        if x.ndim != 4:
            raise ValueError(f"the input has shape {tuple(x.shape)}; give a feature map (B, H, W, C)")

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, window={self.window}"
