"""Attention that a layer applied to its values, recorded while the unchanged forward of the model runs.

Of a layer that calls `scaled_dot_product_attention` the queries and keys are recorded, without forming a map. Of one
that forms its map itself the matrix is recorded that it multiplies its values by.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.operations.maps import FollowMaps, FusedCall, MapLayout, to_standard_map, usual_layout

# Entries of a layer's maps that are in memory at the same time where only statistics of them are needed.
MAX_MAP_ENTRIES = 2**22


def images_per_chunk(heads: int, queries: int, keys: int) -> int:
    """Return the number of images whose maps may be in memory together, at least one."""
    return max(MAX_MAP_ENTRIES // max(heads * queries * keys, 1), 1)


class AppliedAttention(NamedTuple):
    """Attention as a layer applies it: scores q k^T + bias with scaled queries, or the map that the forward formed.

    Of a formed map `q` is the input of its softmax, or None if it is not known, without `k`.
    Shape: q and k (B, nh, N, hd), bias broadcast to (B, nh, Nq, Nk) or None, maps (B, nh, Nq, Nk)
    """

    q: Tensor | None
    k: Tensor | None = None
    bias: Tensor | None = None
    maps: Tensor | None = None

    @property
    def logits(self) -> "AppliedAttention | None":
        """The input of the softmax, by `rows`, or None if it is not known."""
        return None if self.q is None else self

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries and of keys."""
        if self.k is not None:
            return self.q.shape[2], self.k.shape[2]  # type: ignore[union-attr]
        formed = self.maps if self.q is None else self.q  # the map or its logits
        return formed.shape[2], formed.shape[3]  # type: ignore[union-attr]

    def map(self) -> Tensor:
        """Return the attention map. Shape: -> (B, nh, Nq, Nk)"""
        if self.maps is not None:
            return self.maps
        return self._weights(self.rows(0, self.shape[0]))

    def float(self) -> "AppliedAttention":
        return AppliedAttention(*(None if tensor is None else tensor.float() for tensor in self))

    def rows(self, start: int, stop: int) -> Tensor:
        """Return the logits of queries start to stop. Shape: -> (B, nh, stop - start, Nk)"""
        logits = self.q[:, :, start:stop]  # type: ignore[index]
        if self.k is not None:
            logits = logits @ self.k.mT
        if self.bias is None:
            return logits
        is_same_for_all = self.bias.shape[-2] == 1
        return logits + (self.bias if is_same_for_all else self.bias[..., start:stop, :])

    def _weights(self, logits: Tensor) -> Tensor:
        """Return the softmax, 0 in rows that a mask excludes, as `scaled_dot_product_attention` has them."""
        maps = logits.softmax(-1)
        if self.bias is None:
            return maps
        attends_to_nothing = (logits == -torch.inf).all(-1, keepdim=True)
        return maps.masked_fill(attends_to_nothing, 0)

    def row(self, query: int) -> Tensor:
        """Return the map of one query. Shape: -> (B, nh, Nk)"""
        if self.maps is not None:
            return self.maps[:, :, query]
        return self._weights(self.rows(query, query + 1))[:, :, 0]

    def chunks(self) -> Iterator[Tensor]:
        """Yield the maps of a few images at a time."""
        with_images = [x for x in self if x is not None and x.ndim == 4]
        B = max(len(x) for x in with_images)
        nh = max(x.shape[1] for x in with_images)
        count = images_per_chunk(nh, *self.shape)
        for start in range(0, B, count):
            parts = []
            for x in self:
                is_same_for_all = x is None or x.ndim < 4 or len(x) == 1
                parts.append(x if is_same_for_all else x[start : start + count])  # type: ignore[index]
            yield AppliedAttention(*parts).map()


class _Frame:
    """A layer whose forward is running: how it lays out its maps, and what it applied so far."""

    def __init__(self, heads: int, layout: MapLayout | None) -> None:
        self.heads = heads
        self.layout = layout
        self.applied: list[AppliedAttention] = []
        self.logits: Tensor | None = None

    def standard(self, x: Tensor) -> Tensor:
        return to_standard_map(x, self.layout or usual_layout(x, self.heads), self.heads)

    def scores(self, call: FusedCall) -> AppliedAttention:
        """Return the scores of fused attention, its mask as a bias."""
        q = call.scaled_query
        k = call.repeated[0]
        mask = call.mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
        if mask is not None and q.ndim != 4:
            mask = self.standard(mask.expand(*q.shape[:-1], k.shape[-2]))
        return AppliedAttention(self.standard(q), self.standard(k), mask)

    def result(self) -> AppliedAttention | None:
        """Return the attention that the layer applied last; of a layer that loops over its heads, all heads."""
        maps = [head.maps for head in self.applied if head.maps is not None]
        if len(maps) == len(self.applied) > 1:
            logits = [head.q for head in self.applied if head.q is not None]
            joint = torch.cat(logits, 1) if logits else None
            return AppliedAttention(joint, maps=torch.cat(maps, 1))
        return self.applied[-1] if self.applied else None


class ReadMaps(FollowMaps):
    """Context in which the attention of the innermost layer is recorded between `enter` and `leave`.

    Example:
        >>> q = torch.randn(2, 4, 9, 8)
        >>> with ReadMaps() as mode:
        ...     mode.enter(heads=4)
        ...     out = F.scaled_dot_product_attention(q, q, q)
        ...     applied = mode.leave()
        >>> tuple(applied.map().shape)
        (2, 4, 9, 9)
    """

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[_Frame | None] = []  # None: what runs is not recorded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.frame is None:
            return func(*args, **(kwargs or {}))
        out = super().__torch_function__(func, types, args, kwargs)
        if func is F.multi_head_attention_forward:  # of nn.MultiheadAttention: one operation
            keywords = {**(kwargs or {}), "need_weights": True, "average_attn_weights": False}
            maps: Any = func(*args, **keywords)[1]
            self.frame.applied.append(AppliedAttention(None, maps=maps))
        return out

    @property
    def frame(self) -> _Frame | None:
        return self.frames[-1] if self.frames else None

    def enter(self, heads: int = 1, layout: MapLayout | None = None, ignore: bool = False) -> None:
        """Begin the forward of a layer; `ignore`: it is not recorded."""
        self.frames.append(None if ignore else _Frame(heads, layout))

    def leave(self) -> AppliedAttention | None:
        """End the forward of a layer, and return the attention that it applied, or None."""
        frame = self.frames.pop()
        if not any(outer and outer.logits is not None for outer in self.frames):
            self.maps = []  # a softmax that did not weigh values in its layer: what follows from it is not a map
        return frame.result() if frame else None

    def at_fused(self, call: FusedCall) -> Tensor:
        if self.frame:
            self.frame.applied.append(self.frame.scores(call))
        return super().at_fused(call)

    def at_softmax(self, logits: Tensor, maps: Tensor) -> None:
        if self.frame and self.frame.logits is None:
            self.frame.logits = logits

    def at_product(self, maps: Tensor) -> Tensor:
        if self.frame and self.frame.logits is not None:
            logits = self.frame.standard(self.frame.logits)
            self.frame.logits = None
            self.frame.applied.append(AppliedAttention(logits, maps=self.frame.standard(maps)))
        return maps
