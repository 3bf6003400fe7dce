"""Attention maps for the page: every query of every head, in 256 levels a row, deflated."""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from isomorph.analysis.capture import Frame, observe
from isomorph.analysis.captured import Applied
from isomorph.analysis.token_grid import Places, image_grid, places
from isomorph.analysis.windows import Windows, attention_windows
from isomorph.errors import UserError
from isomorph.surgery.recast import Where

LEVELS = 255
MAX_MAP_CHARACTERS = 7_300_000
"""Characters that all maps of a page may take."""


def first_stored_query(grid: tuple[int, int], step: tuple[int, int]) -> tuple[int, int]:
    """The first row and column of queries that is kept: the middle of the first block."""
    return min(step[0] // 2, grid[0] - 1), min(step[1] // 2, grid[1] - 1)


@dataclass(frozen=True)
class LayerMaps:
    """The maps of one layer, rounded to levels between the smallest and the largest value of each row.

    Keys are the prefix tokens, then the places without padding; what attention gives to padding is left out.

    Of a layer that looks in windows, the keys of a query are those of its window.

    Shape: levels (B, heads, queries, keys), ranges (B, heads, queries, 2)
    """

    name: str
    where: Places
    levels: np.ndarray = field(repr=False)
    ranges: np.ndarray = field(repr=False)
    windows: Windows | None = None

    @property
    def keys(self) -> tuple[int, int]:
        """Rows and columns of the keys, without padding."""
        (height, width), (ph, pw) = self.where.keys, self.where.padding
        return height - 2 * ph, width - 2 * pw

    @property
    def rounding(self) -> float:
        """The largest difference to the map before rounding."""
        return float((self.ranges[..., 1] - self.ranges[..., 0]).max()) / LEVELS / 2

    def place_of(self, row: float, column: float) -> tuple[int, int]:
        """Row and column of the query at a place that is given as shares of height and width."""
        rows, columns = self.where.queries
        return min(int(row * rows), rows - 1), min(int(column * columns), columns - 1)

    def seen_from(self, image: int, row: float, column: float) -> np.ndarray:
        """What every head looks at from a place, given as shares of height and width. Shape: -> (heads, h, w)"""
        (rows, columns), (down, across) = self.where.queries, self.place_of(row, column)
        query = self.where.prefix + down * columns + across
        low, high = np.moveaxis(self.ranges[image][:, query, :, None], 1, 0)  # (heads, 1)
        values = low + self.levels[image][:, query, self.where.prefix :] * ((high - low) / LEVELS)
        if self.windows:
            keys = self.windows.keys_of(query).numpy()
            seen = np.zeros((len(values), rows * columns), values.dtype)
            seen[:, keys[keys >= 0]] = values[:, keys >= 0]
            values = seen
        return values.reshape(len(values), *self.keys)

    def kept(self, step: tuple[int, int]) -> list[int]:
        """Queries that are kept: the prefix tokens, and the middle of every block of step[0] x step[1] places."""
        (rows, columns), prefix = self.where.queries, self.where.prefix
        first = first_stored_query(self.where.queries, step)
        grid = np.arange(rows * columns).reshape(rows, columns)[first[0] :: step[0], first[1] :: step[1]]
        return [*range(prefix), *(prefix + grid.ravel()).tolist()]

    def packed(self, image: int, step: tuple[int, int] = (1, 1)) -> str:
        """The maps of one image as text: base64 of deflated ranges (float32, little-endian) and levels."""
        queries = self.kept(step)
        ranges, levels = (part[image][:, queries] for part in (self.ranges, self.levels))
        return base64.b64encode(zlib.compress(ranges.astype("<f4").tobytes() + levels.tobytes(), 9)).decode()


def round_rows(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Levels of the values between the smallest (or 0) and the largest of each row, and these.

    Shape: (..., keys) -> uint8 (..., keys), (..., 2)
    """
    low, high = maps.amin(-1).clamp(max=0), maps.amax(-1).clamp(min=0)
    scale = torch.where(high > low, high - low, 1)
    levels = ((maps - low[..., None]) / scale[..., None] * LEVELS).round().to(torch.uint8)
    return levels, torch.stack([low, high], -1)


def drop_padded_keys(maps: Tensor, where: Places) -> Tensor:
    """The maps without padded keys. Shape: (B, nh, Q, prefix + Nk) -> (B, nh, Q, prefix + H W)"""
    (height, width), (ph, pw) = where.keys, where.padding
    grid = maps[..., where.prefix :].unflatten(-1, where.keys)[..., ph : height - ph, pw : width - pw]
    return torch.cat([maps[..., : where.prefix], grid.flatten(-2)], dim=-1)


def capture_layer_maps(
    model: nn.Module, batch: Tensor, layers: Where | None = None
) -> tuple[dict[str, LayerMaps], dict[str, str]]:
    """The maps of the attention layers for a batch of images, by layer name; and why others are not drawn.

    Shape: batch (B, C, H, W)
    Raises: UserError when `layers` is given and selects none that has a map.
    """
    problems: dict[str, str] = {}
    grid, cut = image_grid(model, batch), attention_windows(model, batch)

    def look(frame: Frame, applied: Applied) -> LayerMaps | None:
        try:
            maps, windows = applied.map().float(), cut.get(frame.name)
            if windows and len(maps) == len(batch) * len(windows.members):
                where, maps = Places(windows.grid, windows.grid), windows.on_grid(maps)
            elif len(maps) != len(batch):
                raise UserError(f"it attends in {len(maps) // len(batch)} windows of each image")
            else:
                where = places(frame.layer, *frame.args, shape=applied.shape, grid=grid, **frame.kwargs)
                maps, windows = drop_padded_keys(maps, where), None
        except UserError as error:
            problems[frame.name] = str(error)
            return None
        levels, ranges = round_rows(maps)
        return LayerMaps(frame.name, where, levels.cpu().numpy(), ranges.cpu().numpy(), windows)

    try:
        return observe(model, batch, look, "*" if layers is None else layers), problems
    except UserError:
        if layers is not None:
            raise
        return {}, problems


def pack_layer_maps(
    layers: Sequence[LayerMaps], images: int, budget: int = MAX_MAP_CHARACTERS
) -> tuple[tuple[int, int], dict[tuple[int, int], str]]:
    """Packs all maps within a budget of characters: every query, or every second row, then column, and so on.

    Returns the steps along rows and columns, and the text of every (layer, image).
    """
    step = (1, 1)
    while True:
        packed = {(i, b): layer.packed(b, step) for i, layer in enumerate(layers) for b in range(images)}
        if sum(map(len, packed.values())) <= budget or all(len(m.kept(step)) <= m.where.prefix + 1 for m in layers):
            return step, packed
        step = (step[0] + 1, step[1]) if step[0] == step[1] else (step[0], step[1] + 1)
