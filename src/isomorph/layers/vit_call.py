"""The call of a ViT's attention, for layers of gated attention on tokens that replace it."""

from typing import Any

from torch import Tensor, nn

from isomorph.layers.token_heads import TokenHeads


class ViTCall(TokenHeads):
    """Base of layers that are called as timm's Attention is, with its norms of queries and keys.

    It comes before the layer of gated attention among the bases of a class.

    Raises: ValueError for a mask, which position attention cannot obey.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised queries and keys."""
        return self.q_norm(q), self.k_norm(k)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        grid_size: tuple[int, int] | None = None,
    ) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError(f"{type(self).__name__} does not support attn_mask or is_causal; leave them out")
        return super().forward(x, grid_size)

    def attention(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        grid_size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return the attention map that `forward` applies. Shape: x (B, N, C) -> (B, nh, N, N)"""
        return super().attention(x, grid_size)  # type: ignore[misc]

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, prefix_tokens={self.prefix_tokens}"
