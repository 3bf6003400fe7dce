"""Gated positional self-attention on tokens (ConViT): attention initialised as a convolution and free to become global.

    A_h = (1 - sigma(gate_h)) softmax(q_h k_h^T / sqrt(hd)) + sigma(gate_h) softmax(v_pos_h . r)

ConViT eq. 7 then re-normalises each row; that divides a convex combination of two softmaxes by 1 and is left out.
Differences from the released layer: position attention is computed once per grid instead of once per image, and in
closed form (`positions.py`); content attention is `scaled_dot_product_attention`; grids may
be rectangular.

Letters: B batch, N tokens, C channels, H W grid, nh heads, hd head width, p prefix tokens.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import Attention, register_notrace_module
from torch import Tensor, nn

from isomorph.layers.attention_base import copy_parts, scaled, softmax_map
from isomorph.layers.gated.positions import MixPositions, attend_by_axis, gated_mix
from isomorph.layers.gated.token_heads import TokenHeads, ViTCall
from isomorph.layers.grid import GridSize
from isomorph.layers.modes import match_requires_grad, require_same
from isomorph.layers.unfused_multihead import plain_linears


@register_notrace_module
class PositionalAttention(TokenHeads):
    """Attention on tokens whose heads attend by position alone, at a cost linear in the number of tokens.

        y = proj(softmax(v_pos . (dx, dy, dx^2 + dy^2)) v)

    It is `GPSA` with sigma(gate) = 1. Prefix tokens (class token, registers) have no position and attend by content
    still: `q` are their queries, `k` the keys of all tokens. Arguments, `position`, `locality` and `centre` are those
    of `GPSA`.

    Shape: x (B, N, C) -> (B, N, C) with N = prefix_tokens + H W
    Source: ConViT eq. 7 with gate 1
    Raises: ValueError if the number of heads does not divide C, or if N is not prefix_tokens + H W.

    Example:
        >>> layer = iso.layers.PositionalAttention(dim=32, num_heads=4, grid_size=(6, 8), prefix_tokens=1)
        >>> layer(torch.randn(2, 49, 32)).shape
        torch.Size([2, 49, 32])
    """

    q: Any
    k: Any

    def _add_content(self, dim: int, qkv_bias: bool) -> None:
        self.q = self.k = None
        if self.prefix_tokens:
            self.q = nn.Linear(dim, dim, bias=qkv_bias)
            self.k = nn.Linear(dim, dim, bias=qkv_bias)

    def prefix_queries_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shape: x (B, N, C) -> queries of the prefix tokens (B, nh, p, hd), keys of all (B, nh, N, hd)"""
        q = self.split_heads(self.q(x[:, : self.prefix_tokens]))
        k = self.split_heads(self.k(x))
        return self.q_norm(q.transpose(1, 2)), self.k_norm(k.transpose(1, 2))

    def forward(self, x: Tensor, grid_size: GridSize | None = None) -> Tensor:
        grid_size = self.check_grid(x, grid_size)
        p = self.prefix_tokens
        v = self.split_heads(self.v(x))  # (B, N, nh, hd)
        rows, columns = self.cached((self.position,), self.positions, grid_size, v.dtype)
        attended = attend_by_axis(rows, columns, v[:, p:])  # (B, H W, nh, hd)
        if p:
            q, k = self.prefix_queries_keys(x)
            prefix = F.scaled_dot_product_attention(q, k, v.transpose(1, 2))  # (B, nh, p, hd)
            attended = torch.cat([prefix.transpose(1, 2), attended], dim=1)
        return self.proj_drop(self.proj(attended.flatten(2)))

    def attention(self, x: Tensor, grid_size: GridSize | None = None) -> Tensor:
        """Return the attention map that `forward` applies. Shape: x (B, N, C) -> (B, nh, N, N)"""
        position = self.position_map(self.check_grid(x, grid_size), x.dtype)
        position = position.expand(x.shape[0], -1, -1, -1)
        if not self.prefix_tokens:
            return position
        q, k = self.prefix_queries_keys(x)
        prefix = softmax_map(scaled(q), k)
        return torch.cat([prefix, position], dim=2)


# a ViT passes a mask too
class ViTPositionalAttention(ViTCall, PositionalAttention):  # type: ignore[misc]
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


@register_notrace_module
class GPSA(TokenHeads):
    """Self-attention that a transformer can start training with as if it were a convolution (ConViT).

    Each head mixes content attention (which tokens are similar) with position attention (which tokens are near a fixed
    offset), and learns how much of each to use:

        y = proj((1 - s) softmax(q k^T / sqrt(hd)) v + s softmax(v_pos . (dx, dy, dx^2 + dy^2)) v),    s = sigmoid(gate)

    Gating parameters, per head: `gate` sets the share of position attention, `locality` how sharply it peaks, `centre`
    the offset (row, column) where it peaks. At initialisation head h attends to tap h of a sqrt(nh) x sqrt(nh) window,
    as a convolution does, or of the rectangle closest to a square (3 heads: 1 x 3, 12: 3 x 4). The parameter `position`
    holds v_pos, from which `locality` and `centre` are read.

    `grid_size` (H, W) is the grid of the tokens; pass another one to `forward` at any call. `prefix_tokens` (class
    token, registers) lead the sequence and have no position: they attend, and are attended to, by content only.

    Shape: x (B, N, C) -> (B, N, C) with N = prefix_tokens + H W
    Source: ConViT eq. 5 and 7; differs: 1/sqrt(hd) as in its code, taps row-major, any rectangle, prefix tokens
    Raises: ValueError if the number of heads does not divide C, or if N is not prefix_tokens + H W.

    Example:
        >>> layer = iso.layers.GPSA(dim=32, num_heads=4, grid_size=(6, 8))
        >>> layer(torch.randn(2, 48, 32)).shape
        torch.Size([2, 48, 32])
        >>> layer.centre.tolist()  # offset (row, column) of each head's tap
        [[-0.5, -0.5], [-0.5, 0.5], [0.5, -0.5], [0.5, 0.5]]
        >>> layer.set_gating(locality=2.0, gate=-1.0)  # sharper, but mostly content attention
        >>> layer.attention(torch.randn(2, 20, 32), grid_size=(4, 5)).shape
        torch.Size([2, 4, 20, 20])
    """

    # What `to_positional` returns.
    positional_class: ClassVar[type[PositionalAttention]] = PositionalAttention

    def _add_content(self, dim: int, qkv_bias: bool) -> None:
        super()._add_content(dim, qkv_bias)
        self.gate = nn.Parameter(torch.empty(self.num_heads))

    def forward(self, x: Tensor, grid_size: GridSize | None = None) -> Tensor:
        grid_size = self.check_grid(x, grid_size)
        q, k = self.queries_keys(x)
        v = self.split_heads(self.v(x))  # (B, N, nh, hd)
        parameters = (self.position, self.gate)
        rows, columns, weights = self.cached(parameters, self.positions, grid_size, v.dtype)
        content = F.scaled_dot_product_attention(q, k, v.transpose(1, 2))  # (B, nh, N, hd)
        content = content.transpose(1, 2)
        mixed = MixPositions.apply(
            content, v, rows, columns, self.gate, weights, self.prefix_tokens
        )
        return self.proj_drop(self.proj(mixed.flatten(2)))

    def content_scores(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        """Return the scaled queries and the keys of content attention. Shape: x (B, N, C) -> two of (B, nh, N, hd)"""
        q, k = self.queries_keys(x)
        return scaled(q), k, None

    def attention(self, x: Tensor, grid_size: GridSize | None = None) -> Tensor:
        """Return the attention map that `forward` applies. Shape: x (B, N, C) -> (B, nh, N, N)"""
        grid_size = self.check_grid(x, grid_size)
        content = softmax_map(*self.content_scores(x))
        p = self.prefix_tokens
        mixed = gated_mix(content[:, :, p:], self.position_map(grid_size, content.dtype), self.gate)
        return torch.cat([content[:, :, :p], mixed], dim=2)

    @torch.no_grad()
    def to_positional(self) -> PositionalAttention:
        """Return the layer with sigma(gate) = 1: without queries and keys, but for those of prefix tokens."""
        layer = self.positional_class(
            self.v.in_features,
            self.num_heads,
            self.grid_size,
            self.v.bias is not None,
            self.prefix_tokens,
        )
        layer = layer.to(self.v.weight)
        if self.prefix_tokens:
            plain_linears(self, ("qk",))
            for kind, joint in self.qk.named_parameters():
                queries, keys = joint.chunk(2)
                for part, rows in ((layer.q, queries), (layer.k, keys)):
                    parameter = getattr(part, kind)
                    parameter.copy_(rows)
                    parameter.requires_grad_(joint.requires_grad)
            copy_parts(self, layer, ("q_norm", "k_norm"))
        layer.position.copy_(self.position)
        copy_parts(self, layer, ("v", "proj", "proj_drop"))
        return layer.train(self.training)


class ViTGPSA(ViTCall, GPSA):  # type: ignore[misc]  # a ViT passes a mask too
    """Gated positional self-attention to replace timm's Attention in a ViT, which can make a trained ViT more local.

    With open gates (gate far below 0) it computes the same as the attention that it replaces; training can close the
    gates. The formula and the gating parameters are those of `GPSA`. `q_norm` and `k_norm` are those of the
    attention. In a recast model every call gets the grid of its image; `grid_size` is used for other calls and can be
    set.

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

    @torch.no_grad()
    def to_attention(self, atol: float = 1e-3) -> Attention:
        """Return the plain attention that this layer equals. Raises: ValueError as `require_same`: gates not open."""
        plain_linears(self, ("qk", "v"))
        dim = self.v.in_features
        attention = Attention(dim, self.num_heads, qkv_bias=self.v.bias is not None)
        attention.to(self.v.weight).train(self.training)
        attention.qkv.weight.copy_(torch.cat([self.qk.weight, self.v.weight]))
        if self.qk.bias is not None and self.v.bias is not None:
            attention.qkv.bias.copy_(torch.cat([self.qk.bias, self.v.bias]))
        copy_parts(self, attention, ("proj", "proj_drop", "q_norm", "k_norm"))
        advice = "keep it, or open the gates with set_gating(gate=-15)"
        require_same(self, attention, (1, self.num_tokens, dim), atol, advice)
        match_requires_grad(attention.qkv, self.qk, self.v)
        return attention
