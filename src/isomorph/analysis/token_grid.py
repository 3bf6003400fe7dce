"""Grid positions of the queries and keys of an attention layer, for measuring and drawing its maps."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import GPSA, PSA, PositionalAttention, SpatialAttention, ViTRelativeAttention
from isomorph.layers.gated.tap_heads import TapHeads
from isomorph.layers.gated.token_heads import ViTCall
from isomorph.layers.grid import axis_offsets
from isomorph.layers.map_grid import fit_grid
from isomorph.surgery.attention_layers import facts_of, position_reason
from isomorph.surgery.edited_attention import SIZE_NAMES, own_shapes
from isomorph.surgery.grid_hooks import embedding_models


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
        """Return the attention of one query on the grid of the unpadded keys.

        Shape: attention (B, nh, prefix + Nk) -> (B, nh, H, W)
        """
        attention = attention[..., self.prefix :].unflatten(-1, self.keys)
        (ph, pw), (Hk, Wk) = self.padding, self.keys
        return attention[..., ph : Hk - ph, pw : Wk - pw]


def image_grid(model: nn.Module, batch: Tensor) -> tuple[int, int] | None:
    """Return the grid of patches that the model makes of these images, or None."""
    size, owners = tuple(batch.shape[-2:]), embedding_models(model)
    if len(owners) == 1:
        return owners[0].patch_embed.dynamic_feat_size(size)
    convs = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    patches = next(convs, None) if hasattr(getattr(model, "config", None), "patch_size") else None  # of transformers
    if patches is None:
        return None
    H, W = ((n - k) // s + 1 for n, k, s in zip(size, patches.kernel_size, patches.stride, strict=True))
    return H, W


def _called_grid(layer: Any, *args: Any, grid_size: Any = None, **kwargs: Any) -> tuple[int, int] | None:
    """Return the grid that is an argument of the layer's call, or None."""
    if isinstance(layer, SpatialAttention | ViTCall | ViTRelativeAttention):
        return grid_size  # the second argument is a mask
    return grid_size or next(iter(args), None) if isinstance(layer, GPSA | PositionalAttention | PSA) else None


def _map_grid(layer: Any, x: Tensor, queries: int | None = None) -> tuple[int, int] | None:
    """Return the grid of a layer whose input is a feature map, or None: the two axes that the queries fill.

    Shape: x (B, C, H, W) or (B, H, W, C)
    """
    if x.ndim != 4:
        return None
    convolves = any(isinstance(module, nn.Conv2d) for module in layer.modules())
    last, first = (x.shape[2], x.shape[3]), (x.shape[1], x.shape[2])
    likely, other = (last, first) if convolves else (first, last)
    return other if other[0] * other[1] == queries != likely[0] * likely[1] else likely


def _window_grid(layer: Any, x: Tensor) -> tuple[int, int] | None:
    """Return the grid of a layer whose input is the tokens of windows, as in Swin, or None. Shape: x (windows, N, C)"""
    size: Any = getattr(layer, "window_size", None)
    pair = isinstance(size, tuple | list) and len(size) == 2
    return (size[0], size[1]) if pair and x.ndim == 3 and size[0] * size[1] == x.shape[1] else None


def _size_argument(given: dict[str, Any], shape: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the size of the feature map among the arguments of a call, as in PVT, if the queries fill it, or None."""
    sizes = [given.get(name) for name in SIZE_NAMES]
    fitting = (size for size in sizes if isinstance(size, tuple | list) and len(size) == 2)
    found = next(((size[0], size[1]) for size in fitting), None)
    return found if found and shape and found[0] * found[1] == shape[0] else None


def find_token_grid(
    layer: Any,
    x: Tensor,
    *args: Any,
    shape: tuple[int, int] | None = None,
    grid: tuple[int, int] | None = None,
    **kwargs: Any,
) -> TokenGrid:
    """Return the grid of a layer's queries and keys, for its inputs.

    It is known for GPSA2d, pruned or not, if queries and keys are the same tokens, of patches, a feature map or
    windows, and if the keys are pooled on a coarser grid, as in PVT and MViT.
    `shape` is that of the layer's maps (queries, keys), `grid` that of the image's patches.

    Raises: UserError if the grid is not known, or the tokens do not fill it.
    """
    if isinstance(layer, TapHeads):
        padded = [n + 2 * p for n, p in zip(x.shape[-2:], layer.padding, strict=True)]
        middle = layer.kernel_size // 2
        return TokenGrid(
            layer.query_grid(*x.shape[-2:]), (padded[0], padded[1]), layer.padding, (middle, middle), layer.stride
        )
    given = dict(zip(inspect.signature(layer.forward).parameters, (x, *args), strict=False)) | kwargs
    if shape is not None and shape[0] != shape[1]:
        return _pooled_grid(layer, given, *shape, grid)
    own = _map_grid(layer, x, shape and shape[0]) or _window_grid(layer, x) or _size_argument(given, shape)
    size = own or _called_grid(layer, *args, **kwargs) or grid or getattr(layer, "grid_size", None)
    if size is None:
        raise UserError(f"the grid of the tokens of {type(layer).__name__} is unknown: the model embeds no patches")
    H, W = size
    tokens = H * W if own else int(x.shape[1])
    queries = tokens if shape is None else shape[0]
    prefix = queries - H * W
    if prefix < 0 or (own and prefix):
        raise UserError(f"{queries} queries do not fill the {H} x {W} grid of {'the layer' if own else 'the patches'}")
    return TokenGrid((H, W), (H, W), prefix=prefix)


def _pooled_grid(layer: Any, given: dict[str, Any], queries: int, keys: int, grid: tuple[int, int] | None) -> TokenGrid:
    """Return the grids of queries and of pooled keys on the same image. Raises: UserError if they are not known."""
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
