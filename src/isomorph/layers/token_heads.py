"""Heads of attention on tokens that lie on a grid, after prefix tokens without a position."""

import torch
from torch import Tensor, nn


class TokenHeads(nn.Module):
    """Base of attention layers on tokens of a grid: `grid_size` (H, W), which `prefix_tokens` lead.

    Letters: B batch, N tokens, H W grid, nh heads, hd head width.
    """

    num_heads: int
    grid_size: tuple[int, int]
    prefix_tokens: int = 0

    def split_heads(self, x: Tensor) -> Tensor:
        """Split channels into heads. Shape: (B, N, nh hd) -> (B, N, nh, hd)"""
        return x.unflatten(-1, (self.num_heads, -1))

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys as they are; `ViTCall` normalises them."""
        return q, k

    def check_grid(self, x: Tensor, grid_size: tuple[int, int] | None) -> tuple[int, int]:
        """Return the grid of this call. Raises: ValueError if the tokens do not fill it."""
        H, W = grid_size or self.grid_size
        if x.shape[1] != self.prefix_tokens + H * W:
            prefix = f" after {self.prefix_tokens} prefix tokens" if self.prefix_tokens else ""
            raise ValueError(
                f"{x.shape[1]} tokens do not fill the {H} x {W} grid{prefix}; pass grid_size=(height, width)"
            )
        return H, W

    def extra_repr(self) -> str:
        prefix = f", prefix_tokens={self.prefix_tokens}" if self.prefix_tokens else ""
        return f"num_heads={self.num_heads}, grid_size={self.grid_size}{prefix}"


def softmax_map(q: Tensor, k: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(hd)). Shape: q (B, nh, Nq, hd), k (B, nh, N, hd) -> (B, nh, Nq, N)"""
    return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1)
