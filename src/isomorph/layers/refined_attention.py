"""Refined attention (Refiner): attention whose maps are expanded, convolved and reduced before they weigh the values.

Each layer is timm's Attention, same arguments and weights, with a refiner (`refiner.py`) between softmax and values, so
a ViT's checkpoint fits but for the refiner. Letters as there, and C channels, hd head width.

Padding: `attn_mask` is a boolean padding mask, True where a token is real. Padded tokens give no query and no key to
the convolution, before or after it, so real tokens compute what they would without the padding.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from timm.layers import Attention, register_notrace_module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isomorph.layers.chunked import by_images, transformed
from isomorph.layers.eval_mode import deviation
from isomorph.layers.headed_attention import HeadedAttention, images_at_once, placement
from isomorph.layers.refiner import Expansion, Refiner, SpatialRefiner


def _padding_mask(x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """Real tokens of padded sequences. Shape: attn_mask (B, N) or (B, 1, 1, N) -> (B, 1, N), or None

    Raises: ValueError for a mask that is no padding: a convolved map would look past it.
    """
    if is_causal:
        raise ValueError("a refined map mixes neighbouring queries, so it cannot be causal")
    if attn_mask is None:
        return None
    B, N = x.shape[:2]
    if attn_mask.dtype != torch.bool or attn_mask.shape not in ((B, N), (B, 1, 1, N)):
        kind = f"{attn_mask.dtype} mask of shape {tuple(attn_mask.shape)}"
        raise ValueError(f"a {kind} is no padding mask; give a boolean one of shape ({B}, {N}), True for real tokens")
    return attn_mask.view(B, 1, N)


PARTS = ("qkv", "q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop")
"""What timm's Attention consists of."""


def refuse_heads(refine: nn.Module, num_heads: int) -> None:
    """Raises: ValueError for a refiner of another number of heads."""
    known = getattr(refine, "num_heads", num_heads)
    if known != num_heads:
        raise ValueError(f"the refiner is for {known} heads, the attention has {num_heads}; give both the same")


def carry_parts(source: Attention, target: Attention) -> None:
    """Gives an attention layer the parts of another of the same widths."""
    for name in PARTS:
        setattr(target, name, copy.deepcopy(getattr(source, name)))


def shape_arguments(attention: Attention) -> dict[str, Any]:
    """Arguments that make an attention layer of the same widths."""
    kind = dict(device=attention.qkv.weight.device, dtype=attention.qkv.weight.dtype)
    sizes = dict(dim=attention.qkv.in_features, dim_out=attention.proj.out_features)
    sizes |= dict(num_heads=attention.num_heads, attn_head_dim=attention.head_dim)
    return sizes | dict(proj_bias=attention.proj.bias is not None) | kind


def bind(function: Callable[..., Tensor], more: dict[str, Any]) -> Callable[..., Tensor]:
    """The function with further arguments, itself where there are none: compilers prefer it."""
    return partial(function, **more) if more else function


@register_notrace_module
class RefinedAttention(HeadedAttention):
    """Attention whose maps are refined: diverse, with local patterns, and free to be negative.

    y = proj(refine(softmax(q k^T / sqrt(hd))) v)

    `refine` is any module from maps to as many maps (default: `Refiner`); other arguments are timm's Attention's. With
    `recompute` the maps are not kept for the backward pass but computed again, from queries and keys; what is handed
    out is kept.

    Shape: x (B, N, C) -> (B, N, C); attn_mask (B, N) or (B, 1, 1, N), True for real tokens
    Source: Refiner Fig. 3
    Raises: ValueError for a refiner of other heads, or a mask that is no padding mask.
    """

    default_refiner: ClassVar[Callable[..., nn.Module]] = Refiner

    def __init__(
        self, dim: int, num_heads: int = 8, refine: nn.Module | None = None, recompute: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.refine = self.default_refiner(num_heads, **placement(kwargs)) if refine is None else refine
        self.recompute = recompute
        self.reverts = True
        self.whole = any(True for _ in self.refine.buffers())  # norms of maps look at the whole batch
        refuse_heads(self.refine, num_heads)

    def maps(self, q: Tensor, k: Tensor, real: Tensor | None) -> Tensor:
        """The refined map. Shape: q, k (B, H, N, hd), real (B, 1, N) or None -> (B, H, N, N)"""
        logits = (q * self.scale) @ k.mT  # (B, H, N, N)
        if real is None:
            return self.refine(self.attn_drop(logits.softmax(-1)))
        pair = real[..., :, None] & real[..., None, :]  # (B, 1, N, N)
        plain = logits.masked_fill(~real[..., None, :], -torch.inf).softmax(-1).masked_fill(~pair, 0)
        return self.refine(self.attn_drop(plain)).masked_fill(~pair, 0)

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """The refined map times the values. Shape: -> (B, H, N, hd)"""
        return self.maps(q, k, real) @ v

    def run(self, function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        """The function of a batch, some images at a time; with `recompute` only its arguments are kept."""
        q = tensors[0]
        assert q is not None
        kept = self.recompute and torch.is_grad_enabled() and not transformed(q)  # torch.func has no checkpoints
        call = partial(checkpoint, function, use_reentrant=False) if kept else function
        return by_images(call, q.shape[0] if self.whole else images_at_once(q), *tensors)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, hand_out: bool = False, **more: Any
    ) -> Any:
        """With `hand_out` the map too, for other blocks to use; `more` is for the `maps` of a subclass.

        Shape: (B, N, C) -> (B, N, C), with `hand_out` also (B, H, N, N)
        """
        real = _padding_mask(x, attn_mask, is_causal)
        q, k, v = self.heads(x)
        if not hand_out:
            return self.finish(self.run(bind(self.weigh, more), q, k, v, real), x)
        maps = self.run(bind(self.maps, more), q, k, real)
        return self.finish(maps @ v, x), maps

    def attention(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, hand_out: bool = False
    ) -> Tensor:
        """The map that `forward` applies, handed out or not. Shape: x (B, N, C) -> (B, H, N, N)"""
        q, k, _ = self.heads(x)
        return self.maps(q, k, _padding_mask(x, attn_mask, is_causal))

    @torch.no_grad()
    def to_attention(self, atol: float = 1e-3) -> Attention:
        """The plain attention that this layer still is.

        Raises: ValueError naming the measured deviation (largest |difference| on standard normal tokens, relative to
        the largest output) when it is above `atol`: the maps are refined.
        """
        if not self.reverts:
            raise ValueError("it belongs to a Refined-ViT, not to a recast; a plain one has ratio=0, kernel=0, share=0")
        if not (isinstance(self.qkv, nn.Linear) and isinstance(self.proj, nn.Linear)):
            raise ValueError("its projections are no linear layers any more; fuse the model first")
        atol = max(atol, torch.finfo(self.qkv.weight.dtype).eps)
        plain = Attention(**shape_arguments(self))
        carry_parts(self, plain)
        self.reduce_projection(plain)
        found = deviation(self, plain, (1, self.probe_tokens(), self.qkv.in_features), self.qkv.weight)
        if not found <= atol:
            raise ValueError(
                f"this layer is no plain attention: it deviates by {found:.2g} (relative), above {atol:g}; keep it"
            )
        return plain.train(self.training)

    def reduce_projection(self, plain: Attention) -> None:
        """Hook for a projection that is wider than plain attention's."""

    def probe_tokens(self) -> int:
        """Number of tokens to try the layer on."""
        return 64


class ExpandedAttention(RefinedAttention):
    """Refined attention without reduction: every head's values are weighed by `ratio` maps, side by side.

    y = proj([A'_m v_(m // ratio)] for all maps m); `proj` reads ratio C channels.

    Shape: x (B, N, C) -> (B, N, C), its map (B, ratio H, N, N)
    Source: Refiner Table 3, "w/o reduction"; differs: the paper does not say which values the further maps weigh
    Raises: as RefinedAttention; ValueError for a gate or a norm of its output, whose width is another here.
    """

    refine: Expansion
    default_refiner = Expansion

    def __init__(self, dim: int, num_heads: int = 8, refine: Expansion | None = None, **kwargs: Any) -> None:
        if kwargs.get("gated") or kwargs.get("scale_norm"):
            raise ValueError("attention without reduction has no gate and no norm: its output is wider than theirs")
        super().__init__(dim, num_heads, refine=refine, **kwargs)
        width, bias = self.refine.ratio * self.attn_dim, kwargs.get("proj_bias", True)
        self.proj = nn.Linear(width, kwargs.get("dim_out") or dim, bias=bias, **placement(kwargs))

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        maps = self.maps(q, k, real).unflatten(1, (self.num_heads, -1))  # (B, H, ratio, N, N)
        return (maps @ v[:, :, None]).flatten(1, 2)  # (B, ratio H, N, hd)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, hand_out: bool = False, **more: Any
    ) -> Any:
        """Shape: x (B, N, C) -> (B, N, C). Raises: ValueError when the maps are to be handed out."""
        if hand_out:
            raise ValueError("maps without reduction are more than other blocks have heads: they are not handed out")
        return super().forward(x, attn_mask, is_causal, **more)

    def reduce_projection(self, plain: Attention) -> None:
        weight = self.proj.weight.unflatten(1, (self.num_heads, self.refine.ratio, -1)).sum(2).flatten(1)
        plain.proj.weight, plain.proj.in_features = nn.Parameter(weight), weight.shape[1]

    def expand_projection(self, proj: nn.Linear) -> None:
        """Takes over a plain projection: the maps of a head share its part, unequally lest they learn alike."""
        weight = proj.weight.unflatten(1, (self.num_heads, 1, -1)).expand(-1, -1, self.refine.ratio, -1)
        lean = torch.randn_like(weight) * proj.weight.std()
        self.proj.weight.copy_((weight / self.refine.ratio + lean - lean.mean(2, keepdim=True)).flatten(1))
        if proj.bias is not None:
            self.proj.bias.copy_(proj.bias)


class SpatialAttention(RefinedAttention):
    """Refined attention whose maps are convolved over the image, query by query, not over the order of tokens.

    `grid_size` (H, W) places the tokens after the `prefix_tokens`; pass another one to `forward` at any call.

    Shape: x (B, N, C) -> (B, N, C) with N = prefix_tokens + H W
    Source: Refiner Table 4, "Spatial"
    Raises: ValueError when the tokens do not fill the grid, and for any mask.
    """

    refine: SpatialRefiner
    default_refiner = SpatialRefiner

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        grid_size: tuple[int, int] = (14, 14),
        prefix_tokens: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.grid_size, self.prefix_tokens = grid_size, prefix_tokens

    def maps(self, q: Tensor, k: Tensor, real: Tensor | None, grid_size: tuple[int, int] | None = None) -> Tensor:
        H, W = grid_size or self.grid_size
        if real is not None:
            raise ValueError("maps convolved over an image take no mask: every place of the grid is real")
        if k.shape[2] != self.prefix_tokens + H * W:
            raise ValueError(f"{k.shape[2]} tokens do not fill the {H} x {W} grid after {self.prefix_tokens} others")
        plain = self.attn_drop(((q * self.scale) @ k.mT).softmax(-1))  # (B, H, N, N)
        return self.refine(plain, (H, W), self.prefix_tokens)

    def weigh(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, grid_size: tuple[int, int] | None = None
    ) -> Tensor:
        return self.maps(q, k, real, grid_size) @ v

    def attention(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        hand_out: bool = False,
        grid_size: tuple[int, int] | None = None,
    ) -> Tensor:
        q, k, _ = self.heads(x)
        return self.maps(q, k, _padding_mask(x, attn_mask, is_causal), grid_size)

    def probe_tokens(self) -> int:
        return self.prefix_tokens + self.grid_size[0] * self.grid_size[1]


class ReusedAttention(nn.Module):
    """Attention with the maps of an earlier block: values and projection only.

    y = proj(maps v)

    Shape: x (B, N, C), maps (B, H, N, N) -> (B, N, C)
    Source: Refiner B.4, Table 13
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        **kind: Any,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.v = nn.Linear(dim, dim, bias=qkv_bias, **kind)
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **kind)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, maps: Tensor) -> Tensor:
        v = self.v(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, N, hd)
        return self.proj_drop(self.proj((maps @ v).transpose(1, 2).flatten(2)))

    def attention(self, x: Tensor, maps: Tensor) -> Tensor:
        """The map that `forward` applies: the one given. Shape: -> (B, H, N, N)"""
        return maps
