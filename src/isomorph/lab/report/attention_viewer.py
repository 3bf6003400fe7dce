"""The attention viewer, where pointing at a patch shows what every head attends to: its maps, rounded and packed."""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isomorph.analysis.batches import count_images, some_images
from isomorph.analysis.layer_attention import LayerCall, capture_attention
from isomorph.analysis.token_grid import AttentionGrid, find_token_grid, image_grid
from isomorph.analysis.windows import WindowMembers, attention_windows, observed_windows
from isomorph.errors import UserError
from isomorph.json_values import JsonObject
from isomorph.lab.report.charts import json_numbers
from isomorph.lab.report.page_images import PageImage
from isomorph.operations import AppliedAttention
from isomorph.spec import ImageSize
from isomorph.surgery.calls import Inputs
from isomorph.surgery.site import Where

# Rows and columns of queries of which one is stored.
Step = tuple[int, int]
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
    where: AttentionGrid
    levels: np.ndarray = field(repr=False)
    ranges: np.ndarray = field(repr=False)
    windows: WindowMembers | None = None
    exact: Tensor | None = field(default=None, repr=False)

    @property
    def keys(self) -> ImageSize:
        """Rows and columns of the grid of keys, without padding."""
        height, width = self.where.keys
        rows, columns = self.where.padding
        return height - 2 * rows, width - 2 * columns

    @property
    def rounding(self) -> float:
        """The largest error of a rounded value."""
        widths = self.ranges[..., 1] - self.ranges[..., 0]
        return float(widths.max()) / LEVELS / 2

    def stored_positions(self, step: Step) -> list[list[int]]:
        """Return rows and columns of the stored queries: the middle of every block of step[0] x step[1] queries."""
        positions = []
        for side, distance in zip(self.where.queries, step, strict=True):
            first = min(distance // 2, side - 1)
            positions.append(list(range(first, side, distance)))
        return positions

    def stored_queries(self, step: Step) -> list[int]:
        """Return the stored queries: the prefix tokens, and those of `stored_positions`."""
        rows, columns = self.stored_positions(step)
        prefix = self.where.prefix
        width = self.where.queries[1]
        queries = list(range(prefix))
        for row in rows:
            queries += [prefix + row * width + column for column in columns]
        return queries

    def pack(self, image: int, step: Step = (1, 1)) -> str:
        """Return the maps of one image as text: base64 of deflated ranges (float32, little-endian) and levels."""
        queries = self.stored_queries(step)
        ranges = self.ranges[image][:, queries].astype("<f4")
        levels = self.levels[image][:, queries]
        packed = zlib.compress(ranges.tobytes() + levels.tobytes(), 9)
        return base64.b64encode(packed).decode()


def round_rows(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Round values to levels between the smallest (or 0) and the largest of each row; return levels and ranges.

    Shape: (..., keys) -> uint8 (..., keys), (..., 2)
    """
    low = maps.amin(-1).clamp(max=0)
    high = maps.amax(-1).clamp(min=0)
    scale = torch.where(high > low, high - low, 1)
    shares = (maps - low[..., None]) / scale[..., None]
    levels = (shares * LEVELS).round().to(torch.uint8)
    return levels, torch.stack([low, high], -1)


def largest_differences(a: LayerMaps | None, b: LayerMaps | None) -> list[list[float]] | None:
    """Return the largest difference of two layers' exact maps in every head that both have. Shape: -> (B, heads)

    None if the maps are not comparable, or not finite.
    """
    if a is None or b is None or a.exact is None or b.exact is None:
        return None
    if (a.where, a.keys) != (b.where, b.keys) or a.exact.shape[2:] != b.exact.shape[2:]:
        return None
    if not _are_equal_windows(a.windows, b.windows):
        return None
    heads = min(a.exact.shape[1], b.exact.shape[1])
    differences = (a.exact[:, :heads] - b.exact[:, :heads]).abs().amax((2, 3))
    if bool(differences.isfinite().all()):
        return differences.tolist()
    return None


def _are_equal_windows(a: WindowMembers | None, b: WindowMembers | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a.members, b.members)


def capture_layer_maps(
    model: nn.Module, batch: Inputs, layers: Where | None = None, keep_exact: bool = False
) -> tuple[dict[str, LayerMaps], dict[str, str]]:
    """Return the maps of the attention layers for a batch of images, and for other layers why they have none.

    `keep_exact` also stores the maps before rounding, up to `MAX_EXACT_BYTES`.

    Raises: UserError when `layers` is given and selects no layer with a map.
    """
    reader = _MapReader(model, batch, MAX_EXACT_BYTES if keep_exact else 0)
    where = "*" if layers is None else layers
    try:
        return capture_attention(model, batch, reader.read, where), reader.problems
    except UserError:
        if layers is not None:
            raise
        return {}, reader.problems


class _MapReader:
    """Reads the maps of the layers of a model, as a function for `capture_attention`.

    `problems` says of other layers why they have none; `room` is the number of bytes left for maps before rounding.
    """

    def __init__(self, model: nn.Module, batch: Inputs, room: int) -> None:
        self.problems: dict[str, str] = {}
        self.room = room
        self.images = count_images(batch)
        self.grid = image_grid(model, batch)
        self.windows = attention_windows(model, batch)
        unplaced = _unplaced_layers(model, batch, self.windows)
        self.windows |= observed_windows(model, batch, unplaced)

    def read(self, frame: LayerCall, applied: AppliedAttention) -> LayerMaps | None:
        try:
            maps, where, windows = self._on_grid(frame, applied)
        except UserError as error:
            self.problems[frame.name] = str(error)
            return None
        levels, ranges = round_rows(maps)
        self.room -= maps.nbytes
        return LayerMaps(
            name=frame.name,
            where=where,
            levels=levels.cpu().numpy(),
            ranges=ranges.cpu().numpy(),
            windows=windows,
            exact=maps.cpu() if self.room >= 0 else None,
        )

    def _on_grid(
        self, frame: LayerCall, applied: AppliedAttention
    ) -> tuple[Tensor, AttentionGrid, WindowMembers | None]:
        """Return a layer's maps by prefix tokens and grid positions. Raises: UserError where these are not known."""
        maps = applied.map().float()
        windows = self.windows.get(frame.name)
        if windows and len(maps) == self.images * len(windows.members):
            return windows.on_grid(maps), AttentionGrid(windows.grid, windows.grid), windows
        if len(maps) != self.images:
            count = len(maps) // self.images
            raise UserError(f"it attends in {count} windows per image of unknown position")
        where = find_token_grid(frame, applied.shape, self.grid)
        prefix = maps[..., : where.prefix]
        positions = where.on_map(maps).flatten(-2)
        return torch.cat([prefix, positions], -1), where, None


def _unplaced_layers(model: nn.Module, batch: Inputs, known: Mapping[str, Any]) -> list[str]:
    """Return the names of the attention layers that read more windows than there are images, and are not known."""
    try:
        rows = capture_attention(model, some_images(batch, 0, 1), lambda call, _: len(call.args[0]))
    except UserError:  # no attention
        return []
    return [name for name, count in rows.items() if count > 1 and name not in known]


def pack_layer_maps(
    layers: Sequence[LayerMaps], images: int, max_characters: int = MAX_MAP_CHARACTERS
) -> tuple[Step, dict[tuple[int, int], str]]:
    """Return steps along rows and columns with which maps fit in `max_characters`, and texts by (layer, image)."""
    step = (1, 1)
    while True:
        packed = {}
        for number, layer in enumerate(layers):
            for image in range(images):
                packed[number, image] = layer.pack(image, step)
        characters = sum(map(len, packed.values()))
        thinnest = all(
            len(layer.stored_queries(step)) <= layer.where.prefix + 1 for layer in layers
        )
        if characters <= max_characters or thinnest:
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

    data: JsonObject = field(repr=False)
    blobs: dict[str, str] = field(repr=False)
    note: str = ""


def _pair_layers(models: Sequence[ViewerModel]) -> list[tuple[str, list[LayerMaps | None]]]:
    """Return the models' maps side by side: by layer name, or by depth where two models share no name."""
    names = [list(model.maps) for model in models]
    if len(names) == 2 and all(names) and set(names[0]).isdisjoint(names[1]):
        first, second = (model.maps for model in models)
        return [
            (f"{a or '-'} | {b or '-'}", [first.get(a), second.get(b)])
            for a, b in zip_longest(*names)
        ]
    distinct = dict.fromkeys(chain.from_iterable(names))
    return [(name, [model.maps.get(name) for model in models]) for name in distinct]


def _layer_geometry(maps: LayerMaps, step: Step, layouts: list[list[list[int]]]) -> JsonObject:
    """Return what the script needs to find a value in a layer's maps; `windows` is an index into `layouts`."""
    stored = maps.stored_positions(step)
    windows = None
    padded = any(maps.where.padding)
    if maps.windows:
        members = maps.windows.members
        windows = layouts.index(members.tolist())
        padded = padded or bool((members < 0).any())
    return {
        "heads": maps.levels.shape[1],
        "prefix": maps.where.prefix,
        "queries": maps.where.queries,
        "first": [positions[0] for positions in stored],
        "stored": list(map(len, stored)),
        "keys": maps.keys,
        "padded": padded,
        "windows": windows,
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
    layouts = _window_layouts(all_maps)
    room = max_map_characters - len(json.dumps(layouts))
    step, packed = pack_layer_maps(all_maps, len(images), room)
    numbers = {id(maps): number for number, maps in enumerate(all_maps)}
    layers = []
    for name, of in pairs:
        by_model: list[JsonObject | None] = []
        for model, maps in zip(models, of, strict=True):
            if maps is None:
                by_model.append(None)
                continue
            layer = _layer_geometry(maps, step, layouts)
            layer["maps"] = numbers[id(maps)]
            layer["gates"] = json_numbers(model.gates.get(maps.name, ())) or None
            by_model.append(layer)
        differences = largest_differences(*of) if len(of) == 2 else None
        layers.append({"name": name, "byModel": by_model, "differences": differences})
    data = {
        "models": [model.name for model in models],
        "registers": max(model.registers for model in models),
        "layers": layers,
        "images": [_image_data(image, i, models) for i, image in enumerate(images)],
        "step": step,
        "windows": layouts,
        "equalBounds": EQUAL_BOUNDS,
    }
    blobs = {f"{layer}-{image}": text for (layer, image), text in packed.items()}
    return Viewer(data, blobs, rounding_note(all_maps, step))


def _window_layouts(all_maps: Sequence[LayerMaps]) -> list[list[list[int]]]:
    """Return the different layouts of windows, as lists of the members of each window."""
    layouts = []
    for maps in all_maps:
        if maps.windows:
            members = maps.windows.members.tolist()
            if members not in layouts:
                layouts.append(members)
    return layouts


def _image_data(image: PageImage, number: int, models: Sequence[ViewerModel]) -> JsonObject:
    predictions = []
    for model in models:
        predictions.append(model.predictions[number] if model.predictions else "")
    return {
        "name": image.name,
        "uri": image.data_uri(),
        "size": list(image.pixels.shape[1:]),
        "predictions": predictions,
    }


def rounding_note(layers: Sequence[LayerMaps], step: Step) -> str:
    """Return one or two sentences on how far the stored maps are rounded and thinned."""
    worst = max(maps.rounding for maps in layers)
    text = f"Each row of a map is stored in 256 levels; the largest rounding error on this page is {worst:.1g}."
    if step == (1, 1):
        return text
    return f"{text} To keep the page small, one query of {step[0]} x {step[1]} is stored."
