"""Relative attention as a replacement for the attention of a ViT: same call, same weights, a table of positions."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, register_notrace_module
from torch import Tensor, nn

from isomorph.layers.eval_mode import relative_deviation
from isomorph.layers.refined_attention import attention_kwargs, copy_parts
from isomorph.layers.relative_attention import RelativeAttention, attend_with_bias

GridSize = tuple[int, int]


def add_prefix_bias(bias: Tensor, scalars: Tensor, prefix: int) -> Tensor:
    """Return the bias of positions with the bias of prefix tokens, which come first, around it.

    Shape: bias (nh, n, n), scalars (3, nh) -> (nh, prefix + n, prefix + n)
    Source: BEiT (Bao et al., 2022), as published: class token to positions, positions to class token, both
    """
    nh, n, _ = bias.shape
    to_positions, to_prefix, within = scalars[:, :, None, None].unbind()  # (nh, 1, 1) each
    above = torch.cat([within.expand(nh, prefix, prefix), to_positions.expand(nh, prefix, n)], dim=2)
    return torch.cat([above, torch.cat([to_prefix.expand(nh, n, prefix), bias], dim=2)], dim=1)


@register_notrace_module
class ViTRelativeAttention(RelativeAttention):
    """Relative attention on the tokens of a ViT, which can learn how far apart positions are (CoAtNet).

        y = proj(softmax(q k^T / sqrt(hd) + P[i - i', j - j']) v)

    The table P starts at zero, where the layer is plain attention. `grid_size` (H, W) is the grid of the tokens after
    the `prefix_tokens`, whose scores get no bias; the table is created for it and resized to other grids. Pass another
    grid to `forward` at any call. With `prefix_bias` scores from and to prefix tokens get a bias too, as in BEiT: three
    scalars per head, for a prefix token that attends to a position, a position that attends to a prefix token, and a
    prefix token that attends to one. The other arguments are those of timm's Attention.

    Shape: x (B, N, C) -> (B, N, C) with N = prefix_tokens + H W
    Source: CoAtNet eq. 3 (pre); differs: tokens, prefix tokens, and a table that starts at zero
    Raises: ValueError as `RelativeAttention`, for a mask, or if the tokens do not fill the grid.

    Example:
        >>> layer = iso.layers.ViTRelativeAttention(dim=48, num_heads=6, grid_size=(4, 5), prefix_tokens=1)
        >>> layer(torch.randn(2, 21, 48)).shape
        torch.Size([2, 21, 48])
        >>> layer(torch.randn(2, 13, 48), grid_size=(3, 4)).shape  # the table is resized
        torch.Size([2, 13, 48])
        >>> type(layer.to_attention()).__name__  # while the table is zero
        'Attention'
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        grid_size: GridSize = (14, 14),
        prefix_tokens: int = 0,
        prefix_bias: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, grid_size, **kwargs)
        self.prefix_tokens = prefix_tokens
        self.token_grid = grid_size
        like = self.relative_bias
        self.prefix_bias = nn.Parameter(like.new_zeros(3, num_heads)) if prefix_bias and prefix_tokens else None

    def reset_bias(self) -> None:
        """Set the table, and the bias of prefix tokens, to zero."""
        nn.init.zeros_(self.relative_bias)
        if getattr(self, "prefix_bias", None) is not None:  # not yet while the base class initialises
            nn.init.zeros_(self.prefix_bias)  # type: ignore[arg-type]

    def no_weight_decay(self) -> set[str]:
        """Return the names of the table and the bias of prefix tokens."""
        return super().no_weight_decay() | ({"prefix_bias"} if self.prefix_bias is not None else set())

    @property
    def grid_size(self) -> GridSize:
        """The grid of the tokens of calls that do not give one."""
        return self.token_grid

    @grid_size.setter
    def grid_size(self, grid_size: GridSize) -> None:
        self.token_grid = grid_size

    def position_bias(self, grid_size: GridSize, dtype: torch.dtype) -> Tensor:
        """Return P for every pair of tokens, from and to prefix tokens 0 or their bias. Shape: -> (nh, N, N)"""
        p = self.prefix_tokens
        bias = super().position_bias(grid_size, dtype)
        if self.prefix_bias is not None:
            return add_prefix_bias(bias, self.prefix_bias.to(dtype), p)
        return F.pad(bias, (p, 0, p, 0)) if p else bias

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid_size: GridSize) -> Tensor:
        """Apply attention with the position bias. Shape: q, k, v (B, nh, N, hd) -> (B, nh, N, hd)"""
        if not self.prefix_tokens:
            return super().attend(q, k, v, grid_size)
        drop = self.attn_drop.p if self.training else 0.0
        return attend_with_bias(self.position_bias(grid_size, q.dtype), drop, q, k, v)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, grid_size: GridSize | None = None
    ) -> Tensor:
        grid_size = self.check_call(x, attn_mask, is_causal, grid_size)
        return self.project_output(self.attend(*self.queries_keys_values(x), grid_size), x)

    def attention(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, grid_size: GridSize | None = None
    ) -> Tensor:
        """Return the attention map that `forward` applies. Shape: x (B, N, C) -> (B, nh, N, N)"""
        grid_size = self.check_call(x, attn_mask, is_causal, grid_size)
        q, k, _ = self.queries_keys_values(x)
        return ((q * self.scale) @ k.mT + self.position_bias(grid_size, q.dtype)).softmax(-1)

    def check_call(self, x: Tensor, attn_mask: Tensor | None, is_causal: bool, grid_size: GridSize | None) -> GridSize:
        """Return the grid of a call. Raises: ValueError for a mask, or if the tokens do not fill the grid."""
        if attn_mask is not None or is_causal:
            raise ValueError("ViTRelativeAttention does not support attn_mask or is_causal; leave them out")
        H, W = grid_size or self.grid_size
        if x.shape[1] != self.prefix_tokens + H * W:
            raise ValueError(
                f"{x.shape[1]} tokens do not fill the {H} x {W} grid after {self.prefix_tokens} prefix tokens; "
                "pass grid_size=(height, width)"
            )
        return H, W

    def extra_repr(self) -> str:  # the table's grid: that of the last image says nothing about the layer
        grid_size = super().grid_size
        return f"num_heads={self.num_heads}, grid_size={grid_size}, prefix_tokens={self.prefix_tokens}"

    @torch.no_grad()
    def to_attention(self, atol: float = 1e-3) -> Attention:
        """Return the plain attention that this layer equals.

        Raises: ValueError with the measured deviation (largest |difference| on standard normal tokens, relative to the
        largest |output|) if it is above `atol`: the bias is not zero any more.
        """
        if not (isinstance(self.qkv, nn.Linear) and isinstance(self.proj, nn.Linear)):
            raise ValueError("the projections of this layer are not nn.Linear; fuse the model first")
        plain = Attention(**attention_kwargs(self))
        copy_parts(self, plain)
        tokens = self.prefix_tokens + self.grid_size[0] * self.grid_size[1]
        deviation = relative_deviation(self, plain, (1, tokens, self.qkv.in_features), self.qkv.weight)
        if not deviation <= max(atol, torch.finfo(self.qkv.weight.dtype).eps):
            raise ValueError(
                f"this layer is not plain attention: the relative deviation is {deviation:.2g}, above {atol:g}; "
                "keep it, or call reset_bias()"
            )
        return plain.train(self.training)
