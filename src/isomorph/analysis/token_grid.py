"""Grid positions of the queries and keys of an attention layer, for measuring and drawing its maps."""

import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.analysis.batches import images_of
from isomorph.analysis.layer_attention import LayerCall
from isomorph.errors import UserError
from isomorph.layers.gated.tap_heads import TapHeads
from isomorph.layers.grid import axis_offsets, fit_grid
from isomorph.surgery.attention_layers import facts_of, position_reason
from isomorph.surgery.calls import Inputs
from isomorph.surgery.edited_attention import EditedAttention, own_shapes
from isomorph.surgery.site import embedding_models


class TokenGrid(NamedTuple):
    """Grids of queries and keys (with padding), in steps of the key grid; `prefix` tokens have no grid position."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    start: tuple[float, float] = (0, 0)
    stride: tuple[float, float] = (1, 1)
    prefix: int = 0

    def distances(self, device: torch.device | None = None) -> Tensor:
        """Return the distance between every query and every key. Shape: -> (Nq, Nk)"""
        rows, columns = (
            axis_offsets(*axis, device=device).square()
            for axis in zip(self.queries, self.keys, self.start, self.stride, strict=True)
        )
        squared = rows[:, None, :, None] + columns[None, :, None, :]  # (Hq, Wq, Hk, Wk)
        return squared.sqrt().flatten(2).flatten(0, 1)

    def query_at(self, position: tuple[float, float]) -> int:
        """Return the index of the query at fractions of height and width, from 0 to 1."""
        row, column = (min(int(part * size), size - 1) for part, size in zip(position, self.queries, strict=True))
        return self.prefix + row * self.queries[1] + column

    def on_map(self, attention: Tensor) -> Tensor:
        """Return attention on the grid of unpadded keys. Shape: (..., prefix + Nk) -> (..., H, W)"""
        attention = attention[..., self.prefix :].unflatten(-1, self.keys)
        (ph, pw), (Hk, Wk) = self.padding, self.keys
        return attention[..., ph : Hk - ph, pw : Wk - pw]


def image_grid(model: nn.Module, batch: Inputs) -> tuple[int, int] | None:
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
    padded = not isinstance(patches.padding, str) and any(patches.padding)  # "same" does not pad a kernel of 1
    if padded:
        return None
    H, W = ((n - k) // s + 1 for n, k, s in zip(size, patches.kernel_size, patches.stride, strict=True))
    return H, W


def _given_grid(patches: Tensor, batch: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the grid that all images have, if it is given and has as many positions as there are patches."""
    for value in batch.values():
        if not isinstance(value, Tensor) or value.is_floating_point() or tuple(value.shape) != (len(patches), 2):
            continue
        rows, columns = value[0].tolist()
        if bool((value == value[0]).all()) and rows * columns == patches.shape[1]:
            return rows, columns
    return None


def find_token_grid(call: LayerCall, shape: tuple[int, int] | None, grid: tuple[int, int] | None) -> TokenGrid:
    """Return the grid of the queries and keys of a call; tokens without another are read row by row from its map.

    `shape` is that of the layer's maps (queries, keys), `grid` that of the image's patches.

    Raises: UserError if the grid is not known, or the tokens do not fill it.
    """
    layer: Any = call.layer
    x, *args = call.args
    if isinstance(layer, TapHeads):
        H, W = (n + 2 * p for n, p in zip(x.shape[-2:], layer.padding, strict=True))
        middle = layer.kernel_size // 2
        return TokenGrid(layer.query_grid(*x.shape[-2:]), (H, W), layer.padding, (middle, middle), layer.stride)
    edited = isinstance(layer, EditedAttention)
    names = layer.argument_names if edited else inspect.signature(layer.forward).parameters
    given = dict(zip(names, (x, *args), strict=False)) | call.kwargs
    if shape is not None and shape[0] != shape[1]:
        return _pooled_grid(layer, given, *shape, grid)
    own, on_map = own_shapes(layer, given), x.ndim == 4
    queries = shape[0] if shape else math.prod(own[0]) if on_map else x.shape[1]
    known = [size for size in own if math.prod(size) == queries]
    if not on_map:
        called = None if edited else given.get("grid_size")
        around = [size for size in (call.map_shape[2:], call.map_shape[1:3]) if math.prod(size) == queries > 1]
        known += [size for size in (called, *around, grid, getattr(layer, "grid_size", None)) if size]  # type: ignore[misc]
    if not known:
        name = type(layer).__name__
        unread = "set the attribute grid_size = (rows, columns) of the layer"
        reason = f"{queries} queries do not fill the feature map" if on_map else unread
        raise UserError(f"the grid of the tokens of {name} is unknown: {reason}")
    H, W = known[0]
    prefix = queries - H * W
    if prefix < 0:
        raise UserError(f"{queries} queries do not fill the {H} x {W} grid of the patches")
    return TokenGrid((H, W), (H, W), prefix=prefix)


def _pooled_grid(layer: Any, given: dict[str, Any], queries: int, keys: int, grid: tuple[int, int] | None) -> TokenGrid:
    shapes = own_shapes(layer, given) + ([grid] if grid else [])
    problem = f"{type(layer).__name__} has {queries} queries and {keys} keys, which have no common grid"
    if not shapes or facts_of(layer) is None or position_reason(layer):
        raise UserError(problem)
    try:
        (Hq, Wq), prefix = fit_grid(queries, shapes)
        (Hk, Wk), before_keys = fit_grid(keys, [(Hq, Wq)], prefix)
    except ValueError:
        raise UserError(problem) from None
    if prefix != before_keys:
        raise UserError(problem)
    stride = (Hk / Hq, Wk / Wq)
    return TokenGrid((Hq, Wq), (Hk, Wk), start=tuple((s - 1) / 2 for s in stride), stride=stride, prefix=prefix)  # type: ignore[arg-type]
