"""Attention maps as the page stores them: every query of every head, in 256 levels per row, deflated."""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from isomorph.analysis.layer_attention import LayerCall, capture_attention
from isomorph.analysis.token_grid import TokenGrid, find_token_grid, image_grid
from isomorph.analysis.windows import Windows, attention_windows
from isomorph.errors import UserError
from isomorph.operations import AppliedAttention
from isomorph.surgery.where import Where

LEVELS = 255
MAX_EXACT_BYTES = 2**30
"""Limit of the memory for a model's maps before rounding; the differences of further layers are those of the page."""
MAX_MAP_CHARACTERS = 7_300_000
"""Default limit of the characters of all maps of a page."""


def first_stored_query(grid: tuple[int, int], step: tuple[int, int]) -> tuple[int, int]:
    """Return the row and column of the first stored query: the middle of the first block of step[0] x step[1]."""
    return min(step[0] // 2, grid[0] - 1), min(step[1] // 2, grid[1] - 1)


@dataclass(frozen=True)
class LayerMaps:
    """The attention maps of one layer, rounded to levels between the smallest and the largest value of each row.

    Keys are the prefix tokens, then the grid positions without padding; attention to padding is left out. In a layer
    with window attention, the keys of a query are those of its window.

    `exact` are the maps before rounding, where they are needed to compare two models.

    Shape: levels and exact (B, heads, queries, keys), ranges (B, heads, queries, 2)
    """

    name: str
    where: TokenGrid
    levels: np.ndarray = field(repr=False)
    ranges: np.ndarray = field(repr=False)
    windows: Windows | None = None
    exact: Tensor | None = field(default=None, repr=False)

    @property
    def keys(self) -> tuple[int, int]:
        """Rows and columns of the grid of keys, without padding."""
        (height, width), (ph, pw) = self.where.keys, self.where.padding
        return height - 2 * ph, width - 2 * pw

    @property
    def rounding(self) -> float:
        """The largest error of a rounded value."""
        return float((self.ranges[..., 1] - self.ranges[..., 0]).max()) / LEVELS / 2

    def query_at(self, y: float, x: float) -> tuple[int, int]:
        """Return the row and column of the query at a point, given as fractions of height and width."""
        rows, columns = self.where.queries
        return min(int(y * rows), rows - 1), min(int(x * columns), columns - 1)

    def maps_from(self, image: int, y: float, x: float) -> np.ndarray:
        """Return the map of every head from the query at a point, as in `query_at`. Shape: -> (heads, h, w)"""
        (rows, columns), (row, column) = self.where.queries, self.query_at(y, x)
        query = self.where.prefix + row * columns + column
        low, high = np.moveaxis(self.ranges[image][:, query, :, None], 1, 0)  # (heads, 1)
        values = low + self.levels[image][:, query, self.where.prefix :] * ((high - low) / LEVELS)
        if self.windows:
            keys = self.windows.keys_of(query).numpy()
            on_grid = np.zeros((len(values), rows * columns), values.dtype)
            on_grid[:, keys[keys >= 0]] = values[:, keys >= 0]
            values = on_grid
        return values.reshape(len(values), *self.keys)

    def stored_queries(self, step: tuple[int, int]) -> list[int]:
        """Return the stored queries: the prefix tokens, and the middle of every block of step[0] x step[1] queries."""
        (rows, columns), prefix = self.where.queries, self.where.prefix
        first = first_stored_query(self.where.queries, step)
        grid = np.arange(rows * columns).reshape(rows, columns)[first[0] :: step[0], first[1] :: step[1]]
        return [*range(prefix), *(prefix + grid.ravel()).tolist()]

    def pack(self, image: int, step: tuple[int, int] = (1, 1)) -> str:
        """Return the maps of one image as text: base64 of deflated ranges (float32, little-endian) and levels."""
        queries = self.stored_queries(step)
        ranges, levels = (array[image][:, queries] for array in (self.ranges, self.levels))
        return base64.b64encode(zlib.compress(ranges.astype("<f4").tobytes() + levels.tobytes(), 9)).decode()


def round_rows(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Round values to levels between the smallest (or 0) and the largest of each row; return levels and ranges.

    Shape: (..., keys) -> uint8 (..., keys), (..., 2)
    """
    low, high = maps.amin(-1).clamp(max=0), maps.amax(-1).clamp(min=0)
    scale = torch.where(high > low, high - low, 1)
    levels = ((maps - low[..., None]) / scale[..., None] * LEVELS).round().to(torch.uint8)
    return levels, torch.stack([low, high], -1)


def drop_padded_keys(maps: Tensor, where: TokenGrid) -> Tensor:
    """Return the maps without keys in the padding. Shape: (B, nh, Q, prefix + Nk) -> (B, nh, Q, prefix + H W)"""
    (height, width), (ph, pw) = where.keys, where.padding
    grid = maps[..., where.prefix :].unflatten(-1, where.keys)[..., ph : height - ph, pw : width - pw]
    return torch.cat([maps[..., : where.prefix], grid.flatten(-2)], dim=-1)


def largest_differences(a: LayerMaps | None, b: LayerMaps | None) -> list[list[float]] | None:
    """Return the largest difference of two layers' exact maps in every head that both have.

    None if the maps are not comparable, or not finite.

    Shape: -> (B, heads)
    """
    if a is None or b is None or a.exact is None or b.exact is None:
        return None
    if (a.where, a.keys) != (b.where, b.keys) or a.exact.shape[2:] != b.exact.shape[2:]:
        return None
    heads = min(a.exact.shape[1], b.exact.shape[1])
    differences = (a.exact[:, :heads] - b.exact[:, :heads]).abs().amax((2, 3))
    return differences.tolist() if bool(differences.isfinite().all()) else None


def capture_layer_maps(
    model: nn.Module, batch: Tensor, layers: Where | None = None, keep_exact: bool = False
) -> tuple[dict[str, LayerMaps], dict[str, str]]:
    """Return the maps of the attention layers for a batch of images, and for other layers why they have none.

    `keep_exact` also stores the maps before rounding, up to `MAX_EXACT_BYTES`.

    Shape: batch (B, C, H, W)
    Raises: UserError when `layers` is given and selects no layer with a map.
    """
    problems: dict[str, str] = {}
    grid, windows_of = image_grid(model, batch), attention_windows(model, batch)
    room = MAX_EXACT_BYTES * keep_exact

    def read_layer(frame: LayerCall, applied: AppliedAttention) -> LayerMaps | None:
        nonlocal room
        try:
            maps, windows = applied.map().float(), windows_of.get(frame.name)
            if windows and len(maps) == len(batch) * len(windows.members):
                where, maps = TokenGrid(windows.grid, windows.grid), windows.on_grid(maps)
            elif len(maps) != len(batch):
                raise UserError(f"it attends in {len(maps) // len(batch)} windows per image of unknown position")
            else:
                where = find_token_grid(frame.layer, *frame.args, shape=applied.shape, grid=grid, **frame.kwargs)
                maps, windows = drop_padded_keys(maps, where), None
        except UserError as error:
            problems[frame.name] = str(error)
            return None
        levels, ranges = round_rows(maps)
        room -= maps.nbytes
        exact = maps.cpu() if room >= 0 else None
        return LayerMaps(frame.name, where, levels.cpu().numpy(), ranges.cpu().numpy(), windows, exact)

    try:
        return capture_attention(model, batch, read_layer, "*" if layers is None else layers), problems
    except UserError:
        if layers is not None:
            raise
        return {}, problems


def pack_layer_maps(
    layers: Sequence[LayerMaps], images: int, max_characters: int = MAX_MAP_CHARACTERS
) -> tuple[tuple[int, int], dict[tuple[int, int], str]]:
    """Pack all maps into at most `max_characters`: every query, or every second row, then column, and so on.

    Returns the steps along rows and columns, and the text of every (layer, image).
    """
    step = (1, 1)
    while True:
        packed = {(i, b): layer.pack(b, step) for i, layer in enumerate(layers) for b in range(images)}
        thinnest = all(len(layer.stored_queries(step)) <= layer.where.prefix + 1 for layer in layers)
        if sum(map(len, packed.values())) <= max_characters or thinnest:
            return step, packed
        step = (step[0] + 1, step[1]) if step[0] == step[1] else (step[0], step[1] + 1)
