"""The figures of a page as files for papers: PDF and SVG."""

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

ROWS = 12
"""Layers of a figure of attention maps; of deeper models, so many evenly spread ones."""
MIDDLE = (0.5, 0.5)


def _file_stem(title: str) -> str:
    """A title as the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:80] or "figure"


def centre_query_maps(layer: LayerMaps, image: int) -> QueryMaps:
    """What a layer sees from the patch in the middle of an image: of its own grid of queries."""
    return QueryMaps(layer.seen_from(image, *MIDDLE), layer.place_of(*MIDDLE), layer.where.queries)


def _map_figures(viewer: Viewer) -> Iterator[tuple[str, Any]]:
    """The maps of each model on each image from the patch in its middle, by title."""
    for b, picture in enumerate(viewer.pictures):
        image = np.broadcast_to(picture.pixels.clamp(0, 1).cpu().numpy(), (3, *picture.pixels.shape[1:]))
        for model in viewer.seen:
            layers = list(model.maps.values())
            chosen = np.unique(np.linspace(0, len(layers) - 1, min(ROWS, len(layers))).round().astype(int))
            rows = {layers[i].name: centre_query_maps(layers[i], b) for i in chosen}
            if rows:
                figure = maps_figure(image.transpose(1, 2, 0), rows, model.name)
                yield f"attention {model.name} {picture.name}", figure


def save_figures(folder: Path, sections: Sequence[Section]) -> list[Path]:
    """Writes every chart of a page, and its attention maps from the middle of the image, as PDF and SVG; the paths.

    A model has one colour in all of them, its colour on the page.

    Raises: UserError when the folder cannot be written.
    """
    paths: list[Path] = []
    models = next(([model.name for model in s.viewer.seen] for s in sections if s.viewer), [])
    with style("black"):
        for section in sections:
            titled = ((chart.title, draw_chart(chart, models)) for chart in section.charts)
            for title, figure in [*titled, *(_map_figures(section.viewer) if section.viewer else ())]:
                found = [folder / f"{_file_stem(title)}.{kind}" for kind in ("pdf", "svg")]
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    for path in found:
                        figure.savefig(path, bbox_inches="tight")
                except OSError as error:
                    raise UserError(f"cannot write figures to {folder}: {error.strerror}") from None
                finally:
                    pyplot().close(figure)
                paths += found
    return paths
