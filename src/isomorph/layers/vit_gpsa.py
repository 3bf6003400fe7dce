"""GPSA as a replacement for the attention of a ViT: same call, same weights, and a grid that follows the image."""

import copy

import torch
from timm.layers import Attention
from torch import Tensor, nn

from isomorph.layers.eval_mode import relative_deviation
from isomorph.layers.gpsa import GPSA
from isomorph.layers.grid import squarest_window, window_centres
from isomorph.layers.positional_tokens import ViTPositionalAttention
from isomorph.layers.vit_call import ViTCall


class ViTGPSA(ViTCall, GPSA):  # type: ignore[misc]  # a ViT passes a mask too
    """Gated positional self-attention to replace timm's Attention in a ViT, which can make a trained ViT more local.

    With open gates (gate far below 0) it computes the same as the attention that it replaces; training can close the
    gates. The formula and the gating parameters are those of `GPSA`. The number of heads need not be a square: heads
    start at the taps of the rectangle closest to a square (3 heads: 1 x 3, 6: 2 x 3, 12: 3 x 4). `q_norm` and `k_norm`
    are those of the attention. In a recast model every call gets the grid of its image; `grid_size` is used for other
    calls and can be set.

    Shape: x (B, N, C) -> (B, N, C) with N = prefix_tokens + H W
    Source: ConViT eq. 7; differs: as GPSA, and prefix tokens attend by content only
    Raises: ValueError for a mask, which position attention cannot obey.

    Example:
        >>> layer = iso.layers.ViTGPSA(dim=48, num_heads=6, grid_size=(4, 5), prefix_tokens=1)
        >>> layer(torch.randn(2, 21, 48)).shape
        torch.Size([2, 21, 48])
        >>> layer.set_gating(gate=-20.0)  # open: content attention only
        >>> type(layer.to_attention()).__name__
        'Attention'
    """

    positional_class = ViTPositionalAttention

    def tap_offsets(self) -> Tensor:
        """Return the initial centre of every head, in (row, column) steps from the query. Shape: -> (nh, 2)"""
        return window_centres(squarest_window(self.num_heads))

    @torch.no_grad()
    def to_attention(self, atol: float = 1e-3) -> Attention:
        """Return the plain attention that this layer equals.

        Raises: ValueError with the measured deviation (largest |difference| on standard normal tokens, relative to the
        largest |output|) if it is above `atol`: some gates are not open.
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
                f"this layer is not plain attention: the relative deviation is {deviation:.2g}, above {atol:g}; "
                "keep it, or open the gates with set_gating(gate=-15)"
            )
        attention.qkv.requires_grad_(self.qk.weight.requires_grad)
        return attention

    def deviation_from(self, attention: nn.Module) -> float:
        """Return the largest |difference| to `attention`, relative to the largest |output| of `attention`.

        Both run on standard normal tokens.
        """
        H, W = self.grid_size
        return relative_deviation(self, attention, (1, self.prefix_tokens + H * W, self.v.in_features), self.v.weight)
