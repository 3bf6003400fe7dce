"""Figures drawn with matplotlib, in one style: the charts of a page, and attention maps."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, singledispatch
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from isomorph.report.charts import Bars, Dots, Line, Matrix, Panel, Paths, Scatter

INK, PALETTE = "#808890", ("#2f72d8", "#d9651c", "#25694e", "#d86dbe", "#655a21", "#8f8b8b")
MAX_NUMBERED_COLUMNS = 12
"""Matrices with more columns have no numbers in their cells."""
__all__ = [
    "Line",
    "Panel",
    "QueryMaps",
    "draw_chart",
    "maps_figure",
    "matrices_figure",
    "panels_figure",
    "pyplot",
    "style",
]


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


def _series_colours(series: Iterable[str], models: Sequence[str] = ()) -> list[str]:
    """Return a colour for each series: by its index in `models`, as on the page, if all are models, else its own."""
    names = list(series)
    indices = map(models.index, names) if set(names) <= set(models) else range(len(names))
    return [PALETTE[i % len(PALETTE)] for i in indices]


def _plot_panel(cell: Any, panel: Panel, models: Sequence[str] = ()) -> None:
    """Draw lines and their ranges on a pair of axes."""
    shades = pyplot().get_cmap("viridis")(np.linspace(0.9, 0.15, len(panel.lines)))
    colours = shades if panel.ordered else _series_colours(panel.lines, models)
    for (name, line), colour in zip(panel.lines.items(), colours, strict=True):
        marker = "o" if len(line.x) < 30 else None
        cell.plot(line.x, line.y, marker=marker, ms=3, lw=1.5, color=colour, label=name)
        if line.low is not None and line.high is not None:
            cell.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, lw=0)
    cell.set_title(panel.title)
    cell.set_xlabel(panel.x_label)
    cell.set_ylabel(panel.y_label)
    cell.grid()
    cell.legend(fontsize=7, ncols=2 if len(panel.lines) > 3 else 1)


@singledispatch
def draw_chart(chart: Any, models: Sequence[str] = ()) -> Any:
    """Return a chart as a matplotlib figure, drawn within `style`; `models` of the page set the colours."""
    raise TypeError(f"{type(chart).__name__} is not a chart")


@draw_chart.register
def _draw_panel(chart: Panel, models: Sequence[str] = ()) -> Any:
    figure, axes = pyplot().subplots(figsize=(4.2, 2.7))
    _plot_panel(axes, chart, models)
    return figure


@draw_chart.register
def _draw_dots(chart: Dots, models: Sequence[str] = ()) -> Any:
    layers = chart.layers
    figure, axes = pyplot().subplots(figsize=(max(3.4, 0.36 * len(layers) + 1.4), 2.7))
    for i, ((name, values), colour) in enumerate(
        zip(chart.series.items(), _series_colours(chart.series, models), strict=True)
    ):
        shift = (i - (len(chart.series) - 1) / 2) * 0.22
        dots = [(at + shift, list(values[layer])) for at, layer in enumerate(layers) if layer in values]
        for at, heads in dots:
            axes.scatter([at] * len(heads), heads, s=14, alpha=0.65, color=colour, lw=0, clip_on=False)
        axes.plot(
            [at for at, _ in dots],
            [np.nanmean(heads) if np.isfinite(heads).any() else np.nan for _, heads in dots],
            color=colour,
            lw=1.3,
            label=name,
            clip_on=False,  # a gate of 1 lies on the frame
        )
    axes.set_xticks(range(len(layers)), layers, rotation=35 if len(layers) < 30 else 90, ha="right")
    axes.set_title(chart.title)
    axes.set_ylabel(chart.y_label)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]), top=chart.limit)
    axes.grid(axis="y")
    axes.legend()
    return figure


@draw_chart.register
def _draw_bars(chart: Bars, models: Sequence[str] = ()) -> Any:
    groups, number = chart.groups, len(chart.series)
    figure, axes = pyplot().subplots(figsize=(4.6, (0.14 * number + 0.1) * len(groups) + 0.9))
    for i, ((name, values), colour) in enumerate(
        zip(chart.series.items(), _series_colours(chart.series, models), strict=True)
    ):
        centres = np.arange(len(groups)) + (i - (number - 1) / 2) * 0.8 / number
        heights = [values.get(group, np.nan) for group in groups]
        axes.barh(centres, heights, 0.72 / number, color=colour, label=name)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.set_title(chart.title)
    axes.set_xlabel(chart.y_label)
    axes.grid(axis="x")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


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


@draw_chart.register
def _draw_matrix(chart: Matrix, models: Sequence[str] = ()) -> Any:
    numbered = len(chart.columns) <= MAX_NUMBERED_COLUMNS
    wide = 0.42 if numbered else 0.26  # inches of a cell; a letter takes 0.08
    figure, axes = pyplot().subplots(figsize=(wide * len(chart.columns) + 2.2, 0.26 * len(chart.rows) + 1.4))
    colours = "RdBu_r" if chart.low < 0 else "viridis"
    values = np.array(chart.values, float)
    image = axes.imshow(values, cmap=colours, vmin=chart.low, vmax=chart.high, interpolation="nearest")
    axes.set_aspect(0.26 / wide)
    if numbered:
        _write_cells(axes, image, values)
    turned = max(map(len, chart.columns), default=0) * 0.08 > wide
    axes.set_xticks(range(len(chart.columns)), chart.columns, rotation=90 if turned else 0)
    axes.set_yticks(range(len(chart.rows)), chart.rows)
    axes.set_title(chart.title)
    axes.set_xlabel(chart.column_label)
    axes.set_ylabel(chart.row_label)
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
    bar.outline.set_visible(False)
    return figure


@draw_chart.register
def _draw_paths(chart: Paths, models: Sequence[str] = ()) -> Any:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(3.6, 3.6))
    shades = plt.get_cmap("viridis")(np.linspace(0.9, 0.15, len(chart.series)))
    for (layer, heads), colour in zip(chart.series.items(), shades, strict=True):
        for i, path in enumerate(heads):
            rows, columns = zip(*path, strict=True) if path else ([], [])
            axes.plot(columns, rows, color=colour, lw=1, label=None if i else layer)
            axes.plot(columns[:1], rows[:1], "o", mfc="none", color=colour, ms=4)
            axes.plot(columns[-1:], rows[-1:], "o", color=colour, ms=4)
    axes.plot(0, 0, "+", color=INK, ms=8)
    axes.set(xlim=(-1.08 * chart.reach, 1.08 * chart.reach), ylim=(1.08 * chart.reach, -1.08 * chart.reach))
    axes.set_aspect("equal")
    axes.set_title(chart.title)
    axes.set_xlabel("column, grid steps")
    axes.set_ylabel("row")
    axes.grid()
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


@draw_chart.register
def _draw_scatter(chart: Scatter, models: Sequence[str] = ()) -> Any:
    figure, axes = pyplot().subplots(figsize=(4.6, 3.2))
    for (name, points), colour in zip(chart.series.items(), _series_colours(chart.series, models), strict=True):
        axes.scatter(*zip(*points.values(), strict=True), s=20, color=colour, label=name, zorder=3)
        for label, point in points.items():
            axes.annotate(label, point, (4, 4), textcoords="offset points", fontsize=7, annotation_clip=False)
    axes.set_xlim(left=0)
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid()
    if len(chart.series) > 1:
        axes.legend()
    return figure


def _remove_axes(cell: Any) -> None:
    """Remove ticks and frame from axes that show an image."""
    cell.set_xticks([])
    cell.set_yticks([])
    for spine in cell.spines.values():
        spine.set_visible(False)


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
            _remove_axes(cell)
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
                cell.set_xticks([])
                cell.set_yticks([])
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
            _plot_panel(cell, panel)
        figure.tight_layout()
        return _as_svg(figure)
