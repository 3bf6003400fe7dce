"""The attention viewer, where pointing at a patch shows what every head attends to: its maps, rounded and packed."""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isomorph.analysis.batches import count_images, some_images
from isomorph.analysis.layer_attention import LayerCall, capture_attention
from isomorph.analysis.token_grid import TokenGrid, find_token_grid, image_grid
from isomorph.analysis.windows import WindowMembers, attention_windows, observed_windows
from isomorph.errors import UserError
from isomorph.lab.report.charts import json_numbers
from isomorph.lab.report.page_images import PageImage
from isomorph.operations import AppliedAttention
from isomorph.surgery.calls import Inputs
from isomorph.surgery.modules import Where

LEVELS = 255
# Limit of the memory for a model's maps before rounding; the differences of further layers are those of the page.
MAX_EXACT_BYTES = 2**30
# Default limit of the characters of all maps of a page.
MAX_MAP_CHARACTERS = 7_300_000


@dataclass(frozen=True)
class LayerMaps:
    """The attention maps of one layer, rounded to levels between the smallest and the largest value of each row.

    Keys are the prefix tokens, then the grid positions without padding; with windows, those of the query's window.
    `exact` are the maps before rounding, where they are needed to compare two models.

    Shape: levels and exact (B, heads, queries, keys), ranges (B, heads, queries, 2)
    """

    name: str
    where: TokenGrid
    levels: np.ndarray = field(repr=False)
    ranges: np.ndarray = field(repr=False)
    windows: WindowMembers | None = None
    exact: Tensor | None = field(default=None, repr=False)

    @property
    def keys(self) -> tuple[int, int]:
        """Rows and columns of the grid of keys, without padding."""
        (height, width) = self.where.keys
        (ph, pw) = self.where.padding
        return height - 2 * ph, width - 2 * pw

    @property
    def rounding(self) -> float:
        """The largest error of a rounded value."""
        return float((self.ranges[..., 1] - self.ranges[..., 0]).max()) / LEVELS / 2

    def stored_positions(self, step: tuple[int, int]) -> list[list[int]]:
        """Return rows and columns of the stored queries: the middle of every block of step[0] x step[1] queries."""
        sides = zip(self.where.queries, step, strict=True)
        return [list(range(min(each // 2, size - 1), size, each)) for size, each in sides]

    def stored_queries(self, step: tuple[int, int]) -> list[int]:
        """Return the stored queries: the prefix tokens, and those of `stored_positions`."""
        (rows, columns) = self.stored_positions(step)
        prefix = self.where.prefix
        return [
            *range(prefix),
            *(prefix + row * self.where.queries[1] + column for row in rows for column in columns),
        ]

    def pack(self, image: int, step: tuple[int, int] = (1, 1)) -> str:
        """Return the maps of one image as text: base64 of deflated ranges (float32, little-endian) and levels."""
        queries = self.stored_queries(step)
        ranges, levels = (array[image][:, queries] for array in (self.ranges, self.levels))
        return base64.b64encode(zlib.compress(ranges.astype("<f4").tobytes() + levels.tobytes(), 9)).decode()


def round_rows(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Round values to levels between the smallest (or 0) and the largest of each row; return levels and ranges.

    Shape: (..., keys) -> uint8 (..., keys), (..., 2)
    """
    low = maps.amin(-1).clamp(max=0)
    high = maps.amax(-1).clamp(min=0)
    scale = torch.where(high > low, high - low, 1)
    levels = ((maps - low[..., None]) / scale[..., None] * LEVELS).round().to(torch.uint8)
    return levels, torch.stack([low, high], -1)


def largest_differences(a: LayerMaps | None, b: LayerMaps | None) -> list[list[float]] | None:
    """Return the largest difference of two layers' exact maps in every head that both have. Shape: -> (B, heads)

    None if the maps are not comparable, or not finite.
    """
    if a is None or b is None or a.exact is None or b.exact is None:
        return None
    if (a.where, a.keys) != (b.where, b.keys) or a.exact.shape[2:] != b.exact.shape[2:]:
        return None
    heads = min(a.exact.shape[1], b.exact.shape[1])
    differences = (a.exact[:, :heads] - b.exact[:, :heads]).abs().amax((2, 3))
    if bool(differences.isfinite().all()):
        return differences.tolist()
    return None


def capture_layer_maps(
    model: nn.Module, batch: Inputs, layers: Where | None = None, keep_exact: bool = False
) -> tuple[dict[str, LayerMaps], dict[str, str]]:
    """Return the maps of the attention layers for a batch of images, and for other layers why they have none.

    `keep_exact` also stores the maps before rounding, up to `MAX_EXACT_BYTES`.

    Raises: UserError when `layers` is given and selects no layer with a map.
    """
    problems: dict[str, str] = {}
    grid = image_grid(model, batch)
    windows_of = attention_windows(model, batch)
    windows_of |= observed_windows(model, batch, _unplaced_layers(model, batch, windows_of))
    room = MAX_EXACT_BYTES * keep_exact
    images = count_images(batch)

    def read_layer(frame: LayerCall, applied: AppliedAttention) -> LayerMaps | None:
        nonlocal room
        try:
            maps = applied.map().float()
            windows = windows_of.get(frame.name)
            if windows and len(maps) == images * len(windows.members):
                where = TokenGrid(windows.grid, windows.grid)
                maps = windows.on_grid(maps)
            elif len(maps) != images:
                raise UserError(f"it attends in {len(maps) // images} windows per image of unknown position")
            else:
                where = find_token_grid(frame, applied.shape, grid)
                maps = torch.cat([maps[..., : where.prefix], where.on_map(maps).flatten(-2)], -1)
                windows = None
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


def _unplaced_layers(model: nn.Module, batch: Inputs, known: Mapping[str, Any]) -> list[str]:
    """Return the names of the attention layers that read more windows than there are images, and are not known."""
    try:
        rows = capture_attention(model, some_images(batch, 0, 1), lambda call, _: len(call.args[0]))
    except UserError:  # no attention
        return []
    return [name for name, count in rows.items() if count > 1 and name not in known]


def pack_layer_maps(
    layers: Sequence[LayerMaps], images: int, max_characters: int = MAX_MAP_CHARACTERS
) -> tuple[tuple[int, int], dict[tuple[int, int], str]]:
    """Return steps along rows and columns with which maps fit in `max_characters`, and texts by (layer, image)."""
    step = (1, 1)
    while True:
        packed = {(i, b): layer.pack(b, step) for i, layer in enumerate(layers) for b in range(images)}
        thinnest = all(len(layer.stored_queries(step)) <= layer.where.prefix + 1 for layer in layers)
        if sum(map(len, packed.values())) <= max_characters or thinnest:
            return step, packed
        if step[0] == step[1]:
            step = (step[0] + 1, step[1])
        else:
            step = (step[0], step[1] + 1)


# Maps of two models that differ by no more are equal within the first of these that holds: rounding of float32.
EQUAL_BOUNDS = (1e-6, 1e-5)


@dataclass(frozen=True)
class ViewerModel:
    """A model in the viewer: name, attention maps and gates by layer, predictions by image, number of registers."""

    name: str
    maps: Mapping[str, LayerMaps]
    gates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    predictions: Sequence[str] = ()
    registers: int = 0


@dataclass(frozen=True)
class Viewer:
    """Data of the page's script, packed maps by name, and a sentence on rounding."""

    data: dict[str, Any] = field(repr=False)
    blobs: dict[str, str] = field(repr=False)
    note: str = ""


def _pair_layers(models: Sequence[ViewerModel]) -> list[tuple[str, list[LayerMaps | None]]]:
    """Return the models' maps side by side: by layer name, or by depth where two models share no name."""
    names = [list(model.maps) for model in models]
    if len(names) == 2 and all(names) and not set(names[0]) & set(names[1]):
        rows = [(" | ".join(name or "-" for name in pair), pair) for pair in zip_longest(*names)]
    else:
        rows = [(name, (name,) * len(models)) for name in dict.fromkeys(name for own in names for name in own)]
    return [(title, [m.maps.get(n) for m, n in zip(models, of, strict=True)]) for title, of in rows]


def _layer_geometry(maps: LayerMaps, step: tuple[int, int], layouts: list[list[list[int]]]) -> dict[str, Any]:
    """Return what the script needs to find a value in a layer's maps; `windows` is an index into `layouts`."""
    members = maps.windows and maps.windows.members
    stored = maps.stored_positions(step)
    return {
        "heads": maps.levels.shape[1],
        "prefix": maps.where.prefix,
        "queries": maps.where.queries,
        "first": [positions[0] for positions in stored],
        "stored": list(map(len, stored)),
        "keys": maps.keys,
        "padded": any(maps.where.padding) or bool(members is not None and (members < 0).any()),
        "windows": None if members is None else layouts.index(members.tolist()),
        "signed": bool((maps.ranges < 0).any()),
    }


def build_viewer(
    models: Sequence[ViewerModel],
    images: Sequence[PageImage],
    max_map_characters: int = MAX_MAP_CHARACTERS,
) -> Viewer | None:
    """Return the viewer of some models' maps of the same images; None if no model has any map."""
    pairs = _pair_layers(models)
    all_maps = [maps for _, of in pairs for maps in of if maps is not None]
    if not all_maps:
        return None
    distinct = {maps.windows.members.numpy().tobytes(): maps.windows.members for maps in all_maps if maps.windows}
    layouts = [members.tolist() for members in distinct.values()]
    step, packed = pack_layer_maps(all_maps, len(images), max_map_characters - len(json.dumps(layouts)))
    number = {id(maps): i for i, maps in enumerate(all_maps)}
    layers = []
    for name, of in pairs:
        by_model = [
            maps
            and _layer_geometry(maps, step, layouts)
            | {
                "maps": number[id(maps)],
                "gates": json_numbers(model.gates.get(maps.name, ())) or None,
            }
            for model, maps in zip(models, of, strict=True)
        ]
        differences = largest_differences(*of) if len(of) == 2 else None
        layers.append({"name": name, "byModel": by_model, "differences": differences})
    data = {
        "models": [model.name for model in models],
        "registers": max(model.registers for model in models),
        "layers": layers,
        "images": [
            {
                "name": image.name,
                "uri": image.data_uri(),
                "size": list(image.pixels.shape[1:]),
                "predictions": [model.predictions[i] if model.predictions else "" for model in models],
            }
            for i, image in enumerate(images)
        ],
        "step": step,
        "windows": layouts,
        "equalBounds": EQUAL_BOUNDS,
    }
    blobs = {f"{layer}-{image}": text for (layer, image), text in packed.items()}
    return Viewer(data, blobs, rounding_note(all_maps, step))


def rounding_note(layers: Sequence[LayerMaps], step: tuple[int, int]) -> str:
    """Return one or two sentences on how far the stored maps are rounded and thinned."""
    worst = max(maps.rounding for maps in layers)
    text = f"Each row of a map is stored in 256 levels; the largest rounding error on this page is {worst:.1g}."
    if step == (1, 1):
        return text
    return f"{text} To keep the page small, one query of {step[0]} x {step[1]} is stored."
