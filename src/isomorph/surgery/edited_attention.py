"""Attention layers of any class with an edited map: the layer's own forward, with an edit between softmax and values.

The class of the layer becomes a subclass, and the edit its child `map_edit`. All other parts and names stay.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isomorph.layers.attention_base import score_scale
from isomorph.layers.grid import GridSize
from isomorph.layers.map_edit import MapCall, merge_queries
from isomorph.layers.modes import first_float, noise
from isomorph.operations import (
    EditMaps,
    MapLayout,
    from_standard_map,
    to_standard_map,
    usual_layout,
)
from isomorph.surgery.altered import Altered, altered_class, copy_as
from isomorph.surgery.attention_layers import (
    NOTHING_KNOWN,
    AttentionFacts,
    attention_facts,
    heads_of,
)
from isomorph.surgery.observed_scores import SIZE_NAMES
from isomorph.surgery.plain_layers import first_quantised_part

_WINDOW_NAMES = ("window_size", "ws")


def _as_pair(size: Any) -> GridSize | None:
    """Return a size as (height, width), or None if it is not one."""
    if isinstance(size, int | torch.SymInt) and not isinstance(size, bool):
        return (size, size)  # type: ignore[return-value]
    if not isinstance(size, tuple | list | torch.Size) or len(size) != 2:
        return None
    if all(isinstance(side, int | torch.SymInt) for side in size):
        return size[0], size[1]
    return None


def own_shapes(layer: nn.Module, arguments: dict[str, Any]) -> list[GridSize]:
    """Return the sizes that the tokens of a layer may cover, from its window and the arguments of its call by name."""
    sizes = [_as_pair(getattr(layer, name, None)) for name in _WINDOW_NAMES]
    sizes += [_as_pair(arguments.get(name)) for name in SIZE_NAMES]
    x = next(iter(arguments.values()), None)
    if isinstance(x, Tensor) and x.ndim == 4:
        channels_last = x.shape[1], x.shape[2]
        channels_first = x.shape[2], x.shape[3]
        has_convolution = any(isinstance(module, nn.Conv2d) for module in layer.modules())
        sizes += (
            [channels_first, channels_last] if has_convolution else [channels_last, channels_first]
        )
    return [size for size in sizes if size is not None and 0 not in size]


class AlteredAttention(Altered):
    """Mixin of the classes of attention layers whose attention is altered on the grid of their tokens.

    `grid_size` is the size of the image or of its grid of patches. In a recast model it follows every image. Layers
    with a window, or with the size of the feature map among their arguments, use those first.
    """

    facts: AttentionFacts
    argument_names: tuple[str, ...]
    grid_size: GridSize | None
    prefix_tokens: int
    # Names of the attributes and children that the plain layer does not have.
    added: tuple[str, ...] = ("grid_size", "prefix_tokens")

    @classmethod
    def base_of(cls, kind: type[nn.Module]) -> tuple[type[nn.Module], dict[str, Any]]:
        facts = attention_facts(kind)
        assert facts is not None
        names = tuple(inspect.signature(kind.forward).parameters)[1:]
        return facts.form or kind, {"facts": facts, "argument_names": names}

    def shapes(self, grid_size: GridSize | None, arguments: dict[str, Any]) -> list[GridSize]:
        """Return the shapes that the grid of a call may have; none for square windows, which tokens show."""
        if self.facts.square:
            return []
        shapes = own_shapes(cast(Any, self), arguments)
        grid = grid_size or self.grid_size
        if grid:
            shapes.append(grid)
        return shapes

    def arguments_by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self.argument_names, args, strict=False)) | kwargs

    def plain(self) -> nn.Module:
        """Return the layer as it was before it was altered."""
        plain = copy_as(cast(Any, self), self.original)
        for name in self.added:
            delattr(plain, name)
        return plain


def alter(
    layer: nn.Module,
    mixin: type[AlteredAttention],
    grid_size: GridSize | None,
    prefix_tokens: int | None,
) -> Any:
    """Return a copy of an attention layer in a subclass."""
    altered = copy_as(layer, altered_class(mixin, type(layer)))
    altered.grid_size = grid_size
    if prefix_tokens is None:
        prefix_tokens = getattr(layer, "num_prefix_tokens", 0)
    altered.prefix_tokens = prefix_tokens
    return altered


class EditedAttention(AlteredAttention):
    """Mixin of the classes of attention layers whose map is edited by the child `map_edit`.

    `form_before` has the attributes `fused_attn` and `scale` of a layer of which only the plain form has one map.
    """

    edited_heads: int
    recompute: bool
    map_edit: nn.Module
    form_before: dict[str, Any]
    added = (*AlteredAttention.added, "edited_heads", "recompute", "map_edit", "form_before")

    def map_call(self, grid_size: GridSize | None, given: dict[str, Any]) -> MapCall:
        """Return mask, grid and prefix tokens of a call, from its arguments by name. Raises: ValueError if causal."""
        if given.get("is_causal"):
            raise ValueError(
                "is_causal is not supported: an edited map mixes queries and cannot be causal"
            )
        shapes = self.shapes(grid_size, given)
        positions = partial(self.facts.positions, self, shapes) if self.facts.positions else None
        mask = self.facts.mask(cast(Any, self), given)
        return MapCall(
            mask=mask if isinstance(mask, Tensor) else None,
            shapes=tuple(shapes),
            prefix=self.prefix_tokens,
            places=positions,
            other_queries=given.get("query") is not given.get("key"),
        )

    def _edit(self, call: MapCall, maps: Tensor, mask: Tensor | None) -> Tensor:
        """Return the edited map, in the layout of the layer; `mask`: that of its fused attention."""
        layout = self.facts.layout(self) or usual_layout(maps, self.edited_heads)
        # its axes are those of the map, where those of an argument are guessed
        if mask is not None:
            call = call._replace(mask=self._standard_mask(mask, maps, layout))
        if self.facts.interface and call.mask is not None:
            call = call._replace(mask=merge_queries(call.mask))
        standard = to_standard_map(maps, layout, self.edited_heads)  # (B, nh, Nq, Nk)
        if standard.shape[1] != self.edited_heads:
            raise ValueError(
                f"the map of {self.original.__name__} has {standard.shape[1]} heads in this call, and its edit "
                f"{self.edited_heads}"
            )
        return from_standard_map(self.map_edit(standard, call).to(maps.dtype), layout, maps)

    def _standard_mask(self, mask: Tensor, maps: Tensor, layout: MapLayout) -> Tensor:
        """Return a mask of fused attention with four axes. Shape: broadcast to maps -> to (B, nh, Nq, Nk)"""
        if layout != "heads" or maps.ndim != 4:
            return to_standard_map(mask.expand_as(maps), layout, self.edited_heads)
        while mask.ndim < 4:
            mask = mask[None]
        return mask

    def plain(self) -> nn.Module:
        layer = super().plain()
        for name, value in self.form_before.items():
            setattr(layer, name, value)
        return layer

    def _forward_edited(self, call: MapCall, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the plain layer and edit its map.

        Raises: ValueError if it forms no map, or several where nothing is known about its class.
        """
        name = self.original.__name__
        mode = EditMaps(partial(self._edit, call))
        with mode:
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not mode.edited:
            raise ValueError(f"{name} did not form its map in this call, so it was not edited")
        if mode.edited > 1 and self.facts == NOTHING_KNOWN:
            raise ValueError(
                f"{name} forms {mode.edited} maps in this call, and which of them to edit is not known"
            )
        return out

    def forward(self, *args: Any, grid_size: GridSize | None = None, **kwargs: Any) -> Any:
        call = self.map_call(grid_size, self.arguments_by_name(args, kwargs))
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._forward_edited, call, *args, use_reentrant=False, **kwargs)
        return self._forward_edited(call, *args, **kwargs)

    @torch.no_grad()
    def to_attention(self, atol: float = 1e-3) -> nn.Module:
        """Return the layer of the original class, without the edit.

        Raises: ValueError if the largest |difference| of random maps, relative to the largest, is above `atol`.
        """
        weight = next(self.map_edit.parameters())
        atol = max(atol, torch.finfo(weight.dtype).eps)
        scores = noise(1, self.edited_heads, 64, 64)
        maps = scores.softmax(-1).to(weight)
        deviation = ((self.map_edit(maps, MapCall()) - maps).abs().max() / maps.max()).item()
        if not deviation <= atol:
            raise ValueError(
                f"not plain attention: its maps' relative deviation is {deviation:.2g}, above {atol:g}"
            )
        return self.plain()


def edit_reason(layer: nn.Module) -> str | None:
    """Return why the map of an attention layer cannot be edited, or None if it can."""
    name = type(layer).__name__
    facts = attention_facts(type(layer))
    if isinstance(layer, AlteredAttention):
        return "its attention is edited already; revert it first"
    if facts is None and type(layer).__module__.startswith("isomorph."):
        return f"{name} is a layer of isomorph already; revert it first"
    if facts is None:
        return f"{name} is not attention: its forward has no softmax before a product, and no fused attention"
    if facts.no_map:
        return f"{name} {facts.no_map}"
    reason = first_quantised_part(layer)
    if reason:
        return reason
    if not any(parameter.is_floating_point() for parameter in layer.parameters()):
        return f"{name} has no floating-point parameters"
    return facts.reason(layer)


def edit_map(
    layer: nn.Module,
    make_edit: Callable[..., nn.Module],
    grid_size: GridSize | None,
    prefix_tokens: int | None,
    recompute: bool = False,
) -> nn.Module:
    """Return a copy of an attention layer with an edited map. `make_edit(heads, device=, dtype=)` makes the edit."""
    edited = alter(layer, EditedAttention, grid_size, prefix_tokens)
    edited.recompute = recompute
    edited.form_before = {}
    if edited.facts.plain:
        edited.form_before = {name: getattr(layer, name) for name in ("fused_attn", "scale")}
        edited.scale = score_scale(layer)
        edited.fused_attn = False
    edited.edited_heads = heads_of(layer, edited.facts)
    reference = first_float(layer)
    edited.map_edit = make_edit(edited.edited_heads, device=reference.device, dtype=reference.dtype)
    return edited
