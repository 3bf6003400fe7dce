"""The part of the page where a patch of an image shows what every head looks at from there."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from isomorph.report.charts import json_numbers
from isomorph.report.layer_maps import MAX_MAP_CHARACTERS, LayerMaps, first_stored_query, pack_layer_maps

ORDINAL = {2: "second", 3: "third"}
SMALL = 96
"""Pictures with sides up to this are kept as they are (PNG), larger ones as JPEG."""


@dataclass(frozen=True)
class PageImage:
    """An image as the models see it, with its name. Shape: pixels (C, H, W) in 0..1, C 1 or 3"""

    name: str
    pixels: Tensor = field(repr=False)

    def uri(self) -> str:
        """The picture inside a data: address."""
        pixels = (self.pixels.clamp(0, 1) * 255).round().to("cpu").numpy().astype(np.uint8)
        colour = np.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0)
        small = max(pixels.shape[1:]) <= SMALL
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(colour)).save(file, "PNG" if small else "JPEG", quality=88)
        return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(file.getvalue()).decode()}"


@dataclass(frozen=True)
class ViewerModel:
    """One model: its name, its maps by layer, its gates, and what it says to each image."""

    name: str
    maps: Mapping[str, LayerMaps]
    gates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    said: Sequence[str] = ()


@dataclass(frozen=True)
class Viewer:
    """Data of the page's script, the packed maps by name, a sentence on what was rounded; and what it was made of."""

    data: dict[str, Any] = field(repr=False)
    blobs: dict[str, str] = field(repr=False)
    rounding_note: str = ""
    seen: Sequence[ViewerModel] = field(default=(), repr=False)
    pictures: Sequence[PageImage] = field(default=(), repr=False)


def _paired(seen: Sequence[ViewerModel]) -> list[tuple[str, list[LayerMaps | None]]]:
    """Layers of the models side by side: by name, or by depth where no name is shared."""
    names = [list(model.maps) for model in seen]
    if len(names) == 2 and all(names) and not set(names[0]) & set(names[1]):
        pairs = list(zip_longest(*names))
        return [(" | ".join(n or "-" for n in p), [s.maps.get(n) for s, n in zip(seen, p, strict=True)]) for p in pairs]
    union = dict.fromkeys(name for layers in names for name in layers)
    return [(name, [model.maps.get(name) for model in seen]) for name in union]


def geometry(
    maps: LayerMaps, step: tuple[int, int], gates: Sequence[float] | None, layouts: list[list[list[int]]]
) -> dict[str, Any]:
    """What the script has to know of a layer to find a value in its maps; windows by their place among the layouts."""
    queries = maps.where.queries
    first = first_stored_query(queries, step)
    kept = [len(range(start, size, each)) for start, size, each in zip(first, queries, step, strict=True)]
    return {
        "heads": maps.levels.shape[1],
        "prefix": maps.where.prefix,
        "queries": list(queries),
        "first": list(first),
        "kept": kept,
        "keys": list(maps.keys),
        "padded": any(maps.where.padding) or bool(maps.windows and (maps.windows.members < 0).any()),
        "windows": maps.windows and layouts.index(maps.windows.members.tolist()),
        "signed": bool((maps.ranges < 0).any()),
        "gates": json_numbers(gates),
    }


def _layouts_of(layers: Sequence[LayerMaps]) -> list[list[list[int]]]:
    """The ways in which layers are cut into windows, each once."""
    found = {maps.windows.members.numpy().tobytes(): maps.windows for maps in layers if maps.windows}
    return [windows.members.tolist() for windows in found.values()]


def build_viewer(
    seen: Sequence[ViewerModel], pictures: Sequence[PageImage], budget: int = MAX_MAP_CHARACTERS
) -> Viewer | None:
    """The viewer of some models' maps of the same images; None where no model has any."""
    pairs = _paired(seen)
    flat = [maps for _, of in pairs for maps in of if maps is not None]
    if not flat:
        return None
    layouts = _layouts_of(flat)
    step, packed = pack_layer_maps(flat, len(pictures), budget - len(json.dumps(layouts)))
    number = {id(maps): i for i, maps in enumerate(flat)}
    layers = []
    for name, of in pairs:
        parts: list[dict[str, Any] | None] = []
        for model, maps in zip(seen, of, strict=True):
            found = maps and geometry(maps, step, model.gates.get(maps.name), layouts) | {"maps": number[id(maps)]}
            parts.append(found or None)
        layers.append({"name": name, "of": parts})
    images = [
        {
            "name": picture.name,
            "uri": picture.uri(),
            "size": list(picture.pixels.shape[1:]),
            "said": [model.said[b] if model.said else "" for model in seen],
        }
        for b, picture in enumerate(pictures)
    ]
    data = {
        "models": [model.name for model in seen],
        "layers": layers,
        "images": images,
        "step": step,
        "windows": layouts,
    }
    return Viewer(
        data, {f"{i}-{b}": text for (i, b), text in packed.items()}, rounding_note(flat, step), seen, pictures
    )


def rounding_note(flat: Sequence[LayerMaps], step: tuple[int, int]) -> str:
    """One or two sentences on what was rounded or left out."""
    worst = max(maps.rounding for maps in flat)
    text = f"Attention is stored in 256 levels of each row's range, rounded by {worst:.1g} at most on this page."
    if step == (1, 1):
        return text
    rows, columns = ("every" if n == 1 else f"every {ORDINAL.get(n, f'{n}th')}" for n in step)
    return f"{text} To keep the page small, {rows} row and {columns} column of queries is kept (see --megabytes)."
