"""Hooks that pass the grid of the tokens to layers of a ViT, which receive tokens instead of the image.

The grid is a property of the call: threads may share a model, and run it on images of several sizes at the same time.

- When a model embeds an image, the grid is stored for this thread, and passed to the layers that it calls next. A layer
  that is called alone before any image, or under a compiler, uses its attribute `grid_size`.
- Gradient checkpointing runs blocks again during the backward pass, in any order and perhaps in another thread. So the
  storage of the tokens that enter a block is marked with their grid, and a block that runs again reads the mark.
"""

import threading
from typing import Any, ClassVar

import torch
from timm.layers import Attention
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import SpatialAttention, ViTGPSA, ViTPositionalAttention, ViTRelativeAttention
from isomorph.layers.grid import GridSize
from isomorph.surgery.attention_layers import attention_facts
from isomorph.surgery.edited_attention import AlteredAttention
from isomorph.surgery.modules import parent_name
from isomorph.surgery.rule import Rule, check_grid
from isomorph.surgery.site import Site, TokenGrid, embedding_of, only_embedding_model

# Layers that need the grid positions of their tokens.
GRID_LAYERS = (
    SpatialAttention,
    ViTGPSA,
    ViTPositionalAttention,
    ViTRelativeAttention,
    AlteredAttention,
)


class _Grids:
    """The grids of the images that a model runs on, and the hooks that pass them on."""

    reattached: ClassVar[bool] = True

    def __init__(self) -> None:
        self.grids: dict[GridSize, None] = {}  # an ordered set
        self.traced: GridSize | None = None  # under a compiler, which sees no thread
        # its `image`: the grid of the last one, and the backward pass or -1
        self.thread = threading.local()

    def __reduce__(self) -> Any:
        return _Grids, ()

    def before_embedding(
        self, embedding: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Set the grid of the image; without a patch embedding its size stands for the grid."""
        if kwargs.get("patch_coord") is not None:
            raise UserError(
                "patches with coordinates have a grid for each image; give images (B, C, H, W)"
            )
        image = args[0] if args else next(iter(kwargs.values()))
        if image.ndim != 4:  # tokens: the model is a part of another
            return
        height, width = image.shape[-2:]
        embeds = hasattr(embedding, "dynamic_feat_size")
        grid = embedding.dynamic_feat_size((height, width)) if embeds else (height, width)
        if torch.compiler.is_compiling():
            self.traced = grid
        else:
            self.grids.setdefault(grid)
            self.thread.image = grid, _backward_pass()

    def before_block(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Mark the tokens that enter a block with the grid of the image."""
        if not torch.compiler.is_compiling():
            self.of_tokens(args[0] if args else kwargs.get("x"))

    def before_layer(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass the grid of the image to a layer as its argument `grid_size`."""
        if kwargs.get("grid_size"):
            return None
        if torch.compiler.is_compiling():
            grid = self.traced
        else:
            tokens = args[0] if args else next(iter(kwargs.values()))
            grid = self.of_tokens(tokens) or self.of_token_count(layer, tokens)
            layer.grid_size = grid or layer.grid_size
        return args, {**kwargs, "grid_size": grid or layer.grid_size}

    def of_tokens(self, tokens: Any) -> GridSize | None:
        """Return the grid of the last image of this thread and this forward or backward pass, or of the tokens' mark.

        The mark, of a block that a backward pass computes again, holds for the next blocks of the same checkpoint.
        """
        backward_pass = _backward_pass()
        storage = _storage_of(tokens)
        mark = getattr(storage, "isomorph_grid", None)
        if backward_pass != -1 and mark:
            self.thread.image = mark, backward_pass
        grid, begun_in = getattr(self.thread, "image", (None, backward_pass))
        if grid is None or begun_in != backward_pass:
            return None
        if storage is not None:
            storage.isomorph_grid = grid
        return grid

    def of_token_count(self, layer: Any, tokens: Tensor) -> GridSize | None:
        """Return, in a backward pass, the only grid seen with as many tokens, for those that hooks have replaced."""
        if _backward_pass() == -1:
            return None
        count = tokens.shape[1] - layer.prefix_tokens
        fitting = [grid for grid in tuple(self.grids) if grid[0] * grid[1] == count]
        if len(fitting) > 1:
            sizes = ", ".join(f"{H} x {W}" for H, W in fitting)
            raise UserError(
                f"{count} tokens recomputed in the backward pass may have the grids {sizes}; checkpoint without hooks "
                "on saved tensors, or call backward before the model runs on another size"
            )
        return fitting[0] if fitting else None


def _backward_pass() -> int:
    # private, and the only way to know; torch.utils.checkpoint uses it too
    return torch._C._current_graph_task_id()


def _storage_of(tokens: Any) -> Any:
    """Return the storage of tokens, whose attributes live as long as it does, or None if it has none, as in vmap."""
    if not isinstance(tokens, Tensor):
        return None
    try:
        return tokens.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _remove_grid_hooks(model: nn.Module) -> None:
    """Remove all hooks of `_Grids` from a model, those of its original too."""
    # torch removes hooks by their handles only, and a copied model has none: the private dicts have to do
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), _Grids):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _register_grid_hooks(model: Any) -> None:
    """Register hooks that pass the grid of every image to the layers that need it."""
    named = dict(model.named_modules(remove_duplicate=False))
    layers = [name for name, module in named.items() if isinstance(module, GRID_LAYERS)]
    if not layers:
        return
    grids = _Grids()
    embedding = embedding_of(model)
    if embedding is not None:
        embedding.register_forward_pre_hook(grids.before_embedding, with_kwargs=True)
    blocks: set[nn.Module] = set()
    for name in layers:
        while "." in name:
            name = parent_name(name)
            blocks.add(named[name])
    for module in blocks:
        module.register_forward_pre_hook(grids.before_block, with_kwargs=True)
    for layer in {named[name] for name in layers}:
        layer.register_forward_pre_hook(grids.before_layer, with_kwargs=True)


class GridRule(Rule):
    """A rule for attention that needs the grid of its tokens, from its fields `grid_size` and `prefix_tokens`.

    Where they are None, the model says them. A model without a patch embedding may still receive images in its first
    layer with weights: an edit of the map then finds the grid from the size of the image at each call.
    """

    grid_size: GridSize | None
    prefix_tokens: int | None

    def check_grid_fields(self) -> None:
        """Check the grid, and make a list of JSON a tuple. Raises: UserError for an impossible value."""
        check_grid(self.grid_size, self.prefix_tokens)
        if self.grid_size is not None:
            object.__setattr__(self, "grid_size", tuple(self.grid_size))

    def grid_at(self, site: Site) -> TokenGrid:
        """Return the grid of the tokens: the rule's fields, and the model's where they are None."""
        if self.grid_size is not None and self.prefix_tokens is not None:
            return TokenGrid(self.grid_size, self.prefix_tokens)
        grid = site.grid
        if self.grid_size is not None:
            grid = grid._replace(size=self.grid_size)
        if self.prefix_tokens is not None:
            grid = grid._replace(prefix_tokens=self.prefix_tokens)
        return grid

    def grid_reason(self, site: Site) -> str | None:
        """Return that the grid of the tokens is unknown and what to give, or None if it is known."""
        grid = self.grid_at(site)
        if grid.size is not None and grid.prefix_tokens is not None:
            return None
        call = f"{type(self).__name__} grid_size=(height, width) and prefix_tokens"
        return f"the grid of its tokens is unknown; give {call}"

    def connect(self, site: Site) -> None:
        """Register the hooks that pass the grid of each image to the layers, unless the rule gives a grid."""
        if self.grid_size is None:
            site.once(_pass_grids)


class AnyAttentionRule(GridRule):
    """A rule for attention of any class, which it knows by its operations."""

    @classmethod
    def is_of_kind(cls, module: nn.Module) -> bool:
        """Return True for attention of any class: with a map that can be edited, or known to have none."""
        if isinstance(module, Attention | AlteredAttention):
            return True
        return attention_facts(type(module)) is not None

    @classmethod
    def kind_names(cls) -> list[str]:
        """Return what the rule recasts, as messages name it."""
        return ["attention"]


def _pass_grids(model: nn.Module) -> None:
    """Renew the hooks that pass grids on, after an edit."""
    _remove_grid_hooks(model)
    owner = only_embedding_model(model)
    if owner is None and any(isinstance(module, AlteredAttention) for module in model.modules()):
        owner = model
    if owner is not None:
        _register_grid_hooks(owner)
