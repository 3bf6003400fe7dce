"""timm's Attention in steps, for attention that does something else between heads and output."""

from typing import Any

from timm.layers import Attention
from torch import Tensor

from isomorph.layers.chunked import images_within

CACHED_BYTES = 2 * 2**20
"""Maps that exist at the same time on a CPU: what stays in its cache, and in its allocator, is read twice as fast."""


def images_at_once(q: Tensor) -> int:
    """How many images' maps are formed together. Shape: q (B, nh, N, hd)"""
    _, nh, N, _ = q.shape
    return images_within(CACHED_BYTES, nh * N * N, q)


def placement(arguments: dict[str, Any]) -> dict[str, Any]:
    """Device and dtype among a layer's arguments, for its parts."""
    return {name: arguments.get(name) for name in ("device", "dtype")}


class HeadedAttention(Attention):
    """timm's Attention, its steps before and after the map by name.

    Letters: B batch, nh heads, N tokens, hd head width, C channels.

    Shape: x (B, N, C) -> (B, N, C)
    """

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values. Shape: x (B, N, C) -> three of (B, nh, N, hd)"""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q), self.k_norm(k), v

    def finish(self, mixed: Tensor, x: Tensor) -> Tensor:
        """From heads to channels, as timm's Attention. Shape: mixed (B, nh, N, hd), x (B, N, C) -> (B, N, C)"""
        y = self.norm(mixed.transpose(1, 2).flatten(2))  # (B, N, nh hd)
        if self.gate is not None:
            y = y * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(y))
