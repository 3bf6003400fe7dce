"""Attention layers of any class with an edited map: the layer's own forward, with an edit between softmax and values.

The class of the layer becomes a subclass, and the edit its child `map_edit`. All other parts and names stay.
"""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isomorph.layers.grid import GridSize
from isomorph.layers.map_edit import GatedMap, MapCall, merge_queries
from isomorph.operations import EditMaps, from_standard_map, to_standard_map, usual_layout
from isomorph.surgery.attention_layers import (
    AttentionFacts,
    attention_facts,
    cached_by_class,
    heads_of,
    no_map_reason,
)

_WINDOW_NAMES = ("window_size", "ws")
SIZE_NAMES = ("feat_size", "size", "resolution")
"""Arguments in which layers of timm receive the size of the feature map of their tokens."""
_SEEN = ("sdpa", "eager")
"""Implementations of attention of transformers whose operations can be seen."""
INTERFACE_NAME = "isomorph"
"""The name of `unfused_interface` among transformers' implementations of attention."""


class _Original(NamedTuple):
    """The layer before the edit: its class, whether it was fused, and its configuration."""

    kind: type[nn.Module]
    fused: bool | None
    config: Any = None


def _as_pair(size: Any) -> GridSize | None:
    """Return a size as (height, width), or None if it is not one."""
    if isinstance(size, int | torch.SymInt) and not isinstance(size, bool):
        return (size, size)  # type: ignore[return-value]
    pair = isinstance(size, tuple | list | torch.Size) and len(size) == 2
    return (size[0], size[1]) if pair and all(isinstance(n, int | torch.SymInt) for n in size) else None


def own_shapes(layer: nn.Module, given: dict[str, Any]) -> list[GridSize]:
    """Return the sizes that the tokens of a layer may cover, from its window and the arguments of its call by name."""
    sizes = [_as_pair(getattr(layer, name, None)) for name in _WINDOW_NAMES]
    sizes += [_as_pair(given.get(name)) for name in SIZE_NAMES]
    x = next(iter(given.values()), None)
    if isinstance(x, Tensor) and x.ndim == 4:
        axes = [(2, 3), (1, 2)] if any(isinstance(m, nn.Conv2d) for m in layer.modules()) else [(1, 2), (2, 3)]
        sizes += [(x.shape[a], x.shape[b]) for a, b in axes]
    return [size for size in sizes if size is not None and 0 not in size]


class EditedAttention:
    """Mixin of the classes of attention layers whose map is edited by the child `map_edit`.

    `grid_size` is the size of the image or of its grid of patches. In a recast model it follows every image. Layers
    with a window, or with the size of the feature map among their arguments, use those first.
    """

    original: _Original
    argument_names: tuple[str, ...]
    facts: AttentionFacts
    edited_heads: int
    grid_size: GridSize | None
    prefix_tokens: int
    recompute: bool
    map_edit: nn.Module

    def map_call(self, grid_size: GridSize | None, given: dict[str, Any]) -> MapCall:
        """Return mask, grid and prefix tokens of a call, from its arguments by name.

        Raises: ValueError for is_causal.
        """
        if given.get("is_causal"):
            raise ValueError("is_causal is not supported: an edited map mixes queries and cannot be causal")
        grid = grid_size or self.grid_size
        shapes = [] if self.facts.square else own_shapes(self, given) + ([grid] if grid else [])  # type: ignore[arg-type]
        places = partial(self.facts.places, self, shapes) if self.facts.places else None
        mask = self.facts.mask(self, given)
        return MapCall(mask if isinstance(mask, Tensor) else None, tuple(shapes), self.prefix_tokens, places)

    def _edit(self, call: MapCall, maps: Tensor, mask: Tensor | None) -> Tensor:
        """Return the edited map, in the layout of the layer; `mask`: that of its fused attention."""
        layout = self.facts.layout(self) or usual_layout(maps, self.edited_heads)
        if call.mask is None and mask is not None:
            usual = layout == "heads" and maps.ndim == 4
            mask = mask if usual else to_standard_map(mask.expand_as(maps), layout, self.edited_heads)
            call = call._replace(mask=mask)
        if self.facts.interface and call.mask is not None:
            call = call._replace(mask=merge_queries(call.mask))
        standard = to_standard_map(maps, layout, self.edited_heads)  # (B, nh, Nq, Nk)
        if standard.shape[1] != self.edited_heads:
            name, found = self.original.kind.__name__, standard.shape[1]
            raise ValueError(f"the map of {name} has {found} heads in this call, and its edit {self.edited_heads}")
        return from_standard_map(self.map_edit(standard, call).to(maps.dtype), layout, maps)

    def _run(self, call: MapCall, *args: Any, **kwargs: Any) -> Any:
        """Call the layer's own forward with its map edited."""
        mode = EditMaps(partial(self._edit, call))
        with mode:
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        if not mode.edited:
            raise ValueError(f"{self.original.kind.__name__} did not form its map in this call, so it was not edited")
        return out

    def forward(self, *args: Any, grid_size: GridSize | None = None, **kwargs: Any) -> Any:
        call = self.map_call(grid_size, dict(zip(self.argument_names, args, strict=False)) | kwargs)
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._run, call, *args, use_reentrant=False, **kwargs)
        return self._run(call, *args, **kwargs)

    @torch.no_grad()
    def to_attention(self, atol: float = 1e-3) -> nn.Module:
        """Return the layer of the original class, without the edit.

        Raises: ValueError with the measured deviation (largest |difference| of random maps, relative to their largest
        value) if it is above `atol`: the edit has been trained.
        """
        weight = next(self.map_edit.parameters())
        atol = max(atol, torch.finfo(weight.dtype).eps)
        scores = torch.randn(1, self.edited_heads, 64, 64, generator=torch.Generator().manual_seed(0))
        maps = scores.softmax(-1).to(weight)
        deviation = ((self.map_edit(maps, MapCall()) - maps).abs().max() / maps.max()).item()
        if not deviation <= atol:
            raise ValueError(
                f"this layer is not plain attention: the relative deviation of its map is {deviation:.2g}, above "
                f"{atol:g}; keep it"
            )
        original = self.original
        plain: Any = copy.deepcopy(self, {id(original.config): original.config})
        plain.__class__ = original.kind
        if original.fused is not None:
            plain.fused_attn = original.fused
        if original.config is not None:
            plain.config = original.config  # that of the model itself, not a copy
        for name in ("original", "edited_heads", "grid_size", "prefix_tokens", "recompute", "map_edit"):
            delattr(plain, name)
        return plain

    def __reduce__(self) -> Any:
        """Pickle by the original class: this class is made at run time."""
        return _new_edited, (self.original.kind,), self.__dict__


def _new_edited(kind: type[nn.Module]) -> nn.Module:
    """Return an edited layer without its state."""
    edited = edited_class(kind)
    return edited.__new__(edited)


@cached_by_class
def edited_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of the layers of a class whose map is edited."""
    facts = attention_facts(kind)
    assert facts is not None
    body = {"facts": facts, "argument_names": tuple(inspect.signature(kind.forward).parameters)[1:]}
    return type(f"Edited{kind.__name__}", (EditedAttention, facts.form or kind), body)


def unfused_interface(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention of transformers by an operation that can be seen, for layers that use flash or flex attention.

    Shape: query (B, nh, Nq, hd), key and value (B, nh, Nk, hd), attention_mask (B, Nk) or (B, 1, Nq, Nk)
    -> (B, Nq, nh, hd) and None
    Raises: ValueError for a mask that is not a tensor, such as that of flex_attention, or scores that are capped or
        have sinks.
    """
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        given = f"the attention mask is a {type(attention_mask).__name__}"
        raise ValueError(f'{given}, and an edited map needs a tensor; call model.set_attn_implementation("sdpa")')
    if changed := [name for name in ("softcap", "s_aux", "position_bias") if more.get(name) is not None]:
        raise ValueError(f"{type(module).__name__} passes {changed[0]}, which an edited map does not support")
    mask = attention_mask
    if mask is not None and mask.ndim == 2:  # that of flash attention
        mask = mask.bool()[:, None, None].expand(-1, -1, mask.shape[1], -1)
    gqa = key.shape[1] != query.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, mask, dropout, bool(is_causal), scale=scaling, enable_gqa=gqa
    )
    return out.transpose(1, 2).contiguous(), None


def _use_interface(layer: Any) -> None:
    """Give a layer a copy of its configuration that names `unfused_interface`; the model's own stays."""
    from transformers import AttentionInterface

    AttentionInterface.register(INTERFACE_NAME, unfused_interface)
    layer.config = copy.copy(layer.config)  # a shallow copy: the configurations inside belong to the model
    layer.config._attn_implementation_internal = INTERFACE_NAME


class _AnyAttention(type):
    """Metaclass by which `isinstance` recognises attention of any class."""

    def __instancecheck__(cls, module: Any) -> bool:
        return isinstance(module, Attention | EditedAttention) or attention_facts(type(module)) is not None


class AnyAttention(nn.Module, metaclass=_AnyAttention):
    """Attention of any class: with a map that can be edited, or known to have none. Not to be created."""


AnyAttention.__name__ = "attention"


def edit_reason(layer: nn.Module) -> str | None:
    """Return why the map of an attention layer cannot be edited, or None if it can."""
    name = type(layer).__name__
    if isinstance(layer, EditedAttention):
        return "its map is edited already; revert it first"
    if reason := no_map_reason(layer):
        return f"{name} {reason}"
    facts = attention_facts(type(layer))
    if facts is None and type(layer).__module__.startswith("isomorph."):
        return f"{name} is a layer of isomorph already; revert it first"
    if facts is None:
        return f"{name} is not attention: its forward has no softmax before a product, and no fused attention"
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
    facts = attention_facts(type(layer))
    assert facts is not None
    config = getattr(layer, "config", None) if facts.interface else None
    edited: Any = copy.deepcopy(layer, {id(config): config})
    edited.__class__ = edited_class(type(layer))
    edited.original = _Original(type(layer), getattr(layer, "fused_attn", None) if facts.plain else None, config)
    if facts.plain:
        edited.fused_attn = False
    if config is not None and config._attn_implementation not in _SEEN:
        _use_interface(edited)
    edited.grid_size, edited.recompute = grid_size, recompute
    edited.prefix_tokens = prefix_tokens or getattr(layer, "num_prefix_tokens", 0)
    edited.edited_heads = heads_of(layer, facts)
    like = next(parameter for parameter in layer.parameters() if parameter.is_floating_point())
    edited.map_edit = make_edit(edited.edited_heads, device=like.device, dtype=like.dtype)
    return edited


def attention_name(name: str, module: nn.Module) -> str:
    """Return the name of the attention layer that a gated layer is or belongs to, from the layer's own name."""
    return name.rpartition(".")[0] if isinstance(module, GatedMap) else name
