"""Attention layers of any class with an edited map: the layer's own forward, with an edit between softmax and values.

The class of the layer becomes a subclass that gives the edit the mask and the grid of every call, and the dropout of
the map becomes a `MapEdit`. All weights keep their names.
"""

import ast
import copy
import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isomorph.errors import UserError
from isomorph.layers.attention_interface import register_interface, use_interface
from isomorph.layers.map_edit import RUNNING, GatedMap, MapCall, MapEdit
from isomorph.layers.map_grid import GridSize
from isomorph.surgery.attention_classes import (
    PLACE,
    AttentionForm,
    attention_form,
    cached_by_class,
    forward_source,
    is_softmax_over_keys,
    no_map_reason,
)
from isomorph.surgery.interface_layers import interface_dropout

_WINDOW_NAMES = ("window_size", "ws")
SIZE_NAMES = ("feat_size", "size", "resolution")
"""Arguments in which layers of timm receive the size of the feature map of their tokens."""


class _Original(NamedTuple):
    """The layer before the edit: its class, whether it was fused, whether it had the place, and its configuration."""

    kind: type[nn.Module]
    fused: bool | None
    had_place: bool
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
    """Mixin of the classes of attention layers whose map is edited.

    `grid_size` is the size of the image or of its grid of patches. In a recast model it follows every image. Layers
    with a window, or with the size of the feature map among their arguments, use those first.
    """

    original: _Original
    argument_names: tuple[str, ...]
    form: AttentionForm
    grid_size: GridSize | None
    prefix_tokens: int
    recompute: bool

    def map_call(self, grid_size: GridSize | None, given: dict[str, Any]) -> MapCall:
        """Return mask, grid and prefix tokens of a call, from its arguments by name.

        Raises: ValueError for is_causal.
        """
        if given.get("is_causal"):
            raise ValueError("is_causal is not supported: an edited map mixes queries and cannot be causal")
        grid = grid_size or self.grid_size
        shapes = [] if self.form.square else own_shapes(self, given) + ([grid] if grid else [])  # type: ignore[arg-type]
        places = partial(self.form.places, self, shapes) if self.form.places else None
        return MapCall(self.form.mask(given), tuple(shapes), self.prefix_tokens, places)

    def _run(self, call: MapCall, *args: Any, **kwargs: Any) -> Any:
        """Call the layer's own forward, with `call` set for its edit."""
        before = getattr(RUNNING, "call", None)
        RUNNING.call, RUNNING.edited = call, False
        try:
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            RUNNING.call = before
        if not RUNNING.edited:
            raise ValueError(f"{self.original.kind.__name__} did not form its map in this call, so it was not edited")
        return out

    def forward(self, *args: Any, grid_size: GridSize | None = None, **kwargs: Any) -> Any:
        call = self.map_call(grid_size, dict(zip(self.argument_names, args, strict=False)) | kwargs)
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._run, call, *args, use_reentrant=False, **kwargs)
        return self._run(call, *args, **kwargs)

    @property
    def map_edit(self) -> MapEdit:
        """The module in the place of the dropout of the map."""
        return getattr(self, self.form.place or PLACE)

    @torch.no_grad()
    def to_attention(self, atol: float = 1e-3) -> nn.Module:
        """Return the layer of the original class, without the edit.

        Raises: ValueError with the measured deviation (largest |difference| of random maps, relative to their largest
        value) if it is above `atol`: the edit has been trained.
        """
        edit, weight = self.map_edit, next(self.map_edit.parameters())
        atol = max(atol, torch.finfo(weight.dtype).eps)
        scores = torch.randn(1, edit.heads, 64, 64, generator=torch.Generator().manual_seed(0))
        maps = scores.softmax(-1).to(weight)
        deviation = ((edit.edit(maps, MapCall()) - maps).abs().max() / maps.max()).item()
        if not deviation <= atol:
            raise ValueError(
                f"this layer is not plain attention: the relative deviation of its map is {deviation:.2g}, above "
                f"{atol:g}; keep it"
            )
        original = self.original
        plain: Any = copy.deepcopy(self, {id(original): original})
        plain.__class__ = original.kind
        if original.had_place:
            setattr(plain, self.form.place or PLACE, plain._modules[self.form.place or PLACE].drop)
        else:
            delattr(plain, PLACE)
        if original.fused is not None:
            plain.fused_attn = original.fused
        if self.form.interface:
            plain.config = original.config  # that of the model itself, not a copy
        for name in ("original", "grid_size", "prefix_tokens", "recompute"):
            delattr(plain, name)
        return plain

    def __reduce__(self) -> Any:
        """Pickle by the original class: this class is made at run time."""
        return _new_edited, (self.original.kind,), self.__dict__


def _new_edited(kind: type[nn.Module]) -> nn.Module:
    """Return an edited layer without its state."""
    edited = edited_class(kind)
    return edited.__new__(edited)


class _AddPlace(ast.NodeTransformer):
    """Pass the result of every softmax over keys through `self.attn_drop`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not is_softmax_over_keys(node):
            return node
        place = ast.Attribute(ast.Name("self", ast.Load()), PLACE, ast.Load())
        return ast.copy_location(ast.Call(place, [node], []), node)


@cached_by_class
def _with_place(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose forward is that of the class, with every softmax over keys passed through `attn_drop`.

    Raises: UserError if the source of the class is not available, or refers to variables of an enclosing function.
    """
    source, forward = forward_source(kind), inspect.unwrap(kind.forward)
    if source is None or forward.__code__.co_freevars:
        raise UserError(f"the source of {kind.__name__}.forward cannot be read; register the class with form=")
    tree = ast.fix_missing_locations(_AddPlace().visit(copy.deepcopy(source)))
    definition = tree.body[0]
    definition.decorator_list, definition.returns = [], None
    for argument in (*definition.args.args, *definition.args.kwonlyargs):
        argument.annotation = None
    namespace: dict[str, Any] = {}
    exec(compile(tree, f"<forward of {kind.__name__} with {PLACE}>", "exec"), forward.__globals__, namespace)
    return types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(namespace))


@cached_by_class
def edited_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of the layers of a class whose map is edited."""
    form = attention_form(kind)
    assert form is not None
    if form.interface:
        register_interface()
    base = form.form or (kind if form.place else _with_place(kind))
    body = {"form": form, "argument_names": tuple(inspect.signature(kind.forward).parameters)[1:]}
    return type(f"Edited{kind.__name__}", (EditedAttention, base), body)


class _AnyAttention(type):
    """Metaclass by which `isinstance` recognises attention of any class."""

    def __instancecheck__(cls, module: Any) -> bool:
        known = isinstance(module, Attention | EditedAttention) or attention_form(type(module)) is not None
        return known or bool(no_map_reason(module))


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
    form = attention_form(type(layer))
    if form is None and type(layer).__module__.startswith("isomorph.layers."):
        return f"{name} is a layer of isomorph already; revert it first"
    if form is None:
        return f"{name} is not a known class of attention; register it with iso.surgery.register_attention"
    if not form.adds_place and form.place not in layer._modules:
        return f"{name} has no submodule {form.place} to pass its map through"
    if not any(parameter.is_floating_point() for parameter in layer.parameters()):
        return f"{name} has no floating-point parameters"
    return form.reason(layer)


def _map_dropout(layer: nn.Module, form: AttentionForm) -> float:
    """Return the dropout of the map of a layer that has no submodule for it in its forward."""
    if form.interface:
        return interface_dropout(layer)
    return getattr(layer, "dropout", 0.0) if form.form else 0.0


def edit_map(
    layer: nn.Module,
    make_edit: Callable[..., nn.Module],
    grid_size: GridSize | None,
    prefix_tokens: int | None,
    recompute: bool = False,
) -> nn.Module:
    """Return a copy of an attention layer with an edited map. `make_edit(heads, device=, dtype=)` makes the edit."""
    form = attention_form(type(layer))
    assert form is not None
    config = getattr(layer, "config", None) if form.interface else None
    edited: Any = copy.deepcopy(layer, {id(config): config})
    edited.__class__ = edited_class(type(layer))
    place = form.place or PLACE
    drop, fused = layer._modules.get(place), getattr(layer, "fused_attn", None)
    edited.original = _Original(type(layer), fused, drop is not None, config)
    if form.interface:
        use_interface(edited, config)
    edited.grid_size, edited.recompute = grid_size, recompute
    edited.prefix_tokens = prefix_tokens or getattr(layer, "num_prefix_tokens", 0)
    if fused is not None:
        edited.fused_attn = False
    like = next(parameter for parameter in layer.parameters() if parameter.is_floating_point())
    heads = form.heads(layer)
    edit = make_edit(heads, device=like.device, dtype=like.dtype)
    edited.add_module(place, MapEdit(edit, drop or nn.Dropout(_map_dropout(layer, form)), heads, form.layout_of(layer)))
    return edited


def attention_name(name: str, module: nn.Module) -> str:
    """Return the name of the attention layer that a gated layer is or belongs to, from the layer's own name."""
    return name.rpartition(".")[0].rpartition(".")[0] if isinstance(module, GatedMap) else name
