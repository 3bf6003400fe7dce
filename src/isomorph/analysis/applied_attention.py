"""What an attention layer weighs its values with: as queries and keys, as a map that is there already, or on demand."""

from collections.abc import Iterator
from functools import singledispatch
from typing import Any, NamedTuple, Protocol

import torch
from timm.layers import Attention
from timm.layers.attention import maybe_add_mask, resolve_self_attn_mask
from torch import Tensor, nn

from isomorph.layers import GPSA, PSA, GPSA2d, PostRelativeAttention, RelativeAttention

MAX_MAP_ENTRIES = 2**22
"""Entries of a layer's maps that are formed at the same time where only a summary of them is wanted."""


class AppliedAttention(Protocol):
    """Attention as a layer applies it; `logits` is what its softmax is given, where that is known."""

    @property
    def logits(self) -> "Scores | None": ...

    @property
    def shape(self) -> tuple[int, int] | None:
        """Queries and keys, where they are known without forming a map."""
        ...

    def map(self) -> Tensor:
        """Shape: -> (B, nh, Nq, Nk)"""
        ...

    def pieces(self) -> Iterator[Tensor]:
        """The map of some images after that of others. Shape: (b, nh, Nq, Nk) each"""
        ...


def images_per_chunk(heads: int, queries: int, keys: int) -> int:
    """Images whose maps may exist together: at least one."""
    return max(MAX_MAP_ENTRIES // max(heads * queries * keys, 1), 1)


def _select_images(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    """Some images' share of a tensor that may be the same for all."""
    return tensor if tensor is None or tensor.ndim < 4 or len(tensor) == 1 else tensor[start:stop]


class Scores(NamedTuple):
    """q k^T + bias; the queries are scaled. Shape: two of (B, nh, N, hd), and what adds to (B, nh, Nq, Nk), or None

    Where `k` is None the logits are formed already, and `q` is them.
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
        """The logits of some queries. Shape: q (B, nh, n, hd) -> (B, nh, n, Nk)"""
        return maybe_add_mask(q if self.k is None else q @ self.k.mT, bias)

    def map(self) -> Tensor:
        """Shape: -> (B, nh, Nq, Nk)"""
        return torch.softmax(self.product(self.q, self.bias), dim=-1)

    def float(self) -> "Scores":
        """In float32."""
        return Scores(*(None if tensor is None else tensor.float() for tensor in self))  # type: ignore[arg-type]

    def rows(self, start: int, stop: int) -> Tensor:
        """The logits of some queries. Shape: -> (B, nh, stop - start, Nk)"""
        bias = self.bias
        if bias is not None and bias.shape[-2] > 1:
            bias = bias[..., start:stop, :]
        return self.product(self.q[:, :, start:stop], bias)

    def images(self, start: int, stop: int) -> "Scores":
        """Those of some images."""
        k = None if self.k is None else self.k[start:stop]
        return Scores(self.q[start:stop], k, _select_images(self.bias, start, stop))

    def pieces(self) -> Iterator[Tensor]:
        """The map of some images after that of others. Shape: (b, nh, Nq, Nk) each"""
        count = images_per_chunk(self.q.shape[1], *self.shape)
        for start in range(0, len(self.q), count):
            yield self.images(start, start + count).map()


class FormedMap(NamedTuple):
    """A map that the forward has formed, and the logits of the softmax it came from, where they were seen."""

    maps: Tensor
    logits: Scores | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.maps.shape[2], self.maps.shape[3]

    def map(self) -> Tensor:
        """Shape: -> (B, nh, Nq, Nk)"""
        return self.maps

    def pieces(self) -> Iterator[Tensor]:
        """The map of some images after that of others. Shape: (b, nh, Nq, Nk) each"""
        yield from self.maps.split(images_per_chunk(*self.maps.shape[1:]))


class MethodMap(NamedTuple):
    """The map of a layer that has a method `attention`, called as the layer was; formed on demand."""

    layer: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, int] | None = None

    @property
    def logits(self) -> Scores | None:
        known = scores.dispatch(type(self.layer)) is not scores.dispatch(object)
        return scores(self.layer, *self.args, **self.kwargs) if known else None

    def map(self) -> Tensor:
        """Shape: -> (B, nh, Nq, Nk)"""
        return self.layer.attention(*self.args, **self.kwargs)

    def images(self, start: int, stop: int) -> "MethodMap":
        """That of some images: of all tensors that are given for each image."""
        count = len(self.args[0])

        def part(value: Any) -> Any:
            each = isinstance(value, Tensor) and value.ndim > 1 and len(value) == count
            return value[start:stop] if each else value

        kwargs = {name: part(value) for name, value in self.kwargs.items()}
        return MethodMap(self.layer, tuple(map(part, self.args)), kwargs)

    def pieces(self) -> Iterator[Tensor]:
        """The map of some images after that of others. Shape: (b, nh, Nq, Nk) each"""
        first = self.images(0, 1).map()
        yield first
        count = images_per_chunk(*first.shape[1:])
        for start in range(1, len(self.args[0]), count):
            yield self.images(start, start + count).map()


@singledispatch
def scores(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Scores:
    """The scores of a layer of ours that is called with x and more, where they are all that its maps are made of.

    Raises: TypeError for another layer.
    """
    raise TypeError(f"the queries and keys of {type(layer).__name__} are unknown")


@scores.register
def _timm_scores(
    layer: Attention, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, *_: Any, **__: Any
) -> Scores:
    """timm's Attention, of which others of ours are made, masks included. Shape: x (B, N, C)"""
    q, k, _ = layer.qkv(x).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = layer.q_norm(q) * layer.scale, layer.k_norm(k)
    return Scores(q, k, resolve_self_attn_mask(x.shape[1], q, attn_mask, is_causal))


@scores.register
def _relative_scores(layer: RelativeAttention, x: Tensor) -> Scores:
    """Shape: x (B, H, W, C)"""
    q, k, _ = layer.queries_keys_values(x.flatten(1, 2))
    after = isinstance(layer, PostRelativeAttention)
    return Scores(q * layer.scale, k, None if after else layer.position_bias((x.shape[1], x.shape[2]), q.dtype))


@scores.register
def _gpsa_scores(layer: GPSA, x: Tensor, *_: Any, **__: Any) -> Scores:
    """The content half. Shape: x (B, N, C)"""
    q, k = layer.queries_keys(x)
    return Scores(q * q.shape[-1] ** -0.5, k)


@scores.register
def _gpsa2d_scores(layer: GPSA2d, x: Tensor) -> Scores:
    """The content half, the padding among its keys. Shape: x (B, C, H, W)"""
    q, keys = layer.queries_padded_keys(x)
    return Scores(q * q.shape[-1] ** -0.5, keys)


@scores.register
def _psa_scores(layer: PSA, x: Tensor, grid_size: tuple[int, int] | None = None) -> Scores:
    """Content and position, as its softmax is given them. Shape: x (B, N, C)"""
    q, k = layer.queries_keys(x)
    return Scores(q * q.shape[-1] ** -0.5, k, layer.position_bias(x, grid_size).to(q.dtype))


def has_attention_method(layer: nn.Module) -> bool:
    """Whether the layer has a method `attention`."""
    return callable(getattr(type(layer), "attention", None))
