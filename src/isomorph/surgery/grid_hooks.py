"""Hooks that tell layers in a ViT, which see tokens and not the image, the grid of their tokens.

The grid belongs to the call: threads may share a model, and images of several sizes may be on their way at once.

- When a model embeds an image, its grid is noted in a context variable, so for this thread only. While a block runs,
  the layers in it get that grid as an argument. A layer that is called on its own, and any layer under a compiler, uses
  its attribute `grid_size`: the grid of the model's last image, or what has been assigned since.
- Gradient checkpointing runs blocks again during the backward pass, in any order and perhaps in another thread. So the
  memory of the tokens that enter a block is marked with their grid, and a block that runs again reads the mark.
"""

from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple
from weakref import ref

import torch
from timm.layers import PatchDropout
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import SpatialAttention, ViTGPSA
from isomorph.surgery.field_checks import check_grid

GRID_LAYERS = (SpatialAttention, ViTGPSA)
"""Layers whose tokens have positions on the grid of the image."""

GridSize = tuple[int, int]


class _EmbeddedImage(NamedTuple):
    """The grid of the image that comes next, and the backward pass that it is for (-1: none)."""

    grid: GridSize
    backward: int


class _RunningModule(NamedTuple):
    """A module that runs, and the grid of its tokens."""

    grids: "_CallGrids"
    module: nn.Module
    grid: GridSize


_EMBEDDED: ContextVar[dict[ref["_CallGrids"], _EmbeddedImage]] = ContextVar("isomorph_embedded")
"""The last image of each model in this thread; the dict is replaced, never changed."""

_RUNNING: ContextVar[tuple[_RunningModule, ...]] = ContextVar("isomorph_running", default=())
"""The modules that run in this thread, the innermost last."""


def _backward_pass() -> int:
    """The backward pass that this code runs in, -1 for none. torch.utils.checkpoint asks the same private question."""
    return torch._C._current_graph_task_id()


def _storage_of(tokens: Any) -> Any:
    """The storage of tokens, whose attributes last as long as it does; None for what has none, as inside vmap."""
    try:
        return tokens.untyped_storage() if isinstance(tokens, Tensor) else None
    except (NotImplementedError, RuntimeError):
        return None


def _mark_storage(tokens: Any, grid: GridSize) -> None:
    """Marks the memory of tokens with their grid."""
    storage = _storage_of(tokens)
    if storage is not None:
        storage.isomorph_grid = grid


class _CallGrids:
    """The grids of the calls of one model: hooks for the layers with positions and for the modules they lie in."""

    reattached: ClassVar[bool] = True

    def __init__(self) -> None:
        self.seen: dict[GridSize, None] = {}

    def note(self, grid: GridSize) -> None:
        """Notes the grid of the blocks that this thread runs next."""
        alive = {key: known for key, known in _EMBEDDED.get({}).items() if key() is not None}
        _EMBEDDED.set({**alive, ref(self): _EmbeddedImage(grid, _backward_pass())})

    def embed(self, grid: GridSize) -> None:
        """Notes the grid of an image; what an interrupt has left of an earlier one is dropped."""
        if all(type(size) is int for size in grid):  # not a tracer's stand-ins
            self.seen.setdefault(grid)
        _RUNNING.set(tuple(entry for entry in _RUNNING.get() if entry.grids is not self))
        self.note(grid)

    def embedded(self) -> GridSize | None:
        """The grid of the last image, if it was embedded in the pass that runs now."""
        known = _EMBEDDED.get({}).get(ref(self))
        return known.grid if known and known.backward == _backward_pass() else None

    def running(self) -> GridSize | None:
        """The grid of the innermost module of this model that runs."""
        return next((entry.grid for entry in reversed(_RUNNING.get()) if entry.grids is self), None)

    def recall(self, tokens: Any) -> GridSize | None:
        """The grid that tokens are marked with, where a backward pass computes their block again."""
        grid = None if _backward_pass() == -1 else getattr(_storage_of(tokens), "isomorph_grid", None)
        if grid:
            self.note(grid)  # further blocks of the same checkpoint get tokens that were never seen
        return grid

    def of_tokens(self, tokens: Any, noted: bool) -> GridSize | None:
        """The grid of a module's tokens; `noted`: that of the last image counts too."""
        return self.recall(tokens) or self.running() or (self.embedded() if noted else None)

    def only(self, layer: Any, tokens: Tensor) -> GridSize | None:
        """The one grid that so many tokens have had so far, for a block whose marks are lost (saved-tensor hooks).

        Raises: UserError when there are several.
        """
        count = tokens.shape[1] - layer.prefix_tokens
        fitting = [grid for grid in tuple(self.seen) if grid[0] * grid[1] == count]
        if len(fitting) > 1:
            sizes = ", ".join(f"{H} x {W}" for H, W in fitting)
            raise UserError(
                f"{count} tokens computed again in the backward pass may lie on grids {sizes}; checkpoint without "
                "hooks on saved tensors, or call backward before the model runs on another size"
            )
        return fitting[0] if fitting else None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a module with layers inside: they get the grid of its tokens while it runs."""
        if torch.compiler.is_compiling():
            return
        tokens = args[0] if args else kwargs.get("x")
        grid = self.of_tokens(tokens, noted=True)
        if grid:
            _mark_storage(tokens, grid)
            _RUNNING.set((*_RUNNING.get(), _RunningModule(self, module, grid)))

    def leave(self, module: nn.Module, *_: Any) -> None:
        """After a module with layers inside, also one that raised."""
        entries = () if torch.compiler.is_compiling() else _RUNNING.get()
        if entries and entries[-1].module is module:
            _RUNNING.set(entries[:-1])

    def place(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], noted: bool = False) -> Any:
        """Before a layer: passes it the grid of its tokens, unless the call does. On its own it has one already."""
        if torch.compiler.is_compiling() or kwargs.get("grid_size"):
            return None
        tokens = args[0] if args else kwargs["x"]
        grid = self.of_tokens(tokens, noted)
        if grid is None and _backward_pass() != -1:
            grid = self.only(layer, tokens)
        grid = grid or layer.grid_size
        _mark_storage(tokens, grid)
        return args, {**kwargs, "grid_size": grid}

    def place_alone(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`place` for a layer that lies in no other module of its model."""
        return self.place(layer, args, kwargs, noted=True)


class _PatchEmbedHook:
    """Tells layers with positions the grid of each image that is embedded: a hook on the model's `patch_embed`."""

    reattached: ClassVar[bool] = True

    def __init__(self, model: nn.Module, grids: _CallGrids) -> None:
        self.model, self.grids = model, grids

    def __call__(self, patch_embed: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        image = args[0] if args else kwargs["x"]
        height, width = image.shape[-2:]
        grid_size = patch_embed.dynamic_feat_size((height, width))
        for module in self.model.modules():
            if isinstance(module, GRID_LAYERS):
                module.grid_size = grid_size  # for calls on its own, and for compilers
        if not torch.compiler.is_compiling():
            self.grids.embed(grid_size)


def _remove_grid_hooks(module: nn.Module) -> None:
    """Takes the hooks of this file off a module."""
    before = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
    after = (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called)
    for hooks, *flags in (before, after):
        for key in [key for key, hook in hooks.items() if _is_grid_hook(hook)]:
            for entries in (hooks, *flags):
                entries.pop(key, None)  # type: ignore[attr-defined]


def _is_grid_hook(hook: Any) -> bool:
    """Whether a hook is one of this file."""
    return isinstance(getattr(hook, "__self__", hook), _PatchEmbedHook | _CallGrids)


def _register_grid_hooks(model: Any) -> None:
    """Hooks the patch embedding, the layers that need its grid and the modules these lie in; unhooks all others."""
    found = model.named_modules(remove_duplicate=False)
    layers = {name: module for name, module in found if isinstance(module, GRID_LAYERS)}
    for module in model.modules():
        _remove_grid_hooks(module)
    if not layers:
        return
    grids = _CallGrids()
    model.patch_embed.register_forward_pre_hook(_PatchEmbedHook(model, grids), with_kwargs=True)
    around = {name.rsplit(".", depth)[0] for name in layers for depth in range(1, name.count(".") + 1)}
    for module in {model.get_submodule(name) for name in around}:
        module.register_forward_pre_hook(grids.enter, with_kwargs=True)
        module.register_forward_hook(grids.leave, always_call=True)
    for layer in set(layers.values()):
        alone = all("." not in name for name, other in layers.items() if other is layer)
        layer.register_forward_pre_hook(grids.place_alone if alone else grids.place, with_kwargs=True)


def embedding_models(model: nn.Module) -> list[Any]:
    """The parts of a model that embed patches and say on which grid, each embedding once."""
    parts = {
        id(part.patch_embed): part
        for part in reversed(list(model.modules()))
        if hasattr(getattr(part, "patch_embed", None), "dynamic_feat_size")
    }
    return list(parts.values())


def _only_embedding_model(model: nn.Module) -> Any:
    """The one part of a model that embeds patches, or None.

    Raises: UserError when there are several, or when it drops patches: their grid has holes then.
    """
    found = embedding_models(model)
    if len(found) > 1:
        raise UserError(
            "the model embeds patches in several places; recast each part, or give grid_size and prefix_tokens"
        )
    if found and isinstance(getattr(found[0], "patch_drop", None), PatchDropout) and found[0].patch_drop.prob:
        raise UserError(
            "the model drops patches in training (patch_drop_rate), which leaves no grid; create it without"
        )
    return found[0] if found else None


def check_grid_fields(rule: Any) -> None:
    """Makes `grid_size` a pair, as JSON and YAML have lists only. Raises: UserError for an impossible place."""
    check_grid(rule.grid_size, rule.prefix_tokens)
    if rule.grid_size is not None:
        object.__setattr__(rule, "grid_size", tuple(rule.grid_size))


def with_model_grid(rule: Any, model: nn.Module) -> Any:
    """The rule with the model's grid and number of prefix tokens, where it has none of its own."""
    owner = None if None not in (rule.grid_size, rule.prefix_tokens) else _only_embedding_model(model)
    if owner is None:
        return rule
    known = dict(grid_size=owner.patch_embed.grid_size, prefix_tokens=getattr(owner, "num_prefix_tokens", 0))
    return replace(rule, **{name: value for name, value in known.items() if getattr(rule, name) is None})


def attach_grid(rule: Any, model: nn.Module) -> None:
    """Lets the grid of the rule's layers follow the images, unless the rule gives one; stops where none is left."""
    owner = _only_embedding_model(model) if rule.grid_size is None else None
    if owner is not None:
        _register_grid_hooks(owner)
