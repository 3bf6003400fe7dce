"""timm's Attention with its steps before and after the attention map as methods, for subclasses that change the map."""

from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor

from isomorph.layers.eager import is_eager


def factory_kwargs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the device and dtype in `arguments`, to create a submodule with."""
    return {name: arguments.get(name) for name in ("device", "dtype")}


class _ContiguousHeads(torch.autograd.Function):
    """Split the joint projection into contiguous queries, keys and values in one copy; so are their gradients joined.

    Shape: projected (B, N, 3 nh hd) -> three of (B, nh, N, hd)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(projected: Tensor, num_heads: int) -> tuple[Tensor, ...]:
        heads = projected.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)  # (3, B, nh, N, hd)
        return heads.contiguous().unbind(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.stack([grad.transpose(1, 2) for grad in grads], dim=2).flatten(2), None  # (B, N, 3 nh hd)


class AttentionBase(Attention):
    """timm's Attention, with the steps before and after the attention map as separate methods.

    Letters: B batch, nh heads, N tokens, hd head width, C channels.

    Shape: x (B, N, C) -> (B, N, C)
    """

    scale: float
    attn_drop: Any
    qkv: Any
    proj: Any

    def queries_keys_values(self, x: Tensor, contiguous: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values. Shape: x (B, N, C) -> three of (B, nh, N, hd)"""
        return self.split_projection(self.qkv(x), contiguous)

    def split_projection(self, projected: Tensor, contiguous: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of `qkv` into heads, and normalise queries and keys.

        `contiguous` copies all three at once, where products of matrices would copy each of them.

        Shape: projected (B, N, 3 nh hd) -> three of (B, nh, N, hd)
        """
        if contiguous and is_eager():
            q, k, v = _ContiguousHeads.apply(projected, self.num_heads)
        else:
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
