"""The grid of the queries or keys of an attention map, found from their number and the size of the image or window."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isomorph.layers.shapes import known_true

GridSize = tuple[int, int]


def fit_grid(count: int, shapes: Sequence[GridSize], prefix: int = 0) -> tuple[GridSize, int]:
    """Return the grid (H, W) of `count` tokens, and the number of tokens before it: `prefix`, or else none or one.

    `shapes` are sizes of windows, feature maps or an image, one of which the tokens cover evenly. A shape with as many
    positions is the grid; otherwise the grid has the sides of the first possible shape, scaled, to within one position.
    Without shapes it is a square.

    Raises: ValueError if there is no such grid.

    >>> fit_grid(50, [(224, 224)], prefix=1)
    ((7, 7), 1)
    >>> fit_grid(60, [(7, 7), (96, 160)])
    ((6, 10), 0)
    """
    if not isinstance(count, int) and shapes:  # a size that an export leaves open
        return shapes[0], prefix
    leads = list(dict.fromkeys((prefix, 0, 1)))
    for shape, lead in itertools.product(shapes, leads):
        if known_true(shape[0] * shape[1] == count - lead):
            return shape, lead
    for shape, lead in itertools.product(shapes or [(1, 1)], leads):
        if grid := _proportional_grid(count - lead, shape):
            return grid, lead
    sizes = " or ".join(f"{H} x {W}" for H, W in shapes)
    raise ValueError(
        f"{count} tokens do not fill a {'square grid' if not shapes else f'grid of the proportions of {sizes}'}; "
        "give grid_size=(height, width)"
    )


def _proportional_grid(count: int, shape: GridSize) -> GridSize | None:
    """Return the H x W grid of `count` positions whose sides are those of `shape` scaled, to within one, or None."""
    if count < 1:
        return None
    step = math.sqrt(shape[0] * shape[1] / count)
    ideal = (shape[0] / step, shape[1] / step)
    pairs = [(n, count // n) for n in range(max(1, int(ideal[0]) - 1), int(ideal[0]) + 3) if count % n == 0]
    fitting = [pair for pair in pairs if all(abs(a - b) <= 1 for a, b in zip(pair, ideal, strict=True))]
    return min(fitting, key=lambda pair: abs(pair[0] - ideal[0]), default=None)


def key_offsets(queries: int, keys: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the offsets key - query along one axis of two grids on the same image, in steps of the key grid.

    The middles of the areas that query and key stand for are compared: with equal grids, key i is at offset 0 of
    query i.

    Shape: -> (queries, keys)
    """
    steps = keys / queries
    middles = (torch.arange(queries, device=device, dtype=dtype) + 0.5) * steps - 0.5
    return torch.arange(keys, device=device, dtype=dtype) - middles[:, None]


def grid_places(grid_size: GridSize) -> Tensor:
    """Return the (row, column) of every position of a grid, row by row. Shape: -> (H W, 2)"""
    H, W = grid_size
    return torch.cartesian_prod(torch.arange(float(H)), torch.arange(float(W)))
