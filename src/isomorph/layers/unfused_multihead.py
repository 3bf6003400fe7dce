"""torch's multi-head attention as operations that form its map, which is one operation otherwise; in plain layers."""

from collections.abc import Sequence
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
        mask = self._mask(key_padding_mask, attn_mask, q)
        dropout = self.dropout if self.training else 0.0
        maps = None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.mT  # (B, nh, Nq, Nk)
            maps = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            values = maps @ v
        else:
            values = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj(values.transpose(1, 2).flatten(2))  # (B, Nq, C)
        if not batched:
            out, maps = out[0], maps if maps is None else maps[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        if maps is None:
            return out, None
        return out, maps.mean(-3) if average_attn_weights else maps


class MultiheadLinears(UnfusedMultiheadAttention):
    """`nn.MultiheadAttention` whose queries, keys, values and output are separate `nn.Linear`s.

    It has the forward and the attributes of `nn.MultiheadAttention`, and no packed parameters.

    Shape: as `nn.MultiheadAttention`
    Args:
        original: the layer whose weights it copies, without bias_k and add_zero_attn.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def __init__(self, original: nn.MultiheadAttention) -> None:
        nn.Module.__init__(self)
        for name in ("embed_dim", "kdim", "vdim", "num_heads", "head_dim", "dropout", "batch_first"):
            setattr(self, name, getattr(original, name))
        self.bias_k, self.bias_v, self.add_zero_attn, self._qkv_same_embed_dim = None, None, False, False
        for name in ("in_proj_weight", "in_proj_bias"):  # by which torch's encoder layers see that they call this layer
            self.register_parameter(name, None)
        weights = original.in_proj_weight
        packed = [original.q_proj_weight, original.k_proj_weight, original.v_proj_weight]
        biases = [None] * 3 if original.in_proj_bias is None else original.in_proj_bias.chunk(3)
        for name, weight, bias in zip("qkv", packed if weights is None else weights.chunk(3), biases, strict=True):
            setattr(self, f"{name}_proj", linear_of(weight, bias))
        self.out_proj = linear_of(original.out_proj.weight, original.out_proj.bias)  # type: ignore[assignment]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        return [x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected]

    @torch.no_grad()
    def to_original(self, atol: float = 0.0) -> nn.MultiheadAttention:
        """Return the layer with packed weights. Raises: ValueError naming a projection that is no nn.Linear."""
        projections = plain_linears(self, ("q_proj", "k_proj", "v_proj", "out_proj"))
        biased = projections[0].bias is not None
        packed = nn.MultiheadAttention(
            self.embed_dim, self.num_heads, self.dropout, biased, False, False, self.kdim, self.vdim, self.batch_first
        ).to(projections[0].weight)
        same = self.kdim == self.vdim == self.embed_dim
        targets: Any = (
            packed.in_proj_weight.chunk(3)
            if same
            else (packed.q_proj_weight, packed.k_proj_weight, packed.v_proj_weight)
        )
        for target, layer in zip((*targets, packed.out_proj.weight), projections, strict=True):
            target.copy_(layer.weight)
        if biased:
            packed.in_proj_bias.copy_(torch.cat([layer.bias for layer in projections[:3]]))
            packed.out_proj.bias.copy_(projections[3].bias)
        return packed.requires_grad_(projections[0].weight.requires_grad).train(self.training)


class JointLinears(nn.Module):
    """A joint projection, timm's `qkv`, as a separate `nn.Linear` for each of its parts.

    Shape: x (..., C) -> (..., sum of the parts' outputs), the parts one after another
    Args:
        joint: the layer whose weights are split.
        names: of the parts, in order: ("q", "k", "v").
    """

    def __init__(self, joint: nn.Linear, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        biases = [None] * len(names) if joint.bias is None else joint.bias.chunk(len(names))
        for name, weight, bias in zip(names, joint.weight.chunk(len(names)), biases, strict=True):
            setattr(self, name, linear_of(weight, bias))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([getattr(self, name)(x) for name in self.names], -1)

    @torch.no_grad()
    def to_original(self, atol: float = 0.0) -> nn.Linear:
        """Return the joint layer. Raises: ValueError naming a part that is no nn.Linear."""
        parts = plain_linears(self, self.names)
        bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        joint = linear_of(torch.cat([part.weight for part in parts]), bias)
        return joint.requires_grad_(parts[0].weight.requires_grad).train(self.training)


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with copies of these weights."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def plain_linears(module: nn.Module, names: Sequence[str]) -> list[Any]:
    """Return children that are all an nn.Linear. Raises: ValueError naming one that is not."""
    for name in names:
        if type(part := getattr(module, name)) is not nn.Linear:
            raise ValueError(f"its {name} is a {type(part).__name__}, not an nn.Linear; merge or revert it first")
    return [getattr(module, name) for name in names]


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
