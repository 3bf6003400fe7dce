"""Places of queries and keys in timm's layers whose tokens are not in the order of a grid: Hiera, Next-ViT, HaloNet.

Every function returns the (row, column) of queries and of keys, in steps of the keys, from a layer, the sizes that its
tokens may cover, and the numbers of queries and keys. Shape: -> (Nq, 2), (Nk, 2)
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from isomorph.layers.map_grid import GridSize, fit_grid, grid_places


def _mask_unit_places(count: int, units: GridSize) -> Tensor:
    """Return the places of `count` tokens in each mask unit of Hiera, in the order of its tokens.

    The places in a unit are numbered with four digits of two bits each, the finest first; the unit comes last.

    Shape: -> (count units, 2)
    Raises: ValueError if the units are not halved on both sides by every pooling.
    """
    levels = round(math.log(count, 4))
    if 4**levels != count:
        raise ValueError(f"mask units of {count} tokens are not squares whose side is a power of 2")
    places = grid_places(units) * 2**levels
    for level in reversed(range(levels)):
        places = (grid_places((2, 2))[:, None] * 2**level + places).flatten(0, 1)
    return places


def mask_unit_places(layer: Any, shapes: Sequence[GridSize], queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Return the places of the tokens of Hiera's attention, in one mask unit or in all of the image."""
    in_unit, pooled = layer.window_size, math.isqrt(layer.q_stride)
    units = (1, 1) if layer.use_mask_unit_attn else fit_grid(queries // in_unit, shapes)[0]
    places = _mask_unit_places(in_unit, units) * pooled + (pooled - 1) / 2  # a query is the maximum of pooled^2 tokens
    return places, _mask_unit_places(keys // math.prod(units), units)


def row_mean_places(layer: Any, shapes: Sequence[GridSize], queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Return the places of the tokens of Next-ViT's attention, whose keys are means of tokens in a row."""
    places = grid_places(fit_grid(queries, shapes)[0]) / layer.sr_ratio
    return places, places[: keys * layer.N_ratio].unflatten(0, (keys, -1)).mean(1)


def halo_places(layer: Any, _: Sequence[GridSize], queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Return the places of the tokens of HaloNet's attention, whose windows of keys reach beyond those of queries."""
    block, window = (math.isqrt(count) for count in (queries, keys))
    return grid_places((block, block)) * layer.block_stride, grid_places((window, window)) - layer.halo_size
