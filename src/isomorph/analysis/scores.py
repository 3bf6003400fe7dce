"""What the softmax of an attention layer is given: queries, keys, and what is added to their products."""

from functools import singledispatch
from typing import Any, NamedTuple

import torch
from timm.layers import Attention
from timm.layers.attention import maybe_add_mask, resolve_self_attn_mask
from timm.models.maxxvit import Attention2d, AttentionCl
from torch import Tensor

from isomorph.layers import GPSA, PostRelativeAttention, RelativeAttention


class Scores(NamedTuple):
    """q k^T + bias; the queries are scaled. Shape: two of (B, nh, N, hd), and what adds to (B, nh, N, N), or None"""

    q: Tensor
    k: Tensor
    bias: Tensor | None = None

    def map(self) -> Tensor:
        """Shape: -> (B, nh, N, N)"""
        return torch.softmax(maybe_add_mask(self.q @ self.k.mT, self.bias), dim=-1)

    def rows(self, start: int, stop: int) -> Tensor:
        """The scores of some queries. Shape: -> (B, nh, stop - start, N)"""
        bias = self.bias
        if bias is not None and bias.shape[-2] > 1:
            bias = bias[..., start:stop, :]
        return maybe_add_mask(self.q[:, :, start:stop] @ self.k.mT, bias)


@singledispatch
def scores(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Scores:
    """The scores of a layer that is called with x and more, for each kind of layer that has them.

    Raises: TypeError for another kind.
    """
    raise TypeError(f"the queries and keys of {type(layer).__name__} are unknown")


@scores.register
def plain(layer: Attention, x: Tensor, *args: Any, **kwargs: Any) -> Scores:
    """timm's Attention, masks included. Shape: x (B, N, C)"""
    q, k, _ = layer.qkv(x).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = layer.q_norm(q) * layer.scale, layer.k_norm(k)
    return Scores(q, k, resolve_self_attn_mask(x.shape[1], q, *args, **kwargs))


@scores.register
def relative(layer: RelativeAttention, x: Tensor) -> Scores:
    """Shape: x (B, H, W, C)"""
    q, k, _ = layer.heads(x.flatten(1, 2))
    after = isinstance(layer, PostRelativeAttention)
    return Scores(q * layer.scale, k, None if after else layer.bias((x.shape[1], x.shape[2]), q.dtype))


@scores.register
def gated(layer: GPSA, x: Tensor, *_: Any, **__: Any) -> Scores:
    """The content half. Shape: x (B, N, C)"""
    q, k = layer.queries_keys(x)
    return Scores(q * q.shape[-1] ** -0.5, k)


def with_places(layer: Any, q: Tensor, k: Tensor, shared_rel_pos: Tensor | None) -> Scores:
    """Scores with the relative positions of timm's layers, their own or shared."""
    return Scores(q * layer.scale, k, layer.rel_pos.get_bias() if layer.rel_pos is not None else shared_rel_pos)


@scores.register
def on_maps(layer: Attention2d, x: Tensor, shared_rel_pos: Tensor | None = None) -> Scores:
    """Attention of timm's CoAtNets. Shape: x (B, C, H, W)"""
    qkv = layer.qkv(x).flatten(2)  # (B, 3 nh hd, N)
    if layer.head_first:
        q, k, _ = qkv.unflatten(1, (layer.num_heads, -1)).chunk(3, dim=2)  # (B, nh, hd, N)
    else:
        q, k, _ = qkv.unflatten(1, (3, layer.num_heads, -1)).unbind(1)
    return with_places(layer, q.mT, k.mT, shared_rel_pos)


@scores.register
def on_windows(layer: AttentionCl, x: Tensor, shared_rel_pos: Tensor | None = None) -> Scores:
    """Attention of timm's MaxViTs, window by window. Shape: x (B, ..., C)"""
    qkv = layer.qkv(x).flatten(1, -2)  # (B, N, 3 nh hd)
    if layer.head_first:
        q, k, _ = qkv.unflatten(2, (layer.num_heads, -1)).transpose(1, 2).chunk(3, dim=3)
    else:
        q, k, _ = qkv.unflatten(2, (3, layer.num_heads, -1)).transpose(1, 3).unbind(2)
    return with_places(layer, q, k, shared_rel_pos)


SCORED = (Attention, RelativeAttention, GPSA, Attention2d, AttentionCl)
"""Layers whose scores are known."""
