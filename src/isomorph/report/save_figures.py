"""The charts and attention maps of a page as PDF and SVG files."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isomorph.errors import UserError
from isomorph.report.attention_viewer import Viewer
from isomorph.report.figures import QueryMaps, draw_chart, maps_figure, pyplot, style
from isomorph.report.html import Section
from isomorph.report.layer_maps import LayerMaps

MAX_LAYERS = 12
"""Layers of a figure of attention maps; deeper models show that many, evenly spread."""
CENTRE = (0.5, 0.5)


def _unused_stem(title: str, used: set[str]) -> str:
    """Return a title as the stem of a file name, with a number if it is used already, and add it to those used."""
    first = stem = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:80] or "figure"
    number = 2
    while stem in used:  # titles that differ in punctuation only
        stem, number = f"{first}-{number}", number + 1
    used.add(stem)
    return stem


def centre_query_maps(layer: LayerMaps, image: int) -> QueryMaps:
    """Return the maps of a layer from the query in the middle of an image."""
    return QueryMaps(layer.maps_from(image, *CENTRE), layer.query_at(*CENTRE), layer.where.queries)


def _map_figures(viewer: Viewer) -> Iterator[tuple[str, Any]]:
    """Yield title and figure of the maps of each model on each image, from the query in its middle."""
    for b, image in enumerate(viewer.images):
        pixels = np.broadcast_to(image.pixels.clamp(0, 1).cpu().numpy(), (3, *image.pixels.shape[1:]))
        for model in viewer.models:
            layers = list(model.maps.values())
            chosen = np.unique(np.linspace(0, len(layers) - 1, min(MAX_LAYERS, len(layers))).round().astype(int))
            rows = {layers[i].name: centre_query_maps(layers[i], b) for i in chosen}
            if rows:
                yield f"attention {model.name} {image.name}", maps_figure(pixels.transpose(1, 2, 0), rows, model.name)


def save_figures(folder: Path, sections: Sequence[Section]) -> list[Path]:
    """Write every chart of a page, and its attention maps from the middle of each image, as PDF and SVG.

    Returns the paths. A model has the same colour in all figures and on the page.

    >>> from pathlib import Path
    >>> loss = iso.report.Panel("Loss", "epoch", "loss", {"run": iso.report.Line([1, 2], [2.3, 1.1])})
    >>> paths = iso.report.save_figures(Path("figures"), [iso.report.Section("Curves", charts=[loss])])
    >>> [path.name for path in paths]
    ['loss.pdf', 'loss.svg']

    Raises: UserError when the folder cannot be written.
    """
    paths, used = list[Path](), set[str]()
    models = next(([model.name for model in s.viewer.models] for s in sections if s.viewer), [])
    with style("black"):
        for section in sections:
            charts = ((chart.title, draw_chart(chart, models)) for chart in section.charts)
            for title, figure in [*charts, *(_map_figures(section.viewer) if section.viewer else ())]:
                stem = _unused_stem(title, used)
                written = [folder / f"{stem}.{kind}" for kind in ("pdf", "svg")]
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    for path in written:
                        figure.savefig(path, bbox_inches="tight")
                except OSError as error:
                    raise UserError(f"cannot write figures to {folder}: {error.strerror}") from None
                finally:
                    pyplot().close(figure)
                paths += written
    return paths
