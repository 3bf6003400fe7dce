"""Attention that a layer applies to its values: as queries and keys, as a formed map, or computed on demand."""

import math
from collections.abc import Iterator
from functools import singledispatch
from typing import Any, NamedTuple, Protocol

import torch
from timm.layers import Attention
from timm.layers.attention import maybe_add_mask, resolve_self_attn_mask
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import (
    GPSA,
    PSA,
    GPSA2d,
    PostRelativeAttention,
    RelativeAttention,
    ViTRelativeAttention,
)
from isomorph.layers.tap_heads import PositionHeads

MAX_MAP_ENTRIES = 2**22
"""Entries of a layer's maps that are in memory at the same time where only statistics of them are needed."""


MAX_MAP_BYTES = 2**32
"""Most bytes that the maps of a recast convolution may take when they are formed."""


class AppliedAttention(Protocol):
    """Attention as a layer applies it; `logits` is the input of its softmax, or None if it is not known."""

    @property
    def logits(self) -> "Scores | None": ...

    @property
    def shape(self) -> tuple[int, int] | None:
        """Numbers of queries and keys, or None if they are not known without forming a map."""
        ...

    def map(self) -> Tensor:
        """Return the attention map. Shape: -> (B, nh, Nq, Nk)"""
        ...

    def row(self, query: int) -> Tensor:
        """Return the attention of one query. Shape: -> (B, nh, Nk)"""
        ...

    def chunks(self) -> Iterator[Tensor]:
        """Yield the maps of a few images at a time. Shape: (b, nh, Nq, Nk) each"""
        ...


def images_per_chunk(heads: int, queries: int, keys: int) -> int:
    """Return the number of images whose maps may be in memory together, at least one."""
    return max(MAX_MAP_ENTRIES // max(heads * queries * keys, 1), 1)


def _select_images(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    """Return some images' rows of a tensor, or the tensor if it is the same for all images."""
    return tensor if tensor is None or tensor.ndim < 4 or len(tensor) == 1 else tensor[start:stop]


class Scores(NamedTuple):
    """Attention as scores q k^T + bias, with scaled queries; if `k` is None, `q` is the formed logits.

    Shape: q and k (B, nh, N, hd), bias broadcast to (B, nh, Nq, Nk) or None
    """

    q: Tensor
    k: Tensor | None
    bias: Tensor | None = None

    @property
    def logits(self) -> "Scores":
        return self

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape[2], self.q.shape[3] if self.k is None else self.k.shape[2]

    def product(self, q: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of these queries. Shape: q (B, nh, n, hd) -> (B, nh, n, Nk)"""
        return maybe_add_mask(q if self.k is None else q @ self.k.mT, bias)

    def map(self) -> Tensor:
        """Return the attention map. Shape: -> (B, nh, Nq, Nk)"""
        return torch.softmax(self.product(self.q, self.bias), dim=-1)

    def float(self) -> "Scores":
        """Return the scores in float32."""
        return Scores(*(None if tensor is None else tensor.float() for tensor in self))  # type: ignore[arg-type]

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the logits of queries start to stop. Shape: -> (B, nh, stop - start, Nk)"""
        bias = self.bias
        if bias is not None and bias.shape[-2] > 1:
            bias = bias[..., start:stop, :]
        return self.product(self.q[:, :, start:stop], bias)

    def row(self, query: int) -> Tensor:
        """Return the attention of one query. Shape: -> (B, nh, Nk)"""
        return torch.softmax(self.rows(query, query + 1), dim=-1)[:, :, 0]

    def images(self, start: int, stop: int) -> "Scores":
        """Return the scores of images start to stop."""
        k = None if self.k is None else self.k[start:stop]
        return Scores(self.q[start:stop], k, _select_images(self.bias, start, stop))

    def chunks(self) -> Iterator[Tensor]:
        """Yield the maps of a few images at a time. Shape: (b, nh, Nq, Nk) each"""
        count = images_per_chunk(self.q.shape[1], *self.shape)
        for start in range(0, len(self.q), count):
            yield self.images(start, start + count).map()


class FormedMap(NamedTuple):
    """Attention as a map that the forward formed, with the logits of its softmax, or None if they are not known."""

    maps: Tensor
    logits: Scores | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.maps.shape[2], self.maps.shape[3]

    def map(self) -> Tensor:
        """Return the attention map. Shape: -> (B, nh, Nq, Nk)"""
        return self.maps

    def row(self, query: int) -> Tensor:
        """Return the attention of one query. Shape: -> (B, nh, Nk)"""
        return self.maps[:, :, query]

    def chunks(self) -> Iterator[Tensor]:
        """Yield the maps of a few images at a time. Shape: (b, nh, Nq, Nk) each"""
        yield from self.maps.split(images_per_chunk(*self.maps.shape[1:]))


class MethodMap(NamedTuple):
    """Attention of a layer with a method `attention`, which is called on demand with the inputs of the layer."""

    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str = ""
    shape: tuple[int, int] | None = None

    @property
    def logits(self) -> Scores | None:
        known = scores.dispatch(type(self.layer)) is not scores.dispatch(object)
        return scores(self.layer, *self.args, **self.kwargs) if known else None

    def map(self) -> Tensor:
        """Return the attention map. Shape: -> (B, nh, Nq, Nk)"""
        if isinstance(self.layer, PositionHeads):
            _check_size(self.name, self.layer, self.args[0])
        return self.layer.attention(*self.args, **self.kwargs)

    def row(self, query: int) -> Tensor:
        """Return the attention of one query. Shape: -> (B, nh, Nk)"""
        if isinstance(self.layer, PositionHeads):
            return self.layer.attention(self.args[0], query)[:, :, 0]
        return torch.cat([maps[:, :, query] for maps in self.chunks()])

    def images(self, start: int, stop: int) -> "MethodMap":
        """Return the attention of images start to stop, with these rows of every input that has one row an image."""
        count = len(self.args[0])

        def part(value: Any) -> Any:
            each = isinstance(value, Tensor) and value.ndim > 1 and len(value) == count
            return value[start:stop] if each else value

        kwargs = {name: part(value) for name, value in self.kwargs.items()}
        return MethodMap(self.layer, tuple(map(part, self.args)), kwargs, self.name)

    def chunks(self) -> Iterator[Tensor]:
        """Yield the maps of a few images at a time. Shape: (b, nh, Nq, Nk) each"""
        first = self.images(0, 1).map()
        yield first
        count = images_per_chunk(*first.shape[1:])
        for start in range(1, len(self.args[0]), count):
            yield self.images(start, start + count).map()


def _map_bytes(layer: Any, x: Tensor) -> tuple[int, int, int]:
    """Return the bytes of a recast convolution's attention maps, and their queries and keys. Shape: x (B, C, H, W)"""
    queries = math.prod(layer.query_grid(x.shape[2], x.shape[3]))
    keys = math.prod(n + 2 * padding for n, padding in zip(x.shape[2:], layer.padding, strict=True))
    return x.element_size() * len(x) * layer.num_heads * queries * keys, queries, keys


def _check_size(name: str, layer: Any, x: Tensor) -> None:
    """Raise UserError if the maps of a recast convolution take more than `MAX_MAP_BYTES`. Shape: x (B, C, H, W)"""
    size, queries, keys = _map_bytes(layer, x)
    if size > MAX_MAP_BYTES:
        raise UserError(
            f"the attention maps of {name or type(layer).__name__} ({len(x)} x {layer.num_heads} heads, {queries:,} "
            f"queries, {keys:,} keys) take {size / 2**30:.1f} GiB of the {MAX_MAP_BYTES / 2**30:.0f} GiB allowed; use "
            "smaller or fewer images, select other layers, or look at one query with iso.analysis.attention_from"
        )


@singledispatch
def scores(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Scores:
    """Return the scores of a layer for its inputs; registered for layers whose softmax gets only scores.

    Raises: TypeError for another layer.
    """
    raise TypeError(f"the queries and keys of {type(layer).__name__} are not known")


@scores.register
def _timm_scores(
    layer: Attention, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, *_: Any, **__: Any
) -> Scores:
    """Return the scores of timm's Attention and its subclasses, with masks. Shape: x (B, N, C)"""
    q, k, _ = layer.qkv(x).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = layer.q_norm(q) * layer.scale, layer.k_norm(k)
    return Scores(q, k, resolve_self_attn_mask(x.shape[1], q, attn_mask, is_causal))


@scores.register
def _relative_scores(layer: RelativeAttention, x: Tensor) -> Scores:
    """Return the scores of attention with relative positions. Shape: x (B, H, W, C)"""
    q, k, _ = layer.queries_keys_values(x.flatten(1, 2))
    after = isinstance(layer, PostRelativeAttention)
    return Scores(q * layer.scale, k, None if after else layer.position_bias((x.shape[1], x.shape[2]), q.dtype))


@scores.register
def _vit_relative_scores(
    layer: ViTRelativeAttention, x: Tensor, *_: Any, grid_size: tuple[int, int] | None = None, **__: Any
) -> Scores:
    """Return the scores of relative attention on tokens. Shape: x (B, N, C)"""
    q, k, _v = layer.queries_keys_values(x)
    return Scores(q * layer.scale, k, layer.position_bias(grid_size or layer.grid_size, q.dtype))


@scores.register
def _gpsa_scores(layer: GPSA, x: Tensor, *_: Any, **__: Any) -> Scores:
    """Return the scores of the content attention of GPSA. Shape: x (B, N, C)"""
    q, k = layer.queries_keys(x)
    return Scores(q * q.shape[-1] ** -0.5, k)


@scores.register
def _gpsa2d_scores(layer: GPSA2d, x: Tensor) -> Scores:
    """Return the scores of the content attention of GPSA2d, whose keys include the padding. Shape: x (B, C, H, W)"""
    return Scores(*layer.content_scores(x))


@scores.register
def _psa_scores(layer: PSA, x: Tensor, grid_size: tuple[int, int] | None = None) -> Scores:
    """Return the scores of PSA, with position as bias. Shape: x (B, N, C)"""
    q, k = layer.queries_keys(x)
    return Scores(q * q.shape[-1] ** -0.5, k, layer.position_bias(x, grid_size).to(q.dtype))


def has_attention_method(layer: nn.Module) -> bool:
    """True if the layer has a method `attention`."""
    return callable(getattr(type(layer), "attention", None))
