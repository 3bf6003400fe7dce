"""Figures for papers, drawn with matplotlib in one style: the charts of a page, and attention maps, as PDF and SVG."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from isomorph.errors import UserError
from isomorph.report.attention_viewer import LayerMaps, Viewer
from isomorph.report.charts import Chart, Panel
from isomorph.report.html import Section

INK, PALETTE = "#808890", ("#2f72d8", "#d9651c", "#25694e", "#d86dbe", "#655a21", "#8f8b8b")
MAX_NUMBERED_COLUMNS = 12
"""Matrices with more columns have no numbers in their cells."""
MAX_LAYERS = 12
"""Layers of a figure of attention maps; deeper models show that many, evenly spread."""
CENTRE = (0.5, 0.5)


@cache
def pyplot() -> Any:
    """Return matplotlib's pyplot, with a backend that needs no display."""
    import matplotlib  # here, as importing it takes a third of a second, which most commands can skip

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


@contextmanager
def style(ink: str = INK) -> Iterator[None]:
    """Set the style of figures within the block: text and axes in `ink`, no box, a transparent background.

    The default grey is readable on light and dark pages.
    """
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    clear = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    rest: dict[str, Any] = {
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": pyplot().cycler("color", PALETTE),
        "grid.alpha": 0.2,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "svg.fonttype": "none",
        "pdf.fonttype": 42,
    }
    with pyplot().style.context({**dict.fromkeys(inked, ink), **dict.fromkeys(clear, "none"), **rest}):
        yield


def _as_svg(figure: Any) -> str:
    """Return the figure as an <svg> element, and close it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight")
    pyplot().close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def draw_chart(chart: Chart, models: Sequence[str] = ()) -> Any:
    """Return a chart as a matplotlib figure, drawn within `style`; `models` of the page set the colours."""
    drawing = chart.drawing()
    figure, axes = pyplot().subplots(figsize=_figure_size(drawing))
    {"plane": _draw_plane, "bars": _draw_bars, "matrix": _draw_matrix}[drawing["kind"]](axes, drawing, models)
    return figure


def _figure_size(drawing: Mapping[str, Any]) -> tuple[float, float]:
    """Return width and height in inches."""
    if drawing["kind"] == "matrix":
        return _cell_width(drawing) * len(drawing["columns"]) + 2.2, 0.26 * len(drawing["rows"]) + 1.4
    if drawing["kind"] == "bars":
        return 4.6, (0.14 * len(drawing["series"]) + 0.1) * len(drawing["groups"]) + 0.9
    if names := drawing["x"].get("names"):
        return max(3.4, 0.36 * len(names) + 1.4), 2.7
    return (3.6, 3.6) if drawing.get("square") else (4.2, 2.7)


def _series_colours(drawing: Mapping[str, Any], models: Sequence[str]) -> list[Any]:
    """Return a colour for each series: by its index in `models`, as on the page, if all are models, else its own."""
    names = [series["name"] for series in drawing["series"]]
    if drawing.get("ordered"):
        return list(pyplot().get_cmap("viridis")(np.linspace(0.9, 0.15, len(names))))
    indices = map(models.index, names) if set(names) <= set(models) else range(len(names))
    return [PALETTE[i % len(PALETTE)] for i in indices]


def _draw_plane(axes: Any, drawing: Mapping[str, Any], models: Sequence[str] = ()) -> None:
    x, y, square, names = drawing["x"], drawing["y"], drawing.get("square"), drawing["x"].get("names")
    for series, colour in zip(drawing["series"], _series_colours(drawing, models), strict=True):
        label = series["name"]
        for line in filter(None, series["lines"]):
            at, values, *band = np.array(line, float).T
            marker = "o" if len(at) < 30 and not series["points"] else None
            axes.plot(at, values, marker=marker, ms=3, lw=1.4, color=colour, label=label, clip_on=False)
            label = None
            if band:
                axes.fill_between(at, *band, color=colour, alpha=0.2, lw=0)
            if square:
                axes.plot(at[:1], values[:1], "o", mfc="none", color=colour, ms=4)
        if series["points"]:
            points = np.array([point[:2] for point in series["points"]], float)
            axes.scatter(*points.T, s=14, alpha=0.65 if names else 1, color=colour, lw=0, label=label, clip_on=False)
        for *point, name in series["points"] if drawing.get("labelled") else ():
            axes.annotate(name, point, (4, 4), textcoords="offset points", fontsize=7, annotation_clip=False)
    axes.set(title=drawing["title"], xlabel=x["label"], ylabel=y["label"])
    if square:
        axes.plot(0, 0, "+", color=INK, ms=8)
        axes.set(xlim=x["range"], ylim=y["range"][::-1], aspect="equal")
    elif drawing.get("labelled"):
        axes.set_xlim(x["range"])
    elif names:
        axes.set_xticks(range(len(names)), names, rotation=35 if len(names) < 30 else 90, ha="right")
        axes.set(xlabel="", ylim=y["range"])
    axes.grid(axis="y" if names else "both")
    outside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if square else {}
    if len(drawing["series"]) > 1 or not drawing.get("labelled"):
        axes.legend(fontsize=7, ncols=1 if square or len(drawing["series"]) < 4 else 2, **outside)


def _draw_bars(axes: Any, drawing: Mapping[str, Any], models: Sequence[str]) -> None:
    groups, number = drawing["groups"], len(drawing["series"])
    for i, (series, colour) in enumerate(zip(drawing["series"], _series_colours(drawing, models), strict=True)):
        middles = np.arange(len(groups)) + (i - (number - 1) / 2) * 0.8 / number
        axes.barh(middles, np.array(series["values"], float), 0.72 / number, color=colour, label=series["name"])
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.set(title=drawing["title"], xlabel=drawing["axis"]["label"])
    axes.grid(axis="x")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _cell_width(drawing: Mapping[str, Any]) -> float:
    """Return the inches of a cell; a letter takes 0.08."""
    return 0.42 if len(drawing["columns"]) <= MAX_NUMBERED_COLUMNS else 0.26


def _draw_matrix(axes: Any, drawing: Mapping[str, Any], models: Sequence[str]) -> None:
    rows, columns, values = drawing["rows"], drawing["columns"], np.array(drawing["values"], float)
    colours = "RdBu_r" if drawing["low"] < 0 else "viridis"
    image = axes.imshow(values, cmap=colours, vmin=drawing["low"], vmax=drawing["high"], interpolation="nearest")
    axes.set_aspect(0.26 / _cell_width(drawing))
    if len(columns) <= MAX_NUMBERED_COLUMNS:
        _write_cells(axes, image, values)
    turned = max(map(len, columns), default=0) * 0.08 > _cell_width(drawing)
    axes.set_xticks(range(len(columns)), columns, rotation=90 if turned else 0)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(title=drawing["title"], xlabel=drawing["x"], ylabel=drawing["y"])
    axes.figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03).outline.set_visible(False)


def _decimals(values: np.ndarray) -> int:
    """Return the decimals that give the largest of some numbers three digits; one for 100 (100.0 %)."""
    top = np.nanmax(np.abs(values), initial=0.0)
    if top == 0 or top > 100:
        return int(top == 0)
    return int(np.clip(2 - np.floor(np.log10(top)), 1, 5))


def _write_cells(axes: Any, image: Any, values: np.ndarray) -> None:
    """Write the numbers of a heat map into its cells, all with the same decimals."""
    digits = _decimals(values)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            dark = np.dot(image.cmap(image.norm(value))[:3], (0.3, 0.59, 0.11)) < 0.55
            colour = "white" if dark else "black"
            axes.text(column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize=6.5, color=colour)


class QueryMaps(NamedTuple):
    """The map of every head from one query, its row and column, and the grid of queries. Shape: maps (heads, h, w)"""

    maps: np.ndarray
    query: tuple[int, int]
    grid: tuple[int, int]


def _frame_query(cell: Any, maps: QueryMaps, height: int, width: int) -> None:
    """Frame the query's patch on an image of `height` x `width` pixels."""
    (row, column), (rows, columns) = maps.query, maps.grid
    corner, size = (column * width / columns, row * height / rows), (width / columns, height / rows)
    cell.add_patch(pyplot().Rectangle(corner, *size, fill=False, ec="#ff3b30", lw=1.2, clip_on=False))


def maps_figure(image: np.ndarray, rows: Mapping[str, QueryMaps], title: str = "") -> Any:
    """Return a figure of attention maps by head (columns) and layer (rows), next to the image with the query framed.

    Each map has its own colour scale. Draw within `style`.

    Shape: image (H, W, 3) in 0..1
    """
    heads, (height, width) = max(len(layer.maps) for layer in rows.values()), image.shape[:2]
    size = (0.92 * (heads + 1), 1.0 * len(rows) * height / width)
    figure, axes = pyplot().subplots(len(rows), heads + 1, figsize=size, squeeze=False)
    axes[0, 0].set_title(title, loc="left", pad=14)
    for number, cell in enumerate(axes[0, 1:], 1):
        cell.set_title(f"head {number}", fontsize=7, pad=3)
    for line, (name, layer) in zip(axes, rows.items(), strict=True):
        for cell in line:
            cell.set(xticks=[], yticks=[])
            cell.spines[:].set_visible(False)
        line[0].imshow(image, interpolation="nearest", extent=(0, width, height, 0))
        _frame_query(line[0], layer, height, width)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
        for cell, values in zip(line[1:], layer.maps, strict=False):
            signed, top = bool((values < 0).any()), float(np.abs(values).max())
            low, colours = (-top, "RdBu_r") if signed else (0.0, "magma")
            cell.imshow(values, cmap=colours, interpolation="nearest", vmin=low, vmax=top, extent=(0, width, height, 0))
    figure.subplots_adjust(wspace=0.06, hspace=0.08)
    return figure


def matrices_figure(rows: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Return whole attention maps as SVG text: a network per row, a block per column; queries down, keys across.

    Red is positive, blue negative attention. Each map has its own colour scale, given above it (Refiner Fig. 5).

    Shape: rows {network: {block: (N, N)}}
    """
    columns = max(len(maps) for maps in rows.values())
    with style():
        size = (1.35 * columns + 0.6, 1.55 * len(rows))
        figure, axes = pyplot().subplots(len(rows), columns, figsize=size, squeeze=False)
        for line, (network, maps) in zip(axes, rows.items(), strict=True):
            for cell in line:
                cell.set(xticks=[], yticks=[])
            line[0].set_ylabel(network)
            for cell, (block, matrix) in zip(line, maps.items(), strict=False):
                values = matrix.float().cpu().numpy()
                top = float(np.quantile(np.abs(values), 0.995))
                cell.imshow(values, cmap="RdBu_r", interpolation="nearest", vmin=-top, vmax=top)
                cell.set_title(f"{block}, ±{top:.2g}", fontsize=7, pad=2)
        figure.subplots_adjust(wspace=0.08, hspace=0.22)
        return _as_svg(figure)


def panels_figure(panels: Sequence[Panel], columns: int = 3) -> str:
    """Return panels of lines side by side as SVG text, each with its own legend."""
    rows = -(-len(panels) // columns)
    with style():
        figure, axes = pyplot().subplots(rows, columns, figsize=(3.4 * columns, 2.7 * rows), squeeze=False)
        for cell in axes.flat[len(panels) :]:
            cell.set_visible(False)
        for cell, panel in zip(axes.flat, panels, strict=False):
            _draw_plane(cell, panel.drawing())
        figure.tight_layout()
        return _as_svg(figure)


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
