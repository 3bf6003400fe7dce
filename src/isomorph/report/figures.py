"""Figures as SVG text, in one style that reads on light and dark pages."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from torch import Tensor

matplotlib.use("Agg")
import matplotlib.pyplot as plt

INK, PALETTE = "#808890", ("#3b7dd8", "#e07b39", "#3fa66b", "#b15fc4", "#c9a227", "#d1495b")
STYLE: dict[str, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
}


def as_svg(figure: Any) -> str:
    """The figure as an <svg> element; the figure is closed."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight")
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def dials_figure(stages: Mapping[str, Mapping[str, Tensor]], label: str, limit: float | None = None) -> str:
    """One value per head and layer (gates, spans), as a strip of dots per layer, one colour per stage of training."""
    layers = list(next(iter(stages.values())))
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 0.42 * len(layers) + 1.0))
        for i, (stage, values) in enumerate(stages.items()):
            shift = (i - (len(stages) - 1) / 2) * 0.22
            for row, layer in enumerate(layers):
                heads = values[layer].float().cpu().numpy()
                name = stage if row == 0 else None
                axes.scatter(
                    heads, np.full(len(heads), row + shift), s=16, alpha=0.75, color=PALETTE[i % 6], label=name, lw=0
                )
        axes.set_yticks(range(len(layers)), layers)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        if limit is not None:
            axes.set_xlim(-0.03 * limit, 1.03 * limit)
        axes.grid(axis="x", color=INK, alpha=0.25)
        axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=len(stages), frameon=False)
        return as_svg(figure)


def maps_figure(
    image: np.ndarray, rows: Mapping[str, Tensor], gates: Mapping[str, Tensor], query: tuple[float, float]
) -> str:
    """Attention maps of every head (columns) for some layers (rows), beside the image and the query looked from.

    Shape: image (H, W, 3) in 0..1; rows {title: (heads, h, w)}; gates {title: (heads,)}; query (row, column) in 0..1
    """
    heads = max(len(maps) for maps in rows.values())
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(len(rows), heads + 1, figsize=(0.92 * (heads + 1), 1.08 * len(rows)), squeeze=False)
        for line, (title, maps) in zip(axes, rows.items(), strict=True):
            for cell in line:
                cell.set_xticks([])
                cell.set_yticks([])
                for spine in cell.spines.values():
                    spine.set_visible(False)
            line[0].imshow(image, interpolation="nearest")
            height, width = image.shape[:2]
            line[0].plot(query[1] * width - 0.5, query[0] * height - 0.5, "s", mfc="none", mec="#ff3b30", ms=7, mew=1.6)
            line[0].set_ylabel(title, rotation=0, ha="right", va="center")
            for head, cell in enumerate(line[1 : len(maps) + 1]):
                cell.imshow(maps[head].float().cpu().numpy(), cmap="magma", interpolation="nearest", vmin=0)
                cell.set_title(f"{float(gates[title][head]):.2f}", fontsize=7, color="#d1495b", pad=2)
        figure.subplots_adjust(wspace=0.08, hspace=0.32)
        return as_svg(figure)


def matrices_figure(rows: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Whole attention maps, one network a row, one block a column: queries down, keys across (Refiner Fig. 5).

    Red is attention, blue negative attention, each map on a scale of its own, given above it.

    Shape: rows {network: {block: (N, N)}}
    """
    columns = max(len(maps) for maps in rows.values())
    with plt.style.context(STYLE):
        size = (1.35 * columns + 0.6, 1.55 * len(rows))
        figure, axes = plt.subplots(len(rows), columns, figsize=size, squeeze=False)
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
        return as_svg(figure)


def curves_figure(curves: Mapping[str, Sequence[float]], label: str) -> str:
    """One line per run over epochs."""
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 2.6))
        for i, (name, values) in enumerate(curves.items()):
            axes.plot(range(len(values)), values, marker="o", ms=3.5, color=PALETTE[i % 6], label=name)
        axes.set_xlabel("epoch of fine-tuning (0: before)")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axes.grid(color=INK, alpha=0.25)
        axes.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        return as_svg(figure)


class Line(NamedTuple):
    """A line, and the range around it where there is one."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


class Panel(NamedTuple):
    """One pair of axes. `ordered` lines (blocks by depth) go from light to dark."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Line]
    ordered: bool = False


def panels_figure(panels: Sequence[Panel], columns: int = 3) -> str:
    """Panels of lines side by side, each with its own legend."""
    rows = -(-len(panels) // columns)
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(rows, columns, figsize=(3.4 * columns, 2.7 * rows), squeeze=False)
        for cell in axes.flat[len(panels) :]:
            cell.set_visible(False)
        for cell, panel in zip(axes.flat, panels, strict=False):
            shades = plt.get_cmap("viridis")(np.linspace(0.9, 0.15, len(panel.lines)))
            colours = shades if panel.ordered else PALETTE
            for (name, line), colour in zip(panel.lines.items(), colours, strict=False):
                cell.plot(line.x, line.y, marker="o", ms=3, lw=1.5, color=colour, label=name)
                if line.low is not None and line.high is not None:
                    cell.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, lw=0)
            cell.set_title(panel.title, fontsize=9)
            cell.set_xlabel(panel.x_label)
            cell.set_ylabel(panel.y_label)
            cell.grid(color=INK, alpha=0.25)
            cell.legend(frameon=False, fontsize=7, ncols=2 if len(panel.lines) > 3 else 1)
        figure.tight_layout()
        return as_svg(figure)
