"""timm's Attention in steps, for attention that does something else between heads and output."""

from collections.abc import Callable
from itertools import repeat

import torch
from timm.layers import Attention
from torch import Tensor

CACHED_BYTES = 2 * 2**20
"""Maps that exist at the same time on a CPU: what stays in its cache, and in its allocator, is read twice as fast."""


def in_eager_mode() -> bool:
    """Whether this call is what it seems to be, not a compiler, exporter or tracer that looks at it once for ever."""
    return not torch.compiler.is_compiling() and not torch.jit.is_tracing()


def images_at_once(q: Tensor) -> int:
    """How many images' maps are formed together. Shape: q (B, H, N, hd)"""
    B, H, N, _ = q.shape
    if q.device.type != "cpu" or not in_eager_mode():
        return B
    return max(1, CACHED_BYTES // (H * N * N * q.element_size()))


def by_images(function: Callable[..., Tensor], number: int, *tensors: Tensor | None) -> Tensor:
    """The function of a batch, `number` images at a time."""
    first = tensors[0]
    assert first is not None
    if number >= first.shape[0]:
        return function(*tensors)
    parts = [t.split(number) if t is not None else repeat(None) for t in tensors]
    return torch.cat([function(*part) for part in zip(*parts, strict=False)])


class HeadedAttention(Attention):
    """timm's Attention, its steps before and after the map by name. Letters: B batch, H heads, N tokens, hd head width.

    Shape: x (B, N, C) -> (B, N, C)
    """

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values. Shape: x (B, N, C) -> three of (B, H, N, hd)"""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q), self.k_norm(k), v

    def finish(self, mixed: Tensor, x: Tensor) -> Tensor:
        """From heads to channels, as timm's Attention. Shape: mixed (B, H, N, hd), x (B, N, C) -> (B, N, C)"""
        y = self.norm(mixed.transpose(1, 2).flatten(2))  # (B, N, H hd)
        if self.gate is not None:
            y = y * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(y))
