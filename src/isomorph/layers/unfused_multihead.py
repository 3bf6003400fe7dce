"""torch's multi-head attention as operations that form its map, which is one operation otherwise."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UnfusedMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` that forms its map.

    y = out_proj(dropout(softmax(q k^T / sqrt(hd) + mask)) v), with the attributes of `nn.MultiheadAttention`.

    Shape: query (B, Nq, C), key and value (B, Nk, C) -> (B, Nq, C) and the maps or None; (N, B, C) unless batch_first,
    (N, C) without a batch
    """

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return queries, keys and values. Shape: three of (B, N, C) -> three of (B, nh, N, hd)"""
        if self.in_proj_weight is None:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        else:
            weights = list(self.in_proj_weight.chunk(3))
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        inputs = zip((query, key, value), weights, biases, strict=True)
        return [F.linear(x, w, b).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x, w, b in inputs]

    def _mask(self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, q: Tensor) -> Tensor | None:
        """Return the sum of both masks, -inf where attention is forbidden. Shape: -> broadcast to (B, nh, Nq, Nk)"""
        masks = []
        if attn_mask is not None:
            mask = F._canonical_mask(attn_mask, "attn_mask", None, "", q.dtype)
            assert mask is not None
            masks.append(mask.unflatten(0, (-1, self.num_heads)) if mask.ndim == 3 else mask)
        if key_padding_mask is not None:
            mask = F._canonical_mask(key_padding_mask, "key_padding_mask", None, "", q.dtype)
            assert mask is not None
            masks.append(mask.reshape(-1, 1, 1, mask.shape[-1]))
        return sum(masks[1:], masks[0]) if masks else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.ndim == 3
        tokens: Any = (query, key, value)
        if not batched:
            tokens = [x[None] for x in tokens]
        elif not self.batch_first:
            tokens = [x.transpose(0, 1) for x in tokens]
        q, k, v = self._project(*tokens)
        scores = (q * q.shape[-1] ** -0.5) @ k.mT  # (B, nh, Nq, Nk)
        mask = self._mask(key_padding_mask, attn_mask, q)
        maps = (scores if mask is None else scores + mask).softmax(-1)
        maps = F.dropout(maps, self.dropout, self.training)
        out = self.out_proj((maps @ v).transpose(1, 2).flatten(2))  # (B, Nq, C)
        if not batched:
            out, maps = out[0], maps[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        if not need_weights:
            return out, None
        return out, maps.mean(-3) if average_attn_weights else maps


def allowed_by_masks(_: nn.Module, given: dict[str, Any]) -> Tensor | None:
    """Return where the masks of a call of `nn.MultiheadAttention`, by the names of its arguments, allow attention.

    Shape: -> broadcast to (B, nh, Nq, Nk), or None
    Raises: ValueError for a mask for each head.
    """
    allowed = None
    for name in ("attn_mask", "key_padding_mask"):
        mask = given.get(name)
        if mask is None:
            continue
        inside = ~mask if mask.dtype == torch.bool else mask > -torch.inf
        if name == "attn_mask" and inside.ndim == 3:
            raise ValueError(
                "an attn_mask for each head cannot be combined with an edit of the map; give one of (Nq, Nk)"
            )
        inside = inside[None, None] if name == "attn_mask" else inside.reshape(-1, 1, 1, inside.shape[-1])
        allowed = inside if allowed is None else allowed & inside
    return allowed


def multihead_reason(layer: nn.MultiheadAttention) -> str | None:
    """Return why a layer cannot be computed in this form, or None."""
    if layer.bias_k is not None or layer.add_zero_attn:
        return "it has bias_k or add_zero_attn, whose keys are not tokens"
    return None if torch.is_floating_point(layer.out_proj.weight) else "its out_proj is not in floating point"
