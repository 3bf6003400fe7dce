"""Hooks that pass the grid of the tokens to layers of a ViT, which receive tokens instead of the image.

The grid is a property of the call: threads may share a model, and run it on images of several sizes at the same time.

- When a model embeds an image, a context variable stores the grid, for this thread only. While a block runs, the layers
  inside receive that grid as an argument. A layer that is called outside its model, or under a compiler, uses its
  attribute `grid_size`: the grid of the model's last image, or the value assigned since.
- Gradient checkpointing runs blocks again during the backward pass, in any order and perhaps in another thread. So the
  storage of the tokens that enter a block is marked with their grid, and a block that runs again reads the mark.
"""

import copy
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple, Self
from weakref import ref

import torch
from timm.layers import PatchDropout
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import SpatialAttention, ViTGPSA, ViTPositionalAttention, ViTRelativeAttention
from isomorph.surgery.edited_attention import EditedAttention
from isomorph.surgery.rule import Rule, check_grid

GRID_LAYERS = (SpatialAttention, ViTGPSA, ViTPositionalAttention, ViTRelativeAttention, EditedAttention)
"""Layers that need the grid positions of their tokens."""

GridSize = tuple[int, int]


class _Running(NamedTuple):
    """The grid of the tokens of a running module, or without `module` that of a model's last image in this thread.

    `backward_id`: the backward pass in which it began (-1: none).
    """

    grids: ref["_CallGrids"]
    module: nn.Module | None
    grid: GridSize
    backward_id: int


_RUNNING: ContextVar[tuple[_Running, ...]] = ContextVar("isomorph_running", default=())
"""The last image of each model and the modules whose forward is running in this thread, the innermost last."""


def _backward_pass_id() -> int:
    """Return the id of the backward pass that runs this code, or -1 outside one."""
    # private, and the only way to know; torch.utils.checkpoint uses it too
    return torch._C._current_graph_task_id()


def _storage_of(tokens: Any) -> Any:
    """Return the storage of tokens, whose attributes live as long as it does, or None if it has none, as in vmap."""
    try:
        return tokens.untyped_storage() if isinstance(tokens, Tensor) else None
    except (NotImplementedError, RuntimeError):
        return None


def _mark_storage(tokens: Any, grid: GridSize | None) -> None:
    storage = _storage_of(tokens)
    if storage is not None and grid is not None:
        storage.isomorph_grid = grid


class _CallGrids:
    """The grids of the running calls of one model, with the hooks of its grid layers and of the modules around them."""

    reattached: ClassVar[bool] = True

    def __init__(self) -> None:
        self.seen: dict[GridSize, None] = {}  # an ordered set

    def set_image(self, grid: GridSize, interrupted: bool = False) -> None:
        """Set the grid of the blocks that this thread runs next.

        `interrupted`: drop modules of this model that an interrupted forward left behind.
        """

        def stays(entry: _Running) -> bool:
            own = entry.grids() is self
            return entry.grids() is not None and not (own and (interrupted or entry.module is None))

        image = _Running(ref(self), None, grid, _backward_pass_id())
        _RUNNING.set((image, *filter(stays, _RUNNING.get())))

    def of_tokens(self, tokens: Any, use_last_image: bool) -> GridSize | None:
        """Return the grid of a module's tokens, if known.

        It is the grid that they are marked with in a backward pass that computes their block again, or that of the
        innermost running module, or with `use_last_image` that of the last image of this forward or backward pass.
        """
        in_backward = _backward_pass_id()
        if in_backward != -1 and (grid := getattr(_storage_of(tokens), "isomorph_grid", None)):
            self.set_image(grid)  # the next blocks of the same checkpoint get new tokens, without a mark
            return grid
        own = next((entry for entry in reversed(_RUNNING.get()) if entry.grids() is self), None)
        if own and (own.module is not None or (use_last_image and own.backward_id == in_backward)):
            return own.grid
        return None

    def of_token_count(self, layer: Any, tokens: Tensor) -> GridSize | None:
        """Return the only grid seen so far with this number of tokens, if any.

        For tokens without a mark, which hooks on saved tensors have replaced.

        Raises: UserError if there are several such grids.
        """
        count = tokens.shape[1] - layer.prefix_tokens
        fitting = [grid for grid in tuple(self.seen) if grid[0] * grid[1] == count]
        if len(fitting) > 1:
            sizes = ", ".join(f"{H} x {W}" for H, W in fitting)
            raise UserError(
                f"{count} tokens recomputed in the backward pass may have the grids {sizes}; checkpoint without hooks "
                "on saved tensors, or call backward before the model runs on another size"
            )
        return fitting[0] if fitting else None

    def before_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set the grid for the layers inside a module before it runs."""
        if torch.compiler.is_compiling():
            return
        tokens = args[0] if args else kwargs.get("x")
        grid = self.of_tokens(tokens, use_last_image=True)
        if grid:
            _mark_storage(tokens, grid)
            _RUNNING.set((*_RUNNING.get(), _Running(ref(self), module, grid, -1)))

    def after_module(self, module: nn.Module, *_: Any) -> None:
        """Remove the grid of a module after it ran or raised."""
        entries = () if torch.compiler.is_compiling() else _RUNNING.get()
        if entries and entries[-1].module is module:
            _RUNNING.set(entries[:-1])

    def before_layer(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], use_last_image: bool = False
    ) -> Any:
        """Pass the grid of its tokens to a layer, unless the call does; outside its model it uses `grid_size`."""
        if torch.compiler.is_compiling() or kwargs.get("grid_size"):
            return None
        tokens = args[0] if args else next(iter(kwargs.values()))
        grid = self.of_tokens(tokens, use_last_image)
        if grid is None and _backward_pass_id() != -1:
            grid = self.of_token_count(layer, tokens)
        grid = grid or layer.grid_size
        _mark_storage(tokens, grid)
        return args, {**kwargs, "grid_size": grid}

    def before_top_layer(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass the grid of its tokens to a layer that is a direct child of its model."""
        return self.before_layer(layer, args, kwargs, use_last_image=True)


class _ImageHook:
    """Hook on a model's `patch_embed`, or its first layer, that sets the grid of each image for its grid layers.

    Without a patch embedding, the size of the image stands for the grid.
    """

    reattached: ClassVar[bool] = True

    def __init__(self, model: nn.Module, grids: _CallGrids) -> None:
        self.model, self.grids = model, grids

    def __call__(self, embedding: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("patch_coord") is not None:
            raise UserError(
                "patches with coordinates have a grid for each image, and these layers need one for the batch; give "
                "images (B, C, H, W)"
            )
        image = args[0] if args else next(iter(kwargs.values()))
        if image.ndim != 4:  # tokens: the model is a part of another
            return
        height, width = image.shape[-2:]
        embeds = hasattr(embedding, "dynamic_feat_size")
        grid_size = embedding.dynamic_feat_size((height, width)) if embeds else (height, width)
        for module in self.model.modules():
            if isinstance(module, GRID_LAYERS):
                module.grid_size = grid_size  # for calls outside the model, and under a compiler
        if not torch.compiler.is_compiling():
            if all(type(size) is int for size in grid_size):  # under a tracer they are symbolic
                self.grids.seen.setdefault(grid_size)
            self.grids.set_image(grid_size, interrupted=True)


def _remove_grid_hooks(module: nn.Module) -> None:
    # torch removes hooks by their handles only, and a copied model has none: the private dicts have to do
    before = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
    after = (module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called)
    for hooks, *flags in (before, after):
        own = [
            key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", hook), _ImageHook | _CallGrids)
        ]
        for key in own:
            for entries in (hooks, *flags):
                entries.pop(key, None)  # type: ignore[attr-defined]


def _register_grid_hooks(model: Any) -> None:
    """Register hooks on the patch embedding, the grid layers and the modules around them; remove all earlier ones."""
    named = model.named_modules(remove_duplicate=False)
    layers = {name: module for name, module in named if isinstance(module, GRID_LAYERS)}
    for module in model.modules():
        _remove_grid_hooks(module)
    if not layers:
        return
    grids = _CallGrids()
    if embedding := _embedding_of(model):
        embedding.register_forward_pre_hook(_ImageHook(model, grids), with_kwargs=True)
    outer = {name.rsplit(".", depth)[0] for name in layers for depth in range(1, name.count(".") + 1)}
    for module in {model.get_submodule(name) for name in outer}:
        module.register_forward_pre_hook(grids.before_module, with_kwargs=True)
        module.register_forward_hook(grids.after_module, always_call=True)
    for layer in {model.get_submodule(name) for name in layers}:
        on_top = all("." not in name for name, other in layers.items() if other is layer)
        layer.register_forward_pre_hook(grids.before_top_layer if on_top else grids.before_layer, with_kwargs=True)


def _embedding_of(model: Any) -> nn.Module | None:
    """Return the module that receives the images: the patch embedding, or else the first layer with a weight matrix."""
    embedding = getattr(model, "patch_embed", None)
    if hasattr(embedding, "dynamic_feat_size"):
        return embedding
    inner = (module for module in model.modules() if module is not model and not isinstance(module, nn.Embedding))
    return next((m for m in inner if any(p.ndim > 1 for p in m.parameters(recurse=False))), None)


def embedding_models(model: nn.Module) -> list[Any]:
    """Return the submodules with a `patch_embed` that gives the grid of an image, one for each embedding."""
    parts = {
        id(part.patch_embed): part
        for part in reversed(list(model.modules()))
        if hasattr(getattr(part, "patch_embed", None), "dynamic_feat_size")
    }
    return list(parts.values())


def _only_embedding_model(model: nn.Module) -> Any:
    """Return the only submodule that embeds patches, or None.

    Raises: UserError if there are several, or if it drops patches, which leaves no full grid.
    """
    owners = embedding_models(model)
    if len(owners) > 1:
        raise UserError(
            "the model has several patch embeddings; recast each submodule, or give grid_size and prefix_tokens"
        )
    if owners and isinstance(getattr(owners[0], "patch_drop", None), PatchDropout) and owners[0].patch_drop.prob:
        raise UserError(
            "the model drops patches in training, so its tokens have no full grid; create it with patch_drop_rate=0"
        )
    return owners[0] if owners else None


_PREFIX_TOKENS = ("cls_token", "class_embedding", "class_token", "distillation_token", "register_tokens")
"""Names of the parameters that are tokens before those of the patches: timm's, torchvision's and transformers'."""


def _class_tokens(model: Any) -> int | None:
    """Return the number of class and register tokens of a model, or None if it is not known."""
    if hasattr(model, "num_prefix_tokens"):
        return model.num_prefix_tokens
    for module in model.modules():
        tokens = [module._parameters[name] for name in _PREFIX_TOKENS if name in module._parameters]
        if tokens:
            return sum(1 if token.ndim == 1 else token.shape[-2] for token in tokens if token is not None)
    return None


def _receives_images(embedding: nn.Module | None) -> bool:
    """True if the first module with a weight matrix embeds images: a convolution, or a module with patches."""
    if embedding is None:
        return False
    return hasattr(embedding, "patch_size") or any(isinstance(module, nn.Conv2d) for module in embedding.modules())


class GridRule(Rule):
    """A rule for attention that needs the grid of its tokens, from its fields `grid_size` and `prefix_tokens`.

    Where they are None, the model says them. A model without a patch embedding may still receive images in its first
    layer with weights: an edit of the map then finds the grid from the size of the image at each call.
    """

    grid_size: tuple[int, int] | None
    prefix_tokens: int | None
    grid_from_image: ClassVar[bool] = False

    def check_grid_fields(self) -> None:
        """Check the grid, and make a list a tuple, as JSON and YAML have only lists.

        Raises: UserError for an impossible value.
        """
        check_grid(self.grid_size, self.prefix_tokens)
        if self.grid_size is not None:
            object.__setattr__(self, "grid_size", tuple(self.grid_size))

    def grid_reason(self) -> str | None:
        """Return that the grid of the tokens is unknown and what to give, or None if the rule knows it."""
        if self.grid_size is not None and self.prefix_tokens is not None:
            return None
        given = f"{type(self).__name__} grid_size=(height, width) and prefix_tokens"
        return f"the grid of its tokens is unknown; give {given}"

    def within(self, model: nn.Module) -> Self:
        """Return the rule with the grid and the number of prefix tokens of the model where its fields are None."""
        bound = copy.copy(self)
        owner = None if None not in (self.grid_size, self.prefix_tokens) else _only_embedding_model(model)
        if owner is None:
            found: Any = dict(prefix_tokens=_class_tokens(model))
            object.__setattr__(bound, "grid_from_image", _receives_images(_embedding_of(model)))
        else:
            found = dict(grid_size=owner.patch_embed.grid_size, prefix_tokens=getattr(owner, "num_prefix_tokens", 0))
        for name, value in found.items():
            if getattr(self, name) is None:
                object.__setattr__(bound, name, value)
        return bound

    def attach(self, model: nn.Module) -> None:
        """Register the hooks that pass the grid of each image to the layers, unless the rule gives a grid."""
        if self.grid_size is not None:
            return
        owner = _only_embedding_model(model)
        if owner is None and any(isinstance(module, EditedAttention) for module in model.modules()):
            owner = model
        if owner is not None:
            _register_grid_hooks(owner)
        else:
            for module in model.modules():
                _remove_grid_hooks(module)
