"""timm's Attention with its steps before and after the attention map as methods, for subclasses that change the map."""

from typing import Any

from timm.layers import Attention
from torch import Tensor


def factory_kwargs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the device and dtype in `arguments`, to create a submodule with."""
    return {name: arguments.get(name) for name in ("device", "dtype")}


class AttentionBase(Attention):
    """timm's Attention, with the steps before and after the attention map as separate methods.

    Letters: B batch, nh heads, N tokens, hd head width, C channels.

    Shape: x (B, N, C) -> (B, N, C)
    """

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values. Shape: x (B, N, C) -> three of (B, nh, N, hd)"""
        return self.split_projection(self.qkv(x))

    def split_projection(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of `qkv` into heads, and normalise queries and keys.

        Shape: projected (B, N, 3 nh hd) -> three of (B, nh, N, hd)
        """
        q, k, v = projected.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q), self.k_norm(k), v

    def project_output(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Join the heads and project them, as timm's Attention does.

        Shape: mixed (B, nh, N, hd), x (B, N, C) -> (B, N, C)
        """
        y = self.norm(mixed.transpose(1, 2).flatten(2))  # (B, N, nh hd)
        if self.gate is not None:
            y = y * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(y))
