"""Gated attention on feature maps whose content attention reads a coarse grid of averaged cells.

Letters as in `gpsa2d.py`; h w cells.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module, to_2tuple
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from isomorph.layers.bounded_content import BoundedContentConv2d, BoundedContentHeads, BoundedGPSA2d
from isomorph.layers.chunked import is_eager
from isomorph.layers.positional_attention import geometry_dtype

CELLS = 7
"""Default of the most cells along each axis."""


def _check_cells(cells: int | tuple[int, int]) -> tuple[int, int]:
    """Return the most cells along both axes. Raises: ValueError unless they are above 0."""
    rows, columns = to_2tuple(cells)
    if rows < 1 or columns < 1:
        raise ValueError(f"cells {rows} x {columns} must be above 0")
    return rows, columns


class PooledHeads(BoundedContentHeads):
    """Base of layers whose heads attend by content to the averages of cells, and to the zeros of the padding."""

    def __init__(self, *args: Any, cells: int | tuple[int, int] = CELLS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cells = _check_cells(cells)

    @property
    def content_options(self) -> dict[str, tuple[int, int]]:
        """The most cells along both axes."""
        return {"cells": self.cells}

    def maps_are_smaller(self, H: int, W: int) -> bool:
        """True if every position is a cell of its own."""
        return statically_known_true(self.cells[0] >= H) and statically_known_true(self.cells[1] >= W)

    def cell_members(self, H: int, W: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 for the positions in a cell, along rows and along columns of an H x W map. Shape: -> (h, H), (w, W)

        All cells have the same size, but for the last ones of an axis, which may be smaller, or empty in a graph, whose
        sizes may be open.
        """
        members = []
        for length, most in zip((H, W), self.cells, strict=True):
            number = min(most, length) if is_eager() else most
            side = (length + most - 1) // most  # rounded up without negative numbers, which ONNX rounds towards 0
            cell = torch.arange(length, device=like.device) // side
            members.append((torch.arange(number, device=like.device)[:, None] == cell).to(like.dtype))
        return members[0], members[1]

    def average_cells(self, x: Tensor) -> Tensor:
        """Return the averages of the cells, 0 for empty ones. Shape: x (B, C, H, W) -> (B, C, h w)"""
        rows, columns = (
            m / m.sum(1, keepdim=True).clamp(min=1) for m in self.cell_members(x.shape[-2], x.shape[-1], like=x)
        )
        return (rows @ (x @ columns.t())).flatten(2)

    def cell_counts(self, H: int, W: int, like: Tensor) -> Tensor:
        """Return the number of positions of every cell, and of the padding. Shape: -> (h w + 1,)"""
        numbers = torch.empty(0, dtype=geometry_dtype(like), device=like.device)
        rows, columns = (m.sum(1) for m in self.cell_members(H, W, like=numbers))
        padded = (H + 2 * self.padding[0]) * (W + 2 * self.padding[1]) - H * W
        return torch.cat([(rows[:, None] * columns).flatten(), torch.full_like(rows[:1], padded)])

    def cell_scores(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a scaled query per window, a key per cell and one for the padding, and the score added to each key.

        A cell counts as often as it has positions: its score is the logarithm of their number.

        Shape: x (B, C, H, W) -> (B, nh, Nq, hd), (B, nh, h w + 1, hd), (h w + 1,)
        """
        q = self.scaled_queries(x).flatten(1, 2)  # (B, Nq, nh hd)
        k = F.linear(self.average_cells(x).transpose(1, 2), self.distinct_rows(self.key.weight).flatten(0, 1))
        q, k = (t.unflatten(2, (self.distinct_heads, -1)).transpose(1, 2) for t in (q, F.pad(k, (0, 0, 0, 1))))
        return q, k, self.cell_counts(x.shape[-2], x.shape[-1], like=q).log().to(q.dtype)

    def content_taps(self, x: Tensor, values: Tensor, share: Tensor | None = None) -> Tensor:
        """Return the sum over heads of content attention times values times filter, scaled by a share of each head.

        The filters are applied to the few cells, not to what each of the many queries reads.

        Shape: x, values (B, C, H, W), share (nh,) -> (B, C_out, Hq, Wq)
        """
        q, k, score = self.cell_scores(x)
        maps = torch.softmax(k @ q.transpose(2, 3) + score[:, None], dim=2)  # (B, nh, h w + 1, Nq)
        filters = self.distinct_filters(share).unflatten(0, (self.groups, -1)).to(values.dtype)
        cells = self.average_cells(values).unflatten(1, (self.groups, -1))  # (B, G, C / G, h w)
        filtered = torch.einsum("bgcm,goch->bgohm", cells, filters).flatten(1, 2)  # (B, C_out, nh, h w)
        y = F.pad(filtered, (0, 1)).flatten(2) @ maps.to(values.dtype).flatten(1, 2)  # (B, C_out, Nq)
        return y.unflatten(-1, self.query_grid(x.shape[-2], x.shape[-1]))

    def content_scores(self, x: Tensor, query: int | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the queries, or one, the keys of the cells and of the padding, and the score added to each key.

        Shape: x (B, C, H, W) -> (B, nh, Nq, hd), (B, nh, h w + 1, hd), (1, h w + 1)
        """
        q, k, score = self.cell_scores(x)
        heads = torch.arange(self.num_heads, device=x.device).clamp(max=self.distinct_heads - 1)
        q = q if query is None else q[:, :, query : query + 1]
        return q[:, heads], k[:, heads], score[None]

    def content_attention(self, x: Tensor, query: int | None = None) -> Tensor:
        """Return the map of content attention over the zero-padded keys, or the row of one query. Rows sum to 1.

        The attention to a cell is spread evenly over its positions.

        Shape: x (B, C, H, W) -> (B, nh, Nq, (H + 2 pad) (W + 2 pad))
        """
        (H, W), (ph, pw) = x.shape[-2:], self.padding
        counts = self.cell_counts(H, W, like=x).to(x.dtype)
        maps = super().content_attention(x, query) / counts.clamp(min=1)  # (B, nh, Nq, h w + 1)
        rows, columns = self.cell_members(H, W, like=x)
        cell = rows.argmax(0)[:, None] * len(columns) + columns.argmax(0)  # (H, W)
        return maps[..., F.pad(cell, (pw, pw, ph, ph), value=len(counts) - 1).flatten()]


@register_notrace_module
class PooledGPSA2d(PooledHeads, BoundedGPSA2d):
    """Gated attention on feature maps whose heads attend by content to averages of cells of the map.

        y = sum_h A_h V weight_h + bias
        A_h V = (1 - sigma(gate_h)) softmax(q_h pool(k_h)^T / sqrt(hd) + log n) pool(V) + sigma(gate_h) P_h V

    It is `GPSA2d` with keys and values averaged over cells, of which there are at most `cells` (rows and columns); n is
    the number of positions of a cell. Heads reach the whole map, coarsely, at a cost linear in the number of positions.
    A map with no more positions than cells gives GPSA2d. The other arguments are those of `GPSA2d`.

    Shape: x (B, C, H, W) -> (B, C_out, Hq, Wq), sizes as nn.Conv2d
    Source: T-CNN eq. 4-7; differs: the cells, besides what differs in GPSA2d
    Raises: ValueError for cells that are not above 0, or as GPSA2d.

    Example:
        >>> layer = iso.layers.PooledGPSA2d(8, 16, kernel_size=3, padding=1, cells=7)
        >>> layer(torch.randn(2, 8, 20, 30)).shape
        torch.Size([2, 16, 20, 30])
        >>> layer.set_gating(locality=30.0, gate=20.0)  # so local that it is a convolution
        >>> layer.to_conv()
        Conv2d(8, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """


@register_notrace_module
class PooledContentConv2d(PooledHeads, BoundedContentConv2d):
    """Attention on feature maps by content alone, to averages of cells: what pruning leaves of opened heads.

        y = sum_h softmax(q_h pool(k_h)^T / sqrt(hd) + log n) pool(x) weight_h + bias

    Arguments as in `PooledGPSA2d`, of which these are the heads with gates at 0.

    Shape: x (B, C, H, W) -> (B, C_out, Hq, Wq), sizes as nn.Conv2d
    Source: T-CNN eq. 7 with gate 0, over cells
    Raises: ValueError as PooledGPSA2d.

    Example:
        >>> layer = iso.layers.PooledContentConv2d(8, 16, kernel_size=3, padding=1, num_heads=2, cells=3)
        >>> layer(torch.randn(2, 8, 6, 6)).shape
        torch.Size([2, 16, 6, 6])
    """
