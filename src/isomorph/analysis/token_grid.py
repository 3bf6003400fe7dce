"""Where the queries and keys of an attention layer lie, so that its map can be measured and drawn."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import GPSA, PSA, GPSA2d, SpatialAttention, ViTGPSA
from isomorph.layers.grid import axis_offsets
from isomorph.surgery.grid_hooks import embedding_models


class TokenGrid(NamedTuple):
    """Grids of queries and keys, padded ones among them, in steps of the key grid; `prefix` tokens have no place."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    start: tuple[int, int] = (0, 0)
    stride: tuple[int, int] = (1, 1)
    prefix: int = 0

    def distances(self, device: torch.device | None = None) -> Tensor:
        """|delta| between every query and every key. Shape: -> (Nq, Nk)"""
        rows, columns = (
            axis_offsets(*axis, device=device).square()
            for axis in zip(self.queries, self.keys, self.start, self.stride, strict=True)
        )
        squared = rows[:, None, :, None] + columns[None, :, None, :]  # (Hq, Wq, Hk, Wk)
        return squared.sqrt().flatten(2).flatten(0, 1)

    def picture(self, maps: Tensor, share: tuple[float, float]) -> Tensor:
        """What one place, given as shares of height and width, looks at on the unpadded keys.

        Shape: maps (B, nh, prefix + Nq, prefix + Nk) -> (B, nh, H, W)
        """
        row, column = (min(int(part * size), size - 1) for part, size in zip(share, self.queries, strict=True))
        seen = maps[:, :, self.prefix + row * self.queries[1] + column, self.prefix :].unflatten(-1, self.keys)
        (ph, pw), (Hk, Wk) = self.padding, self.keys
        return seen[..., ph : Hk - ph, pw : Wk - pw]


def image_grid(model: nn.Module, batch: Tensor) -> tuple[int, int] | None:
    """The grid of patches that the model makes of these images, where it makes one."""
    owners = embedding_models(model)
    return owners[0].patch_embed.dynamic_feat_size(tuple(batch.shape[-2:])) if len(owners) == 1 else None


def _called_grid(layer: Any, *args: Any, grid_size: Any = None, **kwargs: Any) -> tuple[int, int] | None:
    """The grid that a call of a layer with positions names itself."""
    if isinstance(layer, SpatialAttention | ViTGPSA):
        return grid_size  # their second argument is a mask
    return grid_size or next(iter(args), None) if isinstance(layer, GPSA | PSA) else None


def _map_grid(layer: Any, x: Tensor, queries: int | None = None) -> tuple[int, int] | None:
    """The grid of a layer that is called with a map: the axes that the queries fill, or of (B, H, W, C).

    Shape: x (B, C, H, W) or (B, H, W, C)
    """
    if x.ndim != 4:
        return None
    convolves = any(isinstance(module, nn.Conv2d) for module in layer.modules())
    last, first = (x.shape[2], x.shape[3]), (x.shape[1], x.shape[2])
    likely, other = (last, first) if convolves else (first, last)
    return other if other[0] * other[1] == queries != likely[0] * likely[1] else likely


def _window_grid(layer: Any, x: Tensor) -> tuple[int, int] | None:
    """The grid of a layer that is called with the tokens of windows, as Swin's are. Shape: x (windows, N, C)"""
    size: Any = getattr(layer, "window_size", None)
    pair = isinstance(size, tuple | list) and len(size) == 2
    return (size[0], size[1]) if pair and x.ndim == 3 and size[0] * size[1] == x.shape[1] else None


def find_token_grid(
    layer: Any,
    x: Tensor,
    *args: Any,
    shape: tuple[int, int] | None = None,
    grid: tuple[int, int] | None = None,
    **kwargs: Any,
) -> TokenGrid:
    """Places of a layer that is called with x and more; `grid` is that of the image's patches, `shape` of its maps.

    Known where queries and keys are the same tokens: of the image's patches, of a map, of windows; and of GPSA2d.

    Raises: UserError when the grid of the tokens is not known, or they do not fill it.
    """
    if isinstance(layer, GPSA2d):
        size = [n + 2 * p for n, p in zip(x.shape[-2:], layer.padding, strict=True)]
        middle = layer.kernel_size // 2
        return TokenGrid(
            layer.query_grid(*x.shape[-2:]), (size[0], size[1]), layer.padding, (middle, middle), layer.stride
        )
    own = _map_grid(layer, x, shape and shape[0]) or _window_grid(layer, x)
    found = own or _called_grid(layer, *args, **kwargs) or grid or getattr(layer, "grid_size", None)
    if found is None:
        raise UserError(f"the grid of the tokens of {type(layer).__name__} is unknown: the model embeds no patches")
    H, W = found
    tokens = H * W if own else int(x.shape[1])
    queries, keys = (tokens, tokens) if shape is None else shape
    prefix = queries - H * W
    if prefix < 0 or (own and prefix):
        raise UserError(f"{queries} queries do not fill the {H} x {W} grid of {'the layer' if own else 'the patches'}")
    if queries != keys:
        raise UserError(f"{type(layer).__name__} has {queries} queries and {keys} keys: they lie on no common grid")
    return TokenGrid((H, W), (H, W), prefix=prefix)
