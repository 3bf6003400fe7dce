"""Attention with the maps of an earlier block, for networks that share refined maps between blocks."""

from typing import Any

from torch import Tensor, nn


class ReusedAttention(nn.Module):
    """Attention that applies the maps of an earlier block, with new values and a new projection.

    y = proj(maps v). It saves the queries, keys and softmax of a block.

    Shape: x (B, N, C), maps (B, H, N, N) -> (B, N, C)
    Source: Refiner B.4, Table 13
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        **kind: Any,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.v = nn.Linear(dim, dim, bias=qkv_bias, **kind)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **kind)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, maps: Tensor) -> Tensor:
        v = self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, N, hd)
        return self.proj_drop(self.proj((maps @ v).transpose(1, 2).flatten(2)))

    def attention(self, x: Tensor, maps: Tensor) -> Tensor:
        """Return the attention map that `forward` applies: the given one. Shape: maps (B, H, N, N) -> (B, H, N, N)"""
        return maps
