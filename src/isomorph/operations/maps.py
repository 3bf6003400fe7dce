"""Attention maps as a model computes them, found by operation: to read them, or to change them on the way.

A map comes from a softmax over keys and multiplies values. What happens to it in between (talking heads, gates, a
difference of two maps) belongs to it, its dropout does not. `scaled_dot_product_attention` never forms it, so an edit
does. The class of a layer does not matter. Not seen: `torch.special.softmax`, and softmax in other words.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# What comes after the batch axis of a map.
#
# - heads: (B, nh, Nq, Nk), or (B, Nq, Nk) for one head, or (B, nh, windows, Nq, Nk).
# - windows: (B, windows, nh, Nq, Nk).
# - joint: batch and heads in one axis: (B nh, Nq, Nk) or (B nh, windows, Nq, Nk).
# - queries: (B, Nq, nh, Nk).
MapLayout = Literal["heads", "windows", "joint", "queries"]

_SOFTMAX: set[Any] = {torch.softmax, Tensor.softmax, F.softmax}
_BEGINS = _SOFTMAX | {F.scaled_dot_product_attention}
_DROPOUTS: set[Any] = {F.dropout, F.alpha_dropout}
_PRODUCT: set[Any] = {
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    operator.matmul,
}


def usual_layout(maps: Tensor, heads: int) -> MapLayout:
    """Return the layout that most layers give maps with this number of axes."""
    if maps.ndim == 5:
        return "windows"
    return "joint" if maps.ndim == 3 and heads > 1 else "heads"


def to_standard_map(maps: Tensor, layout: MapLayout, heads: int) -> Tensor:
    """Return maps, queries or keys with windows counted as images. Shape: (...) -> (B windows, nh, ., .)"""
    if layout == "queries":
        return maps.transpose(1, 2)
    if layout == "windows":
        return maps.flatten(0, 1)
    if layout == "joint":
        maps = maps.unflatten(0, (-1, heads))
    elif maps.ndim == 3:
        return maps[:, None]
    return maps.transpose(1, 2).flatten(0, 1) if maps.ndim == 5 else maps


def from_standard_map(maps: Tensor, layout: MapLayout, like: Tensor) -> Tensor:
    """Undo `to_standard_map`. Shape: maps (B windows, nh, Nq, Nk) -> as like"""
    if layout == "queries":
        return maps.transpose(1, 2)
    if layout == "heads" and like.ndim == 5:
        return maps.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)
    if layout == "joint" and like.ndim == 4:
        return maps.unflatten(0, (-1, like.shape[1])).transpose(1, 2).flatten(0, 1)
    return maps.reshape(like.shape)


@dataclass(eq=False)
class FusedCall:
    """The arguments of `scaled_dot_product_attention`, by its names for them.

    >>> FusedCall(*torch.ones(3, 1, 1, 2, 4), is_causal=True).mask.tolist()
    [[True, False], [True, True]]
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def scaled_query(self) -> Tensor:
        scale = self.scale
        if scale is None:
            scale = self.query.shape[-1] ** -0.5
        return self.query * scale

    @property
    def repeated(self) -> tuple[Tensor, Tensor]:
        """Keys and values, repeated for the heads that share them."""
        if not self.enable_gqa:
            return self.key, self.value
        heads = self.query.shape[-3]
        return tuple(x.repeat_interleave(heads // x.shape[-3], -3) for x in (self.key, self.value))  # type: ignore[return-value]

    @property
    def mask(self) -> Tensor | None:
        """The mask, or that of causal attention: True for allowed, or added to the scores."""
        if self.is_causal:
            ones = torch.ones(
                self.query.shape[-2], self.key.shape[-2], dtype=torch.bool, device=self.query.device
            )
            return ones.tril()
        return self.attn_mask

    def attend(self, edit: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
        """Return the values weighed by the edited map; 0 for a query that may attend to nothing."""
        mask = self.mask
        allowed: Tensor | None = None
        key, value = self.repeated
        scores = self.scaled_query @ key.mT  # (..., Nq, Nk)
        lowest = torch.finfo(self.query.dtype).min  # the gradient of a row of -inf is NaN
        if mask is not None and mask.dtype == torch.bool:
            allowed = mask
            scores = scores.masked_fill(~mask, lowest)
        elif mask is not None:
            scores = scores + mask.clamp(min=lowest)
        maps = edit(scores.softmax(-1), allowed)
        out = F.dropout(maps, self.dropout_p) @ value
        if mask is None:
            return out
        attends = (mask > -torch.inf if allowed is None else allowed).any(-1, keepdim=True)
        return out.masked_fill(~attends, 0)


class FollowMaps(TorchFunctionMode):
    """Torch function mode, so for all layers, that follows maps from their softmax to the product with values."""

    def __init__(self) -> None:
        super().__init__()
        # made of a softmax over keys, and not multiplied by values yet
        self.maps: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # which torch up to 2.11 cannot compile in a mode
        func = torch.unflatten if func is Tensor.unflatten else func
        if not self.maps and func not in _BEGINS:  # most calls
            return func(*args, **kwargs) if kwargs else func(*args)
        keywords = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.at_fused(FusedCall(*args, **keywords))
        if func in _SOFTMAX:
            out = func(*args, **keywords)
            if _is_over_keys(out, *args[1:], **keywords):
                self.at_softmax(args[0] if args else keywords["input"], out)
                self.maps.append(out)
            return out
        if func in _DROPOUTS and args and self.follows(args[0]):
            args = (self.before_dropout(args[0]), *args[1:])
        elif func in _PRODUCT:
            factors: list[Any] = [*args, *keywords.values()]
            # not one with `out` or `out_dtype`
            if len(factors) == 2 and self._are_map_and_values(*factors):
                a, b = factors
                first = self.follows(a)
                self.maps = []
                return func(self.at_product(a), b) if first else func(a, self.at_product(b.mT).mT)
        elif func is torch.einsum and self._are_map_and_values(*tree_leaves(args[1:])):
            edited = [self.at_product(x) if self.follows(x) else x for x in tree_leaves(args[1:])]
            self.maps = []
            return func(args[0], *edited)
        out = func(*args, **keywords)
        if any(map(self.follows, tree_leaves(args))):
            self.maps += [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        return out

    def follows(self, x: Any) -> bool:
        """True for a map, from its softmax to the product with values."""
        return isinstance(x, Tensor) and any(x is other for other in self.maps)

    def _are_map_and_values(self, *factors: Any) -> bool:
        """True if one factor of a product is a map; not for one with a matrix of weights, as of talking heads."""
        return (
            all(getattr(x, "ndim", 0) > 2 for x in factors) and sum(map(self.follows, factors)) == 1
        )

    def at_fused(self, call: FusedCall) -> Tensor:
        return F.scaled_dot_product_attention(**vars(call))

    def at_softmax(self, logits: Tensor, maps: Tensor) -> None:
        """Take notice of a softmax over keys."""

    def before_dropout(self, maps: Tensor) -> Tensor:
        """Return what the dropout of a map receives instead of it."""
        return maps

    def at_product(self, maps: Tensor) -> Tensor:
        """Return what multiplies the values instead of a map, in the layout of the layer."""
        return maps


def _is_over_keys(out: Tensor, dim: Any = None, *_: Any, **kwargs: Any) -> bool:
    return out.ndim > 2 and kwargs.get("dim", dim) in (-1, out.ndim - 1)


class EditMaps(FollowMaps):
    """Context in which every map becomes `edit(map, mask)` before its dropout and the product with values.

    `mask` is True where attention is allowed, or None: the boolean mask of `scaled_dot_product_attention`. Masks that
    code adds to its scores are not known here.

    Raises: ValueError for causal attention, and for a layer that runs its attention in a reentrant checkpoint, whose
        backward pass would run it again without the edit.

    Example:
        >>> q = torch.randn(2, 4, 9, 8)
        >>> with EditMaps(lambda maps, mask: maps.flip(1)) as mode:
        ...     out = F.scaled_dot_product_attention(q, q, q)
        >>> mode.edited == 1, torch.allclose(out, (q @ q.mT * 8**-0.5).softmax(-1).flip(1) @ q, atol=1e-5)
        (True, True)
    """

    def __init__(self, edit: Callable[[Tensor, Tensor | None], Tensor]) -> None:
        super().__init__()
        self.edit = edit
        self.edited = 0
        self.records = torch.is_grad_enabled()

    def _edit(self, maps: Tensor, mask: Tensor | None) -> Tensor:
        """Return an edited map. Raises: ValueError inside a reentrant checkpoint."""
        if self.records and not torch.is_grad_enabled():
            raise ValueError(
                "the layer turns gradients off around its attention, as a reentrant checkpoint does, so that its "
                "backward pass would not contain the edit; checkpoint with use_reentrant=False"
            )
        self.edited += 1
        return self.edit(maps, mask)

    def at_fused(self, call: FusedCall) -> Tensor:
        if call.is_causal:
            raise ValueError(
                "is_causal is not supported: an edited map mixes queries and cannot be causal"
            )
        return call.attend(self._edit)

    def before_dropout(self, maps: Tensor) -> Tensor:
        self.maps = []  # its edit is the end of it
        return self._edit(maps, None)

    def at_product(self, maps: Tensor) -> Tensor:
        return self._edit(maps, None)
