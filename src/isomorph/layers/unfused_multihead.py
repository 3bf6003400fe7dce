"""torch's multi-head attention as operations that form its map, which is one operation otherwise; in plain layers."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.layers.attention_base import join_heads, scaled, softmax_map, split_heads
from isomorph.layers.map_edit import BLOCKED_SCORE
from isomorph.layers.modes import match_requires_grad


class UnfusedMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` that forms its map: out_proj(dropout(softmax(q k^T / sqrt(hd) + mask)) v).

    Shape: query (B, Nq, C), key and value (B, Nk, C) -> (B, Nq, C) and the maps or None; (N, B, C) unless batch_first
    """

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Shape: three of (B, N, C) -> the same"""
        inputs = zip((query, key, value), projections(self), strict=True)
        return [F.linear(x, weight, bias) for x, (weight, bias) in inputs]

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
        if is_causal and attn_mask is None:
            raise ValueError(
                "is_causal is a hint about attn_mask, which is None; give the mask too"
            )
        batched = query.ndim == 3
        tokens: Any = (query, key, value)
        if not batched:
            tokens = [x[None] for x in tokens]
        elif not self.batch_first:
            tokens = [x.transpose(0, 1) for x in tokens]
        q, k, v = (split_heads(x, self.num_heads) for x in self._project(*tokens))
        mask = joint_mask(attn_mask, key_padding_mask, self.num_heads, q.dtype)
        dropout = self.dropout if self.training else 0.0
        maps = None
        if need_weights:
            maps = F.dropout(softmax_map(scaled(q), k, mask), dropout)  # (B, nh, Nq, Nk)
            values = maps @ v
        else:
            values = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = self.out_proj(join_heads(values))  # (B, Nq, C)
        if not batched:
            out = out[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        if maps is None:
            return out, None
        if not batched:
            maps = maps[0]
        return out, maps.mean(-3) if average_attn_weights else maps


class MultiheadLinears(UnfusedMultiheadAttention):
    """`nn.MultiheadAttention` with copies of its projections as separate layers, and without packed parameters."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def __init__(self, original: nn.MultiheadAttention) -> None:
        nn.Module.__init__(self)
        for name in (
            "embed_dim",
            "kdim",
            "vdim",
            "num_heads",
            "head_dim",
            "dropout",
            "batch_first",
        ):
            setattr(self, name, getattr(original, name))
        self.bias_k = None
        self.bias_v = None
        self.add_zero_attn = False
        self._qkv_same_embed_dim = False
        # by which torch's encoder layers see that they call this layer
        for name in ("in_proj_weight", "in_proj_bias"):
            self.register_parameter(name, None)
        self.q_proj, self.k_proj, self.v_proj = (
            linear_of(*projection) for projection in projections(original)
        )
        self.out_proj = linear_of(original.out_proj.weight, original.out_proj.bias)  # type: ignore[assignment]
        match_requires_grad(self.out_proj, original.out_proj)
        for part, (weight, bias) in zip(
            self._projections(), _packed_parameters(original), strict=True
        ):
            part.weight.requires_grad_(weight.requires_grad)
            if bias is not None:
                part.bias.requires_grad_(bias.requires_grad)

    def _projections(self) -> list[nn.Linear]:
        return [self.q_proj, self.k_proj, self.v_proj]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        inputs = (query, key, value)
        return [project(x) for project, x in zip(self._projections(), inputs, strict=True)]

    @torch.no_grad()
    def to_original(self, atol: float = 0.0) -> nn.MultiheadAttention:
        """Return the layer with packed weights. Raises: ValueError naming a projection that is not an nn.Linear."""
        q, k, v, out = plain_linears(self, ("q_proj", "k_proj", "v_proj", "out_proj"))
        packed = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            self.dropout,
            bias=q.bias is not None,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=self.batch_first,
        )
        state = {"out_proj.weight": out.weight}
        if packed.in_proj_weight is None:  # keys or values of another width
            state |= {
                "q_proj_weight": q.weight,
                "k_proj_weight": k.weight,
                "v_proj_weight": v.weight,
            }
        else:
            state["in_proj_weight"] = torch.cat([q.weight, k.weight, v.weight])
        if q.bias is not None:
            state["in_proj_bias"] = torch.cat([q.bias, k.bias, v.bias])
            state["out_proj.bias"] = out.bias
        packed = packed.to(q.weight)
        packed.load_state_dict(state)
        match_requires_grad(packed.out_proj, out)
        parts = (q, k, v)
        if packed.in_proj_weight is None:
            for part, (weight, _) in zip(parts, _packed_parameters(packed), strict=True):
                weight.requires_grad_(part.weight.requires_grad)
        else:
            packed.in_proj_weight.requires_grad_(any(part.weight.requires_grad for part in parts))
        if packed.in_proj_bias is not None:
            packed.in_proj_bias.requires_grad_(any(part.bias.requires_grad for part in parts))
        return packed.train(self.training)


class JointLinears(nn.Module):
    """A joint projection, timm's `qkv`, as a layer for each of its parts: `names`, in order, as ("q", "k", "v")."""

    def __init__(self, joint: nn.Linear, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        parts = _with_biases(joint.weight.chunk(len(names)), joint.bias)
        for name, part in zip(names, parts, strict=True):
            setattr(self, name, linear_of(*part))
            match_requires_grad(getattr(self, name), joint)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([getattr(self, name)(x) for name in self.names], -1)

    @torch.no_grad()
    def to_original(self, atol: float = 0.0) -> nn.Linear:
        """Return the joint layer. Raises: ValueError naming a part that is not an nn.Linear."""
        parts = plain_linears(self, self.names)
        weight = torch.cat([part.weight for part in parts])
        bias = None
        if parts[0].bias is not None:
            bias = torch.cat([part.bias for part in parts])
        joint = linear_of(weight, bias)
        match_requires_grad(joint, *parts)
        return joint.train(self.training)


def _packed_parameters(
    layer: nn.MultiheadAttention,
) -> list[tuple[nn.Parameter, nn.Parameter | None]]:
    """Return the parameters that hold the weight and bias of queries, keys and values, which may be the same."""
    names = ["in_proj_weight"] * 3
    if layer.in_proj_weight is None:
        names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    return [(layer.get_parameter(name), layer.in_proj_bias) for name in names]


def projections(layer: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None]]:
    """Return the weight and bias by which queries, keys and values are made."""
    weights: Any = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    if layer.in_proj_weight is not None:
        weights = layer.in_proj_weight.chunk(3)
    return _with_biases(weights, layer.in_proj_bias)


def _with_biases(
    weights: Sequence[Tensor], joint: Tensor | None
) -> list[tuple[Tensor, Tensor | None]]:
    """Return the weights of the parts of a projection, each with its part of the joint bias."""
    biases = (None,) * len(weights) if joint is None else joint.chunk(len(weights))
    return list(zip(weights, biases, strict=True))


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with copies of these weights."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def plain_linears(module: nn.Module, names: Sequence[str]) -> list[Any]:
    """Return children that are all an nn.Linear. Raises: ValueError naming one that is not."""
    parts = [getattr(module, name) for name in names]
    for name, part in zip(names, parts, strict=True):
        if type(part) is not nn.Linear:
            raise ValueError(
                f"its {name} is a {type(part).__name__}, not an nn.Linear; fuse it if it is a pyramid, else revert it "
                "first; of an adapter, merge it and put its linear layer in its place"
            )
    return parts


def joint_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Return the sum of both masks, -inf where attention is forbidden. Shape: -> broadcast to (B, nh, Nq, Nk)"""
    scores: Any = F._canonical_mask(attn_mask, "attn_mask", None, "", dtype)
    if scores is not None:
        scores = scores.unflatten(0, (-1, heads)) if scores.ndim == 3 else scores[None, None]
    padding: Any = F._canonical_mask(key_padding_mask, "key_padding_mask", None, "", dtype)
    if padding is None:
        return scores
    padding = padding.reshape(-1, 1, 1, padding.shape[-1])
    return padding if scores is None else scores + padding


def allowed_by_masks(layer: Any, arguments: dict[str, Any]) -> Tensor | None:
    """Return where the masks of a call allow attention, or None. Raises: ValueError for a mask for each head."""
    attn_mask = arguments.get("attn_mask")
    if attn_mask is not None and attn_mask.ndim == 3:
        raise ValueError(
            "an attn_mask for each head cannot be combined with an edit of the map; give one of (Nq, Nk)"
        )
    mask = joint_mask(attn_mask, arguments.get("key_padding_mask"), 1, layer.out_proj.weight.dtype)
    if mask is None:
        return None
    return mask > BLOCKED_SCORE


def multihead_reason(layer: nn.MultiheadAttention) -> str | None:
    """Return why a layer cannot be computed in this form, or None."""
    if layer.bias_k is not None or layer.add_zero_attn:
        return "it has bias_k or add_zero_attn, whose keys are not tokens"
    if not torch.is_floating_point(layer.out_proj.weight):
        return "its out_proj is not in floating point"
    return None
