"""Attention on tokens by position alone: what is left of `GPSA` once all of its gates have closed.

Letters: B batch, N tokens, C channels, H W grid, nh heads, hd head width, p prefix tokens.
"""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from isomorph.layers.gated_mix import attend_positions
from isomorph.layers.grid import squarest_window, window_centres
from isomorph.layers.position_gates import TokenPositions
from isomorph.layers.positional_attention import kronecker
from isomorph.layers.token_heads import TokenHeads, softmax_map
from isomorph.layers.vit_call import ViTCall


@register_notrace_module
class PositionalAttention(TokenHeads, TokenPositions):
    """Attention on tokens whose heads attend by position alone, at a cost linear in the number of tokens.

        y = proj(softmax(v_pos . (dx, dy, dx^2 + dy^2)) v)

    It is `GPSA` with all gates at 1. Prefix tokens (class token, registers) have no position and attend by content
    still: `q` are their queries, `k` the keys of all tokens. Arguments, `position`, `locality` and `centre` are those
    of `GPSA`, but the number of heads need not be a square.

    Shape: x (B, N, C) -> (B, N, C) with N = prefix_tokens + H W
    Source: ConViT eq. 7 with gate 1
    Raises: ValueError if the number of heads does not divide C, or if N is not prefix_tokens + H W.

    Example:
        >>> layer = iso.layers.PositionalAttention(dim=32, num_heads=4, grid_size=(6, 8), prefix_tokens=1)
        >>> layer(torch.randn(2, 49, 32)).shape
        torch.Size([2, 49, 32])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid_size: tuple[int, int] = (14, 14),
        qkv_bias: bool = False,
        prefix_tokens: int = 0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"{num_heads} heads do not divide {dim} channels; choose a divisor")
        self.num_heads = num_heads
        self.grid_size, self.prefix_tokens = grid_size, prefix_tokens
        self.q = nn.Linear(dim, dim, bias=qkv_bias) if prefix_tokens else None
        self.k = nn.Linear(dim, dim, bias=qkv_bias) if prefix_tokens else None
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.position = nn.Parameter(torch.empty(num_heads, 3))
        self._set_position(self.tap_offsets(), locality=1.0)

    def tap_offsets(self) -> Tensor:
        """Return the initial centre of every head, in (row, column) steps from the query. Shape: -> (nh, 2)"""
        return window_centres(squarest_window(self.num_heads))

    @property
    def position_share(self) -> Tensor:
        """Share of position attention in every head: 1. Shape: -> (nh,)"""
        return torch.ones_like(self.position[:, 0])

    def prefix_queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries of the prefix tokens and keys of all. Shape: x (B, N, C) -> (B, nh, p, hd), (B, nh, N, hd)"""
        assert self.q is not None
        assert self.k is not None
        q, k = self.split_heads(self.q(x[:, : self.prefix_tokens])), self.split_heads(self.k(x))
        return self.normalise(q.transpose(1, 2), k.transpose(1, 2))

    def forward(self, x: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
        rows, columns = self.axis_maps(self.check_grid(x, grid_size))
        v, p = self.split_heads(self.v(x)), self.prefix_tokens  # (B, N, nh, hd)
        attended = attend_positions(v[:, p:], rows, columns)  # (B, H W, nh, hd)
        if p:
            q, k = self.prefix_queries_keys(x)
            prefix = F.scaled_dot_product_attention(q, k, v.transpose(1, 2)).transpose(1, 2)  # (B, p, nh, hd)
            attended = torch.cat([prefix, attended], dim=1)
        return self.proj_drop(self.proj(attended.flatten(2)))

    def attention(self, x: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
        """Return the attention map that `forward` applies; it is formed only here.

        Shape: x (B, N, C) -> (B, nh, N, N)
        """
        p = self.prefix_tokens
        position = F.pad(kronecker(*self.axis_maps(self.check_grid(x, grid_size))), (p, 0)).to(x.dtype)  # (nh, H W, N)
        position = position.expand(x.shape[0], -1, -1, -1)
        return torch.cat([softmax_map(*self.prefix_queries_keys(x)), position], dim=2) if p else position


class ViTPositionalAttention(ViTCall, PositionalAttention):  # type: ignore[misc]  # a ViT passes a mask too
    """A `PositionalAttention` in place of timm's Attention in a ViT, with its norms of queries and keys.

    In a recast model every call gets the grid of its image; `grid_size` is used for other calls and can be set.

    Shape: x (B, N, C) -> (B, N, C) with N = prefix_tokens + H W
    Source: ConViT eq. 7 with gate 1
    Raises: ValueError as PositionalAttention, or for a mask, which position attention cannot obey.

    Example:
        >>> layer = iso.layers.ViTPositionalAttention(dim=48, num_heads=3, grid_size=(4, 5), prefix_tokens=1)
        >>> layer(torch.randn(2, 21, 48)).shape
        torch.Size([2, 21, 48])
    """
