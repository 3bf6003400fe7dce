"""Grid positions of the queries and keys of an attention layer, for measuring and drawing its maps."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.analysis.batches import images_of
from isomorph.analysis.layer_attention import LayerCall
from isomorph.errors import UserError
from isomorph.layers.gated.positions import image_axis
from isomorph.layers.gated.tap_heads import TapHeads
from isomorph.layers.grid import GridSize, axis_offsets, fit_grid
from isomorph.surgery.attention_layers import facts_of, position_reason
from isomorph.surgery.calls import Inputs
from isomorph.surgery.edited_attention import EditedAttention, own_shapes
from isomorph.surgery.site import embedding_models


class AttentionGrid(NamedTuple):
    """Grids of queries and keys (with padding), in steps of the key grid; `prefix` tokens have no grid position."""

    queries: GridSize
    keys: GridSize
    padding: GridSize = (0, 0)
    start: tuple[float, float] = (0, 0)
    stride: tuple[float, float] = (1, 1)
    prefix: int = 0

    def distances(self, device: torch.device | None = None) -> Tensor:
        """Return the distance between every query and every key. Shape: -> (Nq, Nk)"""
        axes = zip(self.queries, self.keys, self.start, self.stride, strict=True)
        rows, columns = (axis_offsets(*axis, device=device).square() for axis in axes)
        squared = rows[:, None, :, None] + columns[None, :, None, :]  # (Hq, Wq, Hk, Wk)
        return squared.sqrt().flatten(2).flatten(0, 1)

    def query_at(self, position: tuple[float, float]) -> int:
        """Return the index of the query at fractions of height and width, from 0 to 1."""
        H, W = self.queries
        row = min(int(position[0] * H), H - 1)
        column = min(int(position[1] * W), W - 1)
        return self.prefix + row * W + column

    def on_map(self, attention: Tensor) -> Tensor:
        """Return attention on the grid of unpadded keys. Shape: (..., prefix + Nk) -> (..., H, W)"""
        attention = attention[..., self.prefix :].unflatten(-1, self.keys)
        ph, pw = self.padding
        Hk, Wk = self.keys
        return attention[..., ph : Hk - ph, pw : Wk - pw]


def image_grid(model: nn.Module, batch: Inputs) -> GridSize | None:
    """Return the grid of patches that the model makes of these images, by its first convolution if need be, or None.

    Images that are patches already, (B, N, C), come with their grids, whole numbers (B, 2).
    """
    images = images_of(batch)
    if images.ndim == 3 and not isinstance(batch, Tensor):
        return _given_grid(images, batch)
    size = tuple(images.shape[-2:])
    owners = embedding_models(model)
    if len(owners) == 1:
        return owners[0].patch_embed.dynamic_feat_size(size)
    patches = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if patches is None or patches.kernel_size != patches.stride:
        return None
    # "same" does not pad a kernel of 1
    if not isinstance(patches.padding, str) and any(patches.padding):
        return None
    h, w = patches.stride
    return size[0] // h, size[1] // w


def _given_grid(patches: Tensor, batch: Mapping[str, Any]) -> GridSize | None:
    """Return the grid that all images have, if it is given and has as many positions as there are patches."""
    for value in batch.values():
        if (
            not isinstance(value, Tensor)
            or value.is_floating_point()
            or tuple(value.shape) != (len(patches), 2)
        ):
            continue
        rows, columns = value[0].tolist()
        if bool((value == value[0]).all()) and rows * columns == patches.shape[1]:
            return rows, columns
    return None


def find_token_grid(
    call: LayerCall,
    shape: tuple[int, int] | None,
    grid: GridSize | None,
) -> AttentionGrid:
    """Return the grid of the queries and keys of a call; tokens without another are read row by row from its map.

    `shape` is that of the layer's maps (queries, keys), `grid` that of the image's patches.

    Raises: UserError if the grid is not known, or the tokens do not fill it.
    """
    layer: Any = call.layer
    x = call.args[0]
    if isinstance(layer, TapHeads):
        return _tap_grid(layer, *x.shape[-2:])
    reason = position_reason(layer)
    # a grid that the layer has, or a map around it, says more than its configuration
    has_map = x.ndim == 3 and bool(_sides_around(call, x.shape[1]))
    if reason and not has_map and not getattr(layer, "grid_size", None):
        raise UserError(reason)
    edited = isinstance(layer, EditedAttention)
    names = layer.argument_names if edited else inspect.signature(layer.forward).parameters
    arguments = dict(zip(names, call.args, strict=False)) | call.kwargs
    window_sizes = own_shapes(layer, arguments)
    if shape is not None and shape[0] != shape[1]:
        return _pooled_grid(layer, [*window_sizes, *filter(None, [grid])], *shape)
    on_map = x.ndim == 4
    queries = x.shape[1]
    if shape is not None:
        queries = shape[0]
    elif on_map:
        queries = math.prod(window_sizes[0])
    candidates: list[Any] = [size for size in window_sizes if math.prod(size) == queries]
    if not on_map:
        called = None if edited else arguments.get("grid_size")
        others = [called, *_sides_around(call, queries), grid, getattr(layer, "grid_size", None)]
        candidates += [size for size in others if size]
    if not candidates:
        reason = "set the attribute grid_size = (rows, columns) of the layer"
        if on_map:
            reason = f"{queries} queries do not fill the feature map"
        raise UserError(f"the grid of the tokens of {type(layer).__name__} is unknown: {reason}")
    H, W = candidates[0]
    prefix = queries - H * W
    if prefix < 0:
        raise UserError(f"{queries} queries do not fill the {H} x {W} grid of the patches")
    return AttentionGrid((H, W), (H, W), prefix=prefix)


def _tap_grid(layer: TapHeads, H: int, W: int) -> AttentionGrid:
    middle = layer.kernel_size // 2
    return AttentionGrid(
        queries=layer.query_grid(H, W),
        keys=layer.key_grid(H, W),
        padding=layer.padding,
        start=(middle, middle),
        stride=layer.stride,
    )


def _sides_around(call: LayerCall, queries: int) -> list[tuple[int, ...]]:
    """Return the sides of the map around a call, channels first or last, if it has as many positions as queries."""
    if queries <= 1:
        return []
    sides = (call.map_shape[2:], call.map_shape[1:3])
    return [size for size in sides if math.prod(size) == queries]


def _pooled_grid(layer: Any, shapes: Sequence[GridSize], queries: int, keys: int) -> AttentionGrid:
    """Return the grid of queries and of pooled keys, with the sides of one of the shapes."""
    problem = (
        f"{type(layer).__name__} has {queries} queries and {keys} keys, which have no common grid"
    )
    if not shapes or facts_of(layer) is None or position_reason(layer):
        raise UserError(problem)
    try:
        (Hq, Wq), prefix = fit_grid(queries, shapes)
        (Hk, Wk), before_keys = fit_grid(keys, [(Hq, Wq)], prefix)
    except ValueError:
        raise UserError(problem) from None
    if prefix != before_keys:
        raise UserError(problem)
    rows = image_axis(Hq, Hk)
    columns = image_axis(Wq, Wk)
    return AttentionGrid(
        queries=(Hq, Wq),
        keys=(Hk, Wk),
        start=(rows.start, columns.start),
        stride=(rows.stride, columns.stride),
        prefix=prefix,
    )
