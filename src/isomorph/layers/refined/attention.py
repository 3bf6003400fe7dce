"""Refined attention (Refiner): attention maps are expanded, convolved and reduced before they weigh the values.

Each layer is timm's Attention, with the same arguments and weights and a refiner (`refiner.py`) between softmax and
values, so a ViT's checkpoint provides all of its weights except the refiner's.

Padding: `attn_mask` is a boolean padding mask, True for real tokens. Padded tokens contribute neither queries nor keys
to the convolution, so real tokens get the same output as without the padding.

Letters: B batch, H heads, M = ratio H maps, N tokens, k kernel size, C channels, hd head width.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import Attention, register_notrace_module
from torch import Tensor, nn

from isomorph.layers.attention_base import (
    AttentionBase,
    content_scores,
    factory_kwargs,
    join_heads,
    plain_attention,
    softmax_map,
    split_heads,
)
from isomorph.layers.grid import GridSize, OnTokenGrid
from isomorph.layers.modes import on_cpu, recomputed
from isomorph.layers.refined.refiner import Expansion, MapConvolution, Refiner, SpatialRefiner


def _padding_mask(x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """Return the mask of the real tokens, or None. Shape: (B, N) or (B, 1, 1, N) -> (B, 1, N)

    Raises: ValueError for any other mask, which the convolution of the map would carry information across.
    """
    if is_causal:
        raise ValueError(
            "is_causal is not supported: a refined map mixes neighbouring queries and cannot be causal",
        )
    if attn_mask is None:
        return None
    B, N = x.shape[:2]
    shape = tuple(attn_mask.shape)
    if attn_mask.dtype != torch.bool or shape not in ((B, N), (B, 1, 1, N)):
        raise ValueError(
            f"attn_mask is {attn_mask.dtype} of shape {shape}; give a boolean padding mask of shape ({B}, {N}), True "
            "for real tokens"
        )
    return attn_mask.view(B, 1, N)


@register_notrace_module
class RefinedAttention(AttentionBase):
    """Self-attention whose heads exchange their attention maps and smooth or sharpen them locally (Refiner).

    In deep ViTs the maps of different layers and heads grow alike. Refining them keeps them diverse, adds local
    patterns, and allows negative weights:

        y = proj(refine(softmax(q k^T / sqrt(hd))) v)

    `refine` is any module that turns H maps into H maps (default: `Refiner`); the other arguments are those of timm's
    Attention. With `recompute`, maps are not stored for the backward pass but computed again from queries and keys,
    which saves memory. `forward(x, return_maps=True)` also returns the refined maps, which are stored then.

    Shape: x (B, N, C) -> (B, N, C); attn_mask (B, N) or (B, 1, 1, N), True for real tokens
    Source: Refiner Fig. 3
    Raises: ValueError if the refiner is for another number of heads, or if `attn_mask` is not a padding mask.

    Example:
        >>> layer = iso.layers.RefinedAttention(dim=64, num_heads=4)
        >>> layer(torch.randn(2, 50, 64)).shape
        torch.Size([2, 50, 64])
        >>> mask = torch.arange(50) < torch.tensor([[50], [30]])  # the second sequence has 30 tokens
        >>> y, maps = layer(torch.randn(2, 50, 64), attn_mask=mask, return_maps=True)
        >>> maps.shape
        torch.Size([2, 4, 50, 50])
    """

    default_refiner: ClassVar[Callable[..., nn.Module]] = Refiner
    forms_maps: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        refine: nn.Module | None = None,
        recompute: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if refine is None:
            refine = self.default_refiner(num_heads, **factory_kwargs(kwargs))
        self.refine = refine
        self.recompute = recompute
        self.is_revertible = True
        refiner_heads = getattr(self.refine, "num_heads", num_heads)
        if refiner_heads != num_heads:
            raise ValueError(
                f"refine is for {refiner_heads} heads, num_heads is {num_heads}; give both the same number"
            )

    def refined_maps(self, q: Tensor, k: Tensor, token_mask: Tensor | None) -> Tensor:
        """Shape: q, k (B, H, N, hd), token_mask (B, 1, N) or None -> (B, H, N, N)"""
        logits = (q * self.scale) @ k.mT  # (B, H, N, N)
        if token_mask is None:
            return self.refine(self.attn_drop(logits.softmax(-1)))
        keys = token_mask[..., None, :]
        padding = ~(token_mask[..., :, None] & keys)  # (B, 1, N, N)
        maps = logits.masked_fill(~keys, -torch.inf).softmax(-1).masked_fill(padding, 0)
        return self.refine(self.attn_drop(maps)).masked_fill(padding, 0)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        token_mask: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Return the refined maps times the values. Shape: q, k, v (B, H, N, hd) -> (B, H, N, hd)"""
        return self.weigh_values(self.refined_maps(q, k, token_mask, **options), v)

    def weigh_values(self, maps: Tensor, v: Tensor) -> Tensor:
        """Shape: maps (B, H, N, N), v (B, H, N, hd) -> (B, H, N, hd)"""
        return maps @ v

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        return_maps: bool = False,
        **kw: Any,
    ) -> Any:
        """Shape: x (B, N, C) -> (B, N, C), and with `return_maps` also the refined maps (B, H, N, N)"""
        token_mask = _padding_mask(x, attn_mask, is_causal)
        q, k, v = self.queries_keys_values(x, self.forms_maps)
        if return_maps:
            maps = self._run(self.refined_maps, q, k, token_mask, **kw)
            return self.project_output(self.weigh_values(maps, v), x), maps
        mixed = self._run(self.attend, q, k, v, token_mask, **kw)
        return self.project_output(mixed, x)

    def _run(self, function: Callable[..., Tensor], *arguments: Any, **kw: Any) -> Tensor:
        if self.recompute:
            return recomputed(function, *arguments, **kw)
        return function(*arguments, **kw)

    def attention(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        return_maps: bool = False,
        **kw: Any,
    ) -> Tensor:
        """Return the attention map that `forward` applies. Shape: x (B, N, C) -> (B, H, N, N)"""
        q, k, _ = self.queries_keys_values(x)
        return self.refined_maps(q, k, _padding_mask(x, attn_mask, is_causal), **kw)

    def content_scores(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **_: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return scaled queries and keys, as `content_scores`, and the padding mask as a bias of keys."""
        q, k, _unmasked = content_scores(self, x)
        mask = _padding_mask(x, attn_mask, is_causal)
        if mask is None:
            return q, k, None
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
        return q, k, bias.unsqueeze(1)  # (B, 1, 1, N)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that `to_attention` compares both layers on."""
        return 64

    @torch.no_grad()
    def to_attention(self, atol: float = 1e-3) -> Attention:
        """Return the plain attention that this layer equals.

        Raises: ValueError as `require_same`, and for layers of a Refined-ViT.
        """
        if not self.is_revertible:
            raise ValueError(
                "this layer is part of a Refined-ViT and was not recast; "
                "for plain attention create the model with ratio=0, kernel=0, share=0"
            )
        return plain_attention(self, self.num_tokens, atol, "keep it")


class ExpandedAttention(RefinedAttention):
    """Refined attention in which every head applies `ratio` different maps to its values and concatenates the results.

    The maps of a `Refiner` are reduced to one per head again; here the projection reads all of them:

        y = proj([A'_m v_(m // ratio)] for all maps m)

    `refine` is an `Expansion`, which has the ratio; `proj` reads ratio C channels; other arguments as
    `RefinedAttention`.

    Shape: x (B, N, C) -> (B, N, C), its map (B, ratio H, N, N)
    Source: Refiner Table 3, "w/o reduction"; differs: the paper does not say which values the further maps are applied
    to
    Raises: as RefinedAttention; ValueError for `gated` or `scale_norm`, which need an output of C channels.

    Example:
        >>> layer = iso.layers.ExpandedAttention(64, 4, refine=iso.layers.Expansion(4, ratio=2))
        >>> layer(torch.randn(2, 50, 64)).shape
        torch.Size([2, 50, 64])
        >>> layer.attention(torch.randn(2, 50, 64)).shape
        torch.Size([2, 8, 50, 50])
    """

    refine: Expansion
    default_refiner = Expansion

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        refine: Expansion | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("gated") or kwargs.get("scale_norm"):
            raise ValueError(
                "ExpandedAttention takes no gated or scale_norm, which need an output of C channels",
            )
        super().__init__(dim, num_heads, refine=refine, **kwargs)
        width = self.refine.ratio * self.attn_dim
        dim_out = kwargs.get("dim_out") or dim
        self.proj = nn.Linear(
            width, dim_out, bias=kwargs.get("proj_bias", True), **factory_kwargs(kwargs)
        )

    def weigh_values(self, maps: Tensor, v: Tensor) -> Tensor:
        """Shape: maps (B, ratio H, N, N), v (B, H, N, hd) -> by every map of its head (B, ratio H, N, hd)"""
        by_head = maps.unflatten(1, (self.num_heads, -1))  # (B, H, ratio, N, N)
        return (by_head @ v[:, :, None]).flatten(1, 2)

    def reduce_projection(self, plain: Attention) -> None:
        """Set plain attention's projection to the sum of this one's parts of each head."""
        by_map = self.proj.weight.unflatten(1, (self.num_heads, self.refine.ratio, -1))
        plain.proj.weight = nn.Parameter(by_map.sum(2).flatten(1))
        plain.proj.in_features = plain.proj.weight.shape[1]

    def expand_projection(self) -> None:
        """Expand a plain projection to the maps of each head, plus noise that cancels: equal ones would stay equal."""
        plain = self.proj.weight
        ratio = self.refine.ratio
        by_head = plain.unflatten(1, (self.num_heads, 1, -1))
        weight = by_head.expand(-1, -1, ratio, -1)  # (C, H, ratio, hd)
        noise = torch.randn_like(weight) * plain.std()
        expanded = (weight / ratio + noise - noise.mean(2, keepdim=True)).flatten(1)
        self.proj.weight = nn.Parameter(expanded, plain.requires_grad)
        self.proj.in_features = expanded.shape[1]


class SpatialAttention(OnTokenGrid, RefinedAttention):
    """Refined attention whose maps are convolved over the image, so that neighbouring positions share attention.

    For each query, the attention over the grid of keys is treated as an image and convolved. `RefinedAttention`
    convolves along the order of the tokens instead. `grid_size` (H, W) is the grid of the tokens after the
    `prefix_tokens`; pass another one to `forward` at any call. The other arguments are those of `RefinedAttention`,
    `refine` a `SpatialRefiner`.

    Shape: x (B, N, C) -> (B, N, C) with N = prefix_tokens + H W
    Source: Refiner Table 4, "Spatial"
    Raises: ValueError if the tokens do not fill the grid, or for any mask.

    Example:
        >>> layer = iso.layers.SpatialAttention(64, 4, grid_size=(6, 8), prefix_tokens=1)
        >>> layer(torch.randn(2, 49, 64)).shape
        torch.Size([2, 49, 64])
        >>> layer(torch.randn(2, 21, 64), grid_size=(4, 5)).shape
        torch.Size([2, 21, 64])
    """

    refine: SpatialRefiner
    default_refiner = SpatialRefiner

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        grid_size: GridSize = (14, 14),
        prefix_tokens: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.grid_size = grid_size
        self.prefix_tokens = prefix_tokens

    def refined_maps(
        self, q: Tensor, k: Tensor, token_mask: Tensor | None, grid_size: GridSize | None = None
    ) -> Tensor:
        """Shape: q, k (B, H, N, hd) -> (B, H, N, N)"""
        if token_mask is not None:
            raise ValueError(
                "SpatialAttention does not support attn_mask: every grid position is a real token",
            )
        grid_size = self.check_grid(k, grid_size)
        maps = self.attn_drop(softmax_map(q * self.scale, k))  # (B, H, N, N)
        return self.refine(maps, grid_size, self.prefix_tokens)


class LocalAttention(RefinedAttention):
    """Attention whose maps are smoothed or sharpened locally: each head's map is convolved with its own small kernel.

    y = proj((D * softmax(q k^T / sqrt(hd))) v)

    The convolution lets neighbouring queries and keys share their attention, which gives each head a local pattern. It
    splits into a convolution of the values and a sum over the output,

        (D_h * A_h) v_h = sum_a shift_a(A_h sum_b D_h[a, b] shift_-b(v_h)),

    between which is ordinary attention with values k times as wide. So no map is formed, and memory grows linearly with
    the number of tokens. The kernels D are in `refine`, a
    `MapConvolution`; the other arguments are those of `RefinedAttention`.

    Shape: x (B, N, C) -> (B, N, C); attn_mask (B, N) or (B, 1, 1, N), True for real tokens
    Source: Refiner section 3.3, Table 2 "+ DLA"
    Raises: as RefinedAttention.

    Example:
        >>> layer = iso.layers.LocalAttention(dim=64, num_heads=4)
        >>> layer(torch.randn(2, 50, 64)).shape
        torch.Size([2, 50, 64])
        >>> wide = iso.layers.LocalAttention(64, 4, refine=iso.layers.MapConvolution(4, kernel_size=5))
    """

    refine: MapConvolution
    default_refiner = MapConvolution
    forms_maps = False

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        token_mask: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Return attention on the convolved values, its k parts shifted and summed. Shape: as RefinedAttention"""
        keys = None
        if token_mask is not None:
            keys = token_mask[..., None, :]  # (B, 1, 1, N)
            real = token_mask[..., None]  # (B, 1, N, 1)
            v = v * real
        values = _convolve_values(v, self.refine.local())  # (B, H, N, k hd)
        mixed = _attend_wide_values(q, k, values, keys, self.drop_probability, self.scale)
        if token_mask is not None:
            mixed = mixed * real
        return _sum_shifted(mixed, v.shape[-1])


def _convolve_values(v: Tensor, taps: Tensor) -> Tensor:
    """Return sum_b D[a, b] shift_-b(v) for every a. Shape: (B, H, N, hd), taps (H, k, k) -> (B, H, N, k hd)"""
    H, k, _ = taps.shape
    columns = taps.flip(-1).reshape(H * k, 1, k, 1)
    convolved = F.conv2d(v, columns, padding=(k // 2, 0), groups=H)  # (B, H k, N, hd)
    return convolved.unflatten(1, (H, k)).transpose(2, 3).flatten(3)


def _sum_shifted(concatenated: Tensor, width: int) -> Tensor:
    """Sum the k parts of the width, part a shifted by a tokens. Shape: concatenated (B, H, N, k hd) -> (B, H, N, hd)"""
    parts = concatenated.unflatten(-1, (-1, width))  # (B, H, N, k, hd)
    N, k = parts.shape[2:4]
    padded = F.pad(parts, (0, 0, 0, 0, k // 2, k // 2))
    total = padded[:, :, :N, 0]
    for a in range(1, k):
        total = total + padded[:, :, a : a + N, a]
    return total


def _attend_wide_values(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    mask: Tensor | None,
    drop: float,
    scale: float,
) -> Tensor:
    """Return softmax(scale q k^T) values for values of any width, without forming the map.

    Torch's fused CPU kernel requires q, k and v of one width, and its GPU kernels multiples of 8: zeros fill them up.
    """
    width = values.shape[-1]
    if on_cpu(q):
        missing = width - q.shape[-1]
        q = F.pad(q, (0, missing))
        k = F.pad(k, (0, missing))
    elif q.shape[-1] % 8 or width % 8:
        missing = -q.shape[-1] % 8
        q = F.pad(q, (0, missing))
        k = F.pad(k, (0, missing))
        values = F.pad(values, (0, -width % 8))
    mixed = F.scaled_dot_product_attention(
        q, k, values, attn_mask=mask, dropout_p=drop, scale=scale
    )
    return mixed[..., :width]


class ReusedAttention(nn.Module):
    """y = proj(maps v), with the maps of an earlier block: without queries, keys and softmax.

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
        v = split_heads(self.v(x), self.num_heads)  # (B, H, N, hd)
        return self.proj_drop(self.proj(join_heads(maps @ v)))

    def attention(self, x: Tensor, maps: Tensor) -> Tensor:
        """Return the given map."""
        return maps
