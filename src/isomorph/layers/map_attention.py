"""What `insert` adds to a network: x + gamma * block(x), and self-attention over a map as such a block."""

from typing import Any, Literal

import torch
from timm.layers import Attention
from torch import Tensor, nn

# What a module returns: a map (B, C, H, W) (or 1-d, 3-d), tokens (B, N, C), or a map (B, H, W, C).
Layout = Literal["map", "tokens", "map, channels last"]


class InsertedBlock(nn.Module):
    """x + gamma * block(x), with a gamma for each channel that is 0 at first, on what `layout` says."""

    def __init__(
        self,
        block: nn.Module,
        channels: int,
        layout: Layout,
        entry: int | str | None = None,
    ) -> None:
        super().__init__()
        self.block = block
        self.layout = layout
        self.entry = entry
        self.gamma = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.layout == "map, channels last":
            y = self.block(x.movedim(-1, 1)).movedim(1, -1)
        else:
            y = self.block(x)
        gamma: Tensor = self.gamma
        if self.layout == "map":
            gamma = gamma.view(-1, *[1] * (x.ndim - 2))
        return x + (gamma * y).to(x.dtype)


class MapAttention(nn.Module):
    """Attention over all positions of a map, or over tokens, after a LayerNorm of each position.

    Its cost grows with the square of the number of positions: use it on late stages. The attention is timm's, so every
    rule for attention applies to it.

    Shape: x (B, C, ...) with the axes of a map after the channels -> the same; tokens (B, N, C) -> the same
    Args:
        channels: of the input.
        num_heads: by default the largest of 8, 4, 2 and 1 that divides the channels.

    Example:
        >>> iso.layers.MapAttention(64)(torch.randn(2, 64, 8, 8)).shape
        torch.Size([2, 64, 8, 8])
    """

    def __init__(self, channels: int, num_heads: int | None = None, **kwargs: Any) -> None:
        super().__init__()
        heads = num_heads or next(n for n in (8, 4, 2, 1) if channels % n == 0)
        self.norm = nn.LayerNorm(channels)
        self.attn = Attention(channels, heads, qkv_bias=True, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            return self.attn(self.norm(x))
        tokens = x.flatten(2).transpose(1, 2)  # (B, N, C)
        return self.attn(self.norm(tokens)).transpose(1, 2).reshape(x.shape)
