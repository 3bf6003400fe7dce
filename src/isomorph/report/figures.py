"""Figures for papers and documentation, in one style: the page's charts, and attention maps, through matplotlib."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, singledispatch
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from isomorph.report.charts import Bars, Dots, Line, Matrix, Panel, Paths, Scatter

INK, PALETTE = "#808890", ("#3b7dd8", "#e07b39", "#3fa66b", "#b15fc4", "#c9a227", "#d1495b")
NUMBERED = 12
"""Columns of a matrix up to which its numbers are written into its cells."""
__all__ = [
    "Line",
    "Look",
    "Panel",
    "draw",
    "maps_figure",
    "matrices_figure",
    "panels_figure",
    "pyplot",
    "style",
]


@cache
def pyplot() -> Any:
    """matplotlib's pyplot, without a display."""
    import matplotlib  # here, as it takes a third of a second that commands without figures need not wait

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


@contextmanager
def style(ink: str = INK) -> Iterator[None]:
    """The style of every figure: text and axes in `ink` (grey reads on light and dark pages), no box, no background."""
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
    """The figure as an <svg> element; the figure is closed."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight")
    pyplot().close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _tints(series: Iterable[str], models: Sequence[str] = ()) -> list[str]:
    """A colour for each series: of models by their places among `models`, as on the page; of others by their own."""
    names = list(series)
    places = map(models.index, names) if set(names) <= set(models) else range(len(names))
    return [PALETTE[i % len(PALETTE)] for i in places]


def _plot_panel(cell: Any, panel: Panel, models: Sequence[str] = ()) -> None:
    """Draws lines and their ranges on a pair of axes."""
    shades = pyplot().get_cmap("viridis")(np.linspace(0.9, 0.15, len(panel.lines)))
    colours = shades if panel.ordered else _tints(panel.lines, models)
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
    """A chart of the page as a matplotlib figure; call it within `style`. `models` of the page, for their colours."""
    raise TypeError(f"{type(chart).__name__} is no chart")


@draw_chart.register
def draw_panel(chart: Panel, models: Sequence[str] = ()) -> Any:
    figure, axes = pyplot().subplots(figsize=(4.2, 2.7))
    _plot_panel(axes, chart, models)
    return figure


@draw_chart.register
def draw_dots(chart: Dots, models: Sequence[str] = ()) -> Any:
    layers = chart.layers
    figure, axes = pyplot().subplots(figsize=(max(3.4, 0.36 * len(layers) + 1.4), 2.7))
    for i, ((name, values), colour) in enumerate(zip(chart.series.items(), _tints(chart.series, models), strict=True)):
        shift = (i - (len(chart.series) - 1) / 2) * 0.22
        found = [(at + shift, list(values[layer])) for at, layer in enumerate(layers) if layer in values]
        for at, heads in found:
            axes.scatter([at] * len(heads), heads, s=14, alpha=0.65, color=colour, lw=0, clip_on=False)
        axes.plot(
            [at for at, _ in found],
            [np.nanmean(heads) if np.isfinite(heads).any() else np.nan for _, heads in found],
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
def draw_bars(chart: Bars, models: Sequence[str] = ()) -> Any:
    groups, number = chart.groups, len(chart.series)
    figure, axes = pyplot().subplots(figsize=(4.6, (0.14 * number + 0.1) * len(groups) + 0.9))
    for i, ((name, values), colour) in enumerate(zip(chart.series.items(), _tints(chart.series, models), strict=True)):
        places = np.arange(len(groups)) + (i - (number - 1) / 2) * 0.8 / number
        heights = [values.get(group, np.nan) for group in groups]
        axes.barh(places, heights, 0.72 / number, color=colour, label=name)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.set_title(chart.title)
    axes.set_xlabel(chart.y_label)
    axes.grid(axis="x")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def decimals(values: np.ndarray) -> int:
    """Decimals with which the largest of some numbers has three digits; one for 100 (100.0 %)."""
    top = np.nanmax(np.abs(values), initial=0.0)
    if top == 0 or top > 100:
        return int(top == 0)
    return int(np.clip(2 - np.floor(np.log10(top)), 1, 5))


def write_cells(axes: Any, image: Any, values: np.ndarray) -> None:
    """Writes the numbers of a picture of numbers into its cells, all with the same decimals."""
    digits = decimals(values)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            dark = np.dot(image.cmap(image.norm(value))[:3], (0.3, 0.59, 0.11)) < 0.55
            colour = "white" if dark else "black"
            axes.text(column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize=6.5, color=colour)


@draw_chart.register
def draw_matrix(chart: Matrix, models: Sequence[str] = ()) -> Any:
    numbered = len(chart.columns) <= NUMBERED
    wide = 0.42 if numbered else 0.26  # inches of a cell; a letter takes 0.08
    figure, axes = pyplot().subplots(figsize=(wide * len(chart.columns) + 2.2, 0.26 * len(chart.rows) + 1.4))
    colours = "RdBu_r" if chart.low < 0 else "viridis"
    values = np.array(chart.values, float)
    image = axes.imshow(values, cmap=colours, vmin=chart.low, vmax=chart.high, interpolation="nearest")
    axes.set_aspect(0.26 / wide)
    if numbered:
        write_cells(axes, image, values)
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
def draw_paths(chart: Paths, models: Sequence[str] = ()) -> Any:
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
    axes.set_xlabel("column, steps of the grid")
    axes.set_ylabel("row")
    axes.grid()
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


@draw_chart.register
def draw_scatter(chart: Scatter, models: Sequence[str] = ()) -> Any:
    figure, axes = pyplot().subplots(figsize=(4.6, 3.2))
    for (name, points), colour in zip(chart.series.items(), _tints(chart.series, models), strict=True):
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


def _plain_cell(cell: Any) -> None:
    """Axes without ticks and frame, to show a picture."""
    cell.set_xticks([])
    cell.set_yticks([])
    for spine in cell.spines.values():
        spine.set_visible(False)


class QueryMaps(NamedTuple):
    """What the heads of a layer see from one of its queries, and which one on its grid. Shape: maps (heads, h, w)"""

    maps: np.ndarray
    query: tuple[int, int]
    grid: tuple[int, int]


def frame(cell: Any, look: QueryMaps, height: int, width: int) -> None:
    """Draws the query's patch on a picture of `height` x `width` pixels."""
    (row, column), (rows, columns) = look.query, look.grid
    corner, size = (column * width / columns, row * height / rows), (width / columns, height / rows)
    cell.add_patch(pyplot().Rectangle(corner, *size, fill=False, ec="#ff3b30", lw=1.2, clip_on=False))


def maps_figure(image: np.ndarray, rows: Mapping[str, QueryMaps], title: str = "") -> Any:
    """Attention maps of every head (columns) for some layers (rows), beside the image and the patch looked from.

    Each map on a scale of its own; call it within `style`.

    Shape: image (H, W, 3) in 0..1
    """
    heads, (height, width) = max(len(look.maps) for look in rows.values()), image.shape[:2]
    size = (0.92 * (heads + 1), 1.0 * len(rows) * height / width)
    figure, axes = pyplot().subplots(len(rows), heads + 1, figsize=size, squeeze=False)
    axes[0, 0].set_title(title, loc="left", pad=14)
    for number, cell in enumerate(axes[0, 1:], 1):
        cell.set_title(f"head {number}", fontsize=7, pad=3)
    for line, (name, look) in zip(axes, rows.items(), strict=True):
        for cell in line:
            _plain_cell(cell)
        line[0].imshow(image, interpolation="nearest", extent=(0, width, height, 0))
        frame(line[0], look, height, width)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
        for cell, values in zip(line[1:], look.maps, strict=False):
            signed, top = bool((values < 0).any()), float(np.abs(values).max())
            low, colours = (-top, "RdBu_r") if signed else (0.0, "magma")
            cell.imshow(values, cmap=colours, interpolation="nearest", vmin=low, vmax=top, extent=(0, width, height, 0))
    figure.subplots_adjust(wspace=0.06, hspace=0.08)
    return figure


def matrices_figure(rows: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Whole attention maps as SVG text, one network a row, one block a column: queries down, keys across.

    Red is attention, blue negative attention, each map on a scale of its own, given above it (Refiner Fig. 5).

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
    """Panels of lines side by side as SVG text, each with its own legend."""
    rows = -(-len(panels) // columns)
    with style():
        figure, axes = pyplot().subplots(rows, columns, figsize=(3.4 * columns, 2.7 * rows), squeeze=False)
        for cell in axes.flat[len(panels) :]:
            cell.set_visible(False)
        for cell, panel in zip(axes.flat, panels, strict=False):
            _plot_panel(cell, panel)
        figure.tight_layout()
        return _as_svg(figure)
