"""GPSA in the place of a ViT's attention: same call, same weights, and a grid that follows the image."""

import copy
from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn

from isomorph.layers.eval_mode import deviation
from isomorph.layers.gpsa import GPSA
from isomorph.layers.grid import squarest_window, window_centres


class ViTGPSA(GPSA):
    """Gated positional self-attention where a ViT has timm's Attention; with open gates it is that attention.

    The formula is GPSA's. Heads need not be a square number: they look at the taps of the rectangle nearest to a
    square (3 heads: 1 x 3, 6: 2 x 3, 12: 3 x 4). `q_norm` and `k_norm` are the attention's. In a recast model every
    call gets the grid of its image; `grid_size`, which may be assigned, is that of a call on its own.

    Shape: x (B, N, C) -> (B, N, C) with N = prefix_tokens + H W
    Source: ConViT eq. 7; differs: as GPSA, and prefix tokens attend by content only
    Raises: ValueError for a mask, which no position here could honour.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()

    def taps(self) -> Tensor:
        return window_centres(squarest_window(self.num_heads))

    def queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().queries_keys(x)
        return self.q_norm(q), self.k_norm(k)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        grid_size: tuple[int, int] | None = None,
    ) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError("gated positional self-attention takes no mask: its positions look everywhere")
        return super().forward(x, grid_size)

    def attention(  # type: ignore[override]
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        grid_size: tuple[int, int] | None = None,
    ) -> Tensor:
        """The map that `forward` applies. Shape: x (B, N, C) -> (B, nh, N, N)"""
        return super().attention(x, grid_size)

    @torch.no_grad()
    def to_attention(self, atol: float = 1e-3) -> Attention:
        """The plain attention that this layer still is.

        Raises: ValueError naming the measured deviation (largest |difference| on standard normal tokens, relative to
        the largest output) when it is above `atol`: some gates look at places.
        """
        dim, bias = self.v.in_features, self.v.bias is not None
        attention = Attention(dim, self.num_heads, qkv_bias=bias)
        attention.to(self.v.weight.device, self.v.weight.dtype).train(self.training)
        attention.qkv.weight.copy_(torch.cat([self.qk.weight, self.v.weight]))
        if self.qk.bias is not None and self.v.bias is not None:
            attention.qkv.bias.copy_(torch.cat([self.qk.bias, self.v.bias]))
        for name in ("proj", "proj_drop", "q_norm", "k_norm"):
            setattr(attention, name, copy.deepcopy(getattr(self, name)))
        deviation = self.deviation_from(attention)
        if not deviation <= atol:
            raise ValueError(
                f"this layer is no plain attention: it deviates by {deviation:.2g} (relative), above {atol:g}; "
                "open the gates (set_dials(gate=-15)), or keep it"
            )
        attention.qkv.requires_grad_(self.qk.weight.requires_grad)
        return attention

    def deviation_from(self, attention: nn.Module) -> float:
        """Largest |difference| to `attention` on standard normal tokens, relative to its largest |output|."""
        H, W = self.grid_size
        return deviation(self, attention, (1, self.prefix_tokens + H * W, self.v.in_features), self.v.weight)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, prefix_tokens={self.prefix_tokens}"
