"""Data of the attention viewer: the part of a page where pointing at a patch shows what every head attends to."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from isomorph.report.charts import json_numbers
from isomorph.report.image_uris import image_uri
from isomorph.report.layer_maps import (
    MAX_MAP_CHARACTERS,
    LayerMaps,
    first_stored_query,
    largest_differences,
    pack_layer_maps,
)

ORDINALS = {2: "second", 3: "third"}
EQUAL_BOUNDS = (1e-6, 1e-5)
"""Maps of two models that differ by no more are equal within the first of these that holds: rounding of float32."""
MAX_PNG_SIDE = 96
"""Images with larger sides are embedded as JPEG, others as PNG."""


@dataclass(frozen=True)
class PageImage:
    """An image on the page, cut and resized as the models take it.

    Shape: pixels (C, H, W) in 0..1, C 1 or 3

    >>> iso.report.PageImage("noise", torch.rand(3, 32, 48)).data_uri()[:22]
    'data:image/png;base64,'
    """

    name: str
    pixels: Tensor = field(repr=False)

    def data_uri(self) -> str:
        """Return the image as a data: URI."""
        pixels = (self.pixels.clamp(0, 1) * 255).round().to("cpu").numpy().astype(np.uint8)
        colour = np.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0)  # (H, W, 3)
        small = max(pixels.shape[1:]) <= MAX_PNG_SIDE
        return image_uri(Image.fromarray(np.ascontiguousarray(colour)), "png" if small else "jpeg")


@dataclass(frozen=True)
class ViewerModel:
    """A model in the viewer: its name, attention maps and gates by layer, and its prediction for each image."""

    name: str
    maps: Mapping[str, LayerMaps]
    gates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    predictions: Sequence[str] = ()


@dataclass(frozen=True)
class Viewer:
    """Data of the page's script, packed maps by name, a sentence on rounding; and the models and images they show."""

    data: dict[str, Any] = field(repr=False)
    blobs: dict[str, str] = field(repr=False)
    note: str = ""
    models: Sequence[ViewerModel] = field(default=(), repr=False)
    images: Sequence[PageImage] = field(default=(), repr=False)


def _pair_layers(models: Sequence[ViewerModel]) -> list[tuple[str, list[LayerMaps | None]]]:
    """Return the models' maps side by side: by layer name, or by depth where two models share no name."""
    names = [list(model.maps) for model in models]
    if len(names) == 2 and all(names) and not set(names[0]) & set(names[1]):
        return [
            (" | ".join(n or "-" for n in pair), [m.maps.get(n) for m, n in zip(models, pair, strict=True)])
            for pair in zip_longest(*names)
        ]
    union = dict.fromkeys(name for layers in names for name in layers)
    return [(name, [model.maps.get(name) for model in models]) for name in union]


def _layer_geometry(
    maps: LayerMaps, step: tuple[int, int], gates: Sequence[float] | None, layouts: list[list[list[int]]]
) -> dict[str, Any]:
    """Return what the script needs to find a value in a layer's maps; `windows` is an index into `layouts`."""
    queries = maps.where.queries
    first = first_stored_query(queries, step)
    stored = [len(range(start, size, each)) for start, size, each in zip(first, queries, step, strict=True)]
    return {
        "heads": maps.levels.shape[1],
        "prefix": maps.where.prefix,
        "queries": list(queries),
        "first": list(first),
        "stored": stored,
        "keys": list(maps.keys),
        "padded": any(maps.where.padding) or bool(maps.windows and (maps.windows.members < 0).any()),
        "windows": maps.windows and layouts.index(maps.windows.members.tolist()),
        "signed": bool((maps.ranges < 0).any()),
        "gates": gates and json_numbers(gates),
    }


def _window_layouts(layers: Sequence[LayerMaps]) -> list[list[list[int]]]:
    """Return the distinct ways in which layers are cut into windows."""
    distinct = {maps.windows.members.numpy().tobytes(): maps.windows for maps in layers if maps.windows}
    return [windows.members.tolist() for windows in distinct.values()]


def build_viewer(
    models: Sequence[ViewerModel], images: Sequence[PageImage], max_map_characters: int = MAX_MAP_CHARACTERS
) -> Viewer | None:
    """Return the viewer of some models' maps of the same images; None if no model has any map."""
    pairs = _pair_layers(models)
    all_maps = [maps for _, of in pairs for maps in of if maps is not None]
    if not all_maps:
        return None
    layouts = _window_layouts(all_maps)
    step, packed = pack_layer_maps(all_maps, len(images), max_map_characters - len(json.dumps(layouts)))
    number = {id(maps): i for i, maps in enumerate(all_maps)}
    layers = []
    for name, of in pairs:
        by_model = [
            maps and _layer_geometry(maps, step, model.gates.get(maps.name), layouts) | {"maps": number[id(maps)]}
            for model, maps in zip(models, of, strict=True)
        ]
        differences = largest_differences(*of) if len(of) == 2 else None
        layers.append({"name": name, "byModel": by_model, "differences": differences})
    data = {
        "models": [model.name for model in models],
        "layers": layers,
        "images": [_image_data(image, i, models) for i, image in enumerate(images)],
        "step": step,
        "windows": layouts,
        "equalBounds": EQUAL_BOUNDS,
    }
    blobs = {f"{layer}-{image}": text for (layer, image), text in packed.items()}
    rounded = [replace(m, maps={n: replace(maps, exact=None) for n, maps in m.maps.items()}) for m in models]
    return Viewer(data, blobs, rounding_note(all_maps, step), rounded, images)


def _image_data(image: PageImage, number: int, models: Sequence[ViewerModel]) -> dict[str, Any]:
    return {
        "name": image.name,
        "uri": image.data_uri(),
        "size": list(image.pixels.shape[1:]),
        "predictions": [model.predictions[number] if model.predictions else "" for model in models],
    }


def rounding_note(layers: Sequence[LayerMaps], step: tuple[int, int]) -> str:
    """Return one or two sentences on how far the stored maps are rounded and thinned."""
    worst = max(maps.rounding for maps in layers)
    text = f"Each row of a map is stored in 256 levels; the largest rounding error on this page is {worst:.1g}."
    if step == (1, 1):
        return text
    rows, columns = ("every" if n == 1 else f"every {ORDINALS.get(n, f'{n}th')}" for n in step)
    return (
        f"{text} To keep the page small, only {rows} row and {columns} column of queries is stored (see --megabytes)."
    )
