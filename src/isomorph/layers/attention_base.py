"""timm's Attention with its steps before and after the attention map as methods, for subclasses that change the map."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.layers.attention import resolve_self_attn_mask
from torch import Tensor, nn

from isomorph.layers.modes import is_eager, is_functorch_tensor, on_cpu, require_same

Layer = TypeVar("Layer", bound=Attention)

ATTENTION_PARTS = ("qkv", "q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop")


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Shape: (B, N, nh hd) -> (B, nh, N, hd)"""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Shape: (B, nh, N, hd) -> (B, N, nh hd)"""
    return x.transpose(1, 2).flatten(2)


def split_joint(projected: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """Split a joint projection of queries, keys and values. Shape: (B, N, 3 nh hd) -> three of (B, nh, N, hd)"""
    by_head = projected.unflatten(-1, (3, num_heads, -1))  # (B, N, 3, nh, hd)
    return by_head.permute(2, 0, 3, 1, 4).unbind(0)


def scaled(q: Tensor) -> Tensor:
    """Return queries divided by sqrt(hd). Shape: (..., hd)"""
    return q * q.shape[-1] ** -0.5


def softmax_map(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return softmax(q k^T + bias); the queries are scaled already.

    Shape: q (B, nh, Nq, hd), k (B, nh, N, hd) -> (B, nh, Nq, N)
    """
    scores = q @ k.mT
    if bias is not None:
        scores = scores + bias
    return scores.softmax(-1)


def attend_with_bias(
    bias: Tensor,
    drop: float,
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reaches_far: bool = False,
) -> Tensor:
    """Return softmax(scale q k^T + bias) v. Shape: bias (nh, N, N), q, k, v (B, nh, N, hd) -> (B, nh, N, hd)

    Where the bias needs a gradient, only CUDA has a fused kernel, and torch's own maps take 1.1 to 1.3 times as long.
    The fast path of the kernel needs a bias with four axes. `reaches_far` is for a bias that alone makes weights next
    to 0, as that of positions does.
    """
    forms_maps = trains_bias(bias) and not q.is_cuda
    if not forms_maps and not is_functorch_tensor(bias):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias[None], dropout_p=drop, scale=scale
        )
        # if the bias needs a gradient, torch's ONNX exporter replaces the operator by others with
        # another memory layout
        if torch.compiler.is_exporting() and torch.is_grad_enabled() and bias.requires_grad:
            return out.clone(memory_format=torch.contiguous_format)
        return out

    logits = (q * scale) @ k.mT  # (B, nh, N, N)
    # in place where allowed: allocating another map for the sum is slow
    scores = logits + bias if is_functorch_tensor(bias) else logits.add_(bias)
    if forms_maps and reaches_far and on_cpu(bias):
        clear_tiny_weights(scores)
    maps = scores.softmax(-1)
    if drop:
        maps = F.dropout(maps, drop)
    return maps @ v


@torch.no_grad()
def clear_tiny_weights(scores: Tensor) -> None:
    """Give weights 0 that are so near 0 that a CPU takes several times as long to multiply with them.

    Their gradient, which is the weight times a difference, is 0 then too. Those of float16, whose smallest numbers
    count, stay. Shape: (..., N), changed in place
    """
    if scores.dtype == torch.float16:
        return
    reach = math.log(torch.finfo(scores.dtype).tiny) / 2
    tiny = scores < scores.amax(-1, keepdim=True) + reach
    scores.masked_fill_(tiny, -math.inf)


def trains_bias(bias: Tensor) -> bool:
    """True in eager mode if a bias, or the table of one, needs a gradient."""
    return is_eager() and torch.is_grad_enabled() and bias.requires_grad


def factory_kwargs(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the device and dtype among the arguments of a layer, or None for each."""
    return {name: arguments.get(name) for name in ("device", "dtype")}


def score_scale(attention: Any) -> float:
    """Return the factor of the scores q k^T that a layer of timm applies when it is called.

    Its fused form ignores the attribute `scale` and has the default of `scaled_dot_product_attention`.
    """
    ignores_attribute = attention.fused_attn and not isinstance(attention, AttentionBase)
    return attention.head_dim**-0.5 if ignores_attribute else attention.scale


def has_usual_scale(attention: Any) -> bool:
    """Return True if a layer of timm scales its scores by 1 / sqrt(hd)."""
    return math.isclose(score_scale(attention), attention.head_dim**-0.5)


def content_scores(
    attention: Any,
    x: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a layer's scaled queries and keys, whose products are the scores, and what is added to these, or None.

    Shape: x (B, N, C) -> two of (B, nh, N, hd), broadcast to (B, nh, N, N)
    """
    q, k, _v = split_joint(attention.qkv(x), attention.num_heads)
    q = attention.q_norm(q) * score_scale(attention)
    k = attention.k_norm(k)
    return q, k, resolve_self_attn_mask(x.shape[1], q, attn_mask, is_causal)


def copy_parts(source: nn.Module, target: nn.Module, names: Iterable[str]) -> None:
    """Give a layer copies of parts of another."""
    for name in names:
        setattr(target, name, copy.deepcopy(getattr(source, name)))


def like_attention(attention: Attention, make: Callable[..., Layer], **options: Any) -> Layer:
    """Return a layer of the same widths as timm's Attention, with copies of its parts; `options` go to `make`."""
    layer = make(
        dim=attention.qkv.in_features,
        num_heads=attention.num_heads,
        attn_head_dim=attention.head_dim,
        dim_out=attention.proj.out_features,
        proj_bias=attention.proj.bias is not None,
        device=attention.qkv.weight.device,
        dtype=attention.qkv.weight.dtype,
        **options,
    )
    copy_parts(attention, layer, ATTENTION_PARTS)
    layer.scale = score_scale(attention)
    if not has_usual_scale(attention):
        layer.fused_attn = False  # the form of timm's that reads the scale
    return layer


@torch.no_grad()
def plain_attention(layer: "AttentionBase", tokens: int, atol: float, advice: str) -> Attention:
    """Return the attention that a layer on this number of tokens equals. Raises: ValueError as `require_same`."""
    if not (isinstance(layer.qkv, nn.Linear) and isinstance(layer.proj, nn.Linear)):
        raise ValueError(
            "the projections of this layer are not nn.Linear; fuse the model first, or revert them too"
        )
    plain = like_attention(layer, Attention)
    layer.reduce_projection(plain)
    atol = max(atol, torch.finfo(layer.qkv.weight.dtype).eps)
    require_same(layer, plain, (1, tokens, layer.qkv.in_features), atol, advice)
    return plain.train(layer.training)


class _ContiguousHeads(torch.autograd.Function):
    """Split the joint projection in one copy. Shape: (B, N, 3 nh hd) -> three of (B, nh, N, hd)"""

    generate_vmap_rule = True

    @staticmethod
    def forward(projected: Tensor, num_heads: int) -> tuple[Tensor, ...]:
        by_head = projected.unflatten(-1, (3, num_heads, -1))  # (B, N, 3, nh, hd)
        return by_head.permute(2, 0, 3, 1, 4).contiguous().unbind(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        by_token = torch.stack([grad.transpose(1, 2) for grad in grads], dim=2)  # (B, N, 3, nh, hd)
        return by_token.flatten(2), None


class AttentionBase(Attention):
    """timm's Attention, with the steps before and after the attention map as separate methods.

    Letters: B batch, nh heads, N tokens, hd head width, C channels. Shape: x (B, N, C) -> (B, N, C)
    """

    scale: float
    attn_drop: Any
    qkv: Any
    proj: Any

    @property
    def drop_probability(self) -> float:
        """Share of the entries of a map that dropout sets to 0, in this mode."""
        return self.attn_drop.p if self.training else 0.0

    def queries_keys_values(
        self,
        x: Tensor,
        contiguous: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Shape: x (B, N, C) -> three of (B, nh, N, hd)"""
        return self.split_projection(self.qkv(x), contiguous)

    def split_projection(
        self,
        projected: Tensor,
        contiguous: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split (B, N, 3 nh hd) into three of (B, nh, N, hd), with queries and keys normalised.

        `contiguous` copies all three at once, where products of matrices would copy each of them.
        """
        if contiguous and is_eager():
            q, k, v = _ContiguousHeads.apply(projected, self.num_heads)
        else:
            q, k, v = split_joint(projected, self.num_heads)
        return self.q_norm(q), self.k_norm(k), v

    content_scores = content_scores

    def attention(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the attention map that `forward` applies. Shape: x as in `forward` -> (B, nh, N, N)"""
        return softmax_map(*self.content_scores(x, *args, **kwargs))

    def project_output(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Join the heads and project them. Shape: mixed (B, nh, N, hd), x (B, N, C) -> (B, N, C)"""
        y = self.norm(join_heads(mixed))  # (B, N, nh hd)
        if self.gate is not None:
            y = y * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(y))

    def reduce_projection(self, plain: Attention) -> None:
        """Adapt the projection of plain attention where this layer's is wider; subclasses override it."""
