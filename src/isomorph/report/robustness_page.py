"""The page of `isomorph robustness`: a metric by corruption and severity, of one model or next to a baseline."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from isomorph.data.corruptions.corrupt import EXTRA_CORRUPTIONS, IMAGENET_C_CORRUPTIONS
from isomorph.data.corruptions.dataset import CLEAN
from isomorph.report import guides
from isomorph.report.charts import Bars, Chart, Matrix, Table
from isomorph.report.findings import robustness_finding
from isomorph.report.html import Section, write_page

AccuracyCells = Mapping[tuple[str, int], float]
"""Top-1, or another metric (%), by (corruption, severity); of the clean images under ("clean", 0)."""
RobustnessData = tuple[Mapping[str, AccuracyCells], str, Sequence[str]]
"""Cells by model, a text on what was measured, and lines on what could not be read."""
SUITES = (("", "", IMAGENET_C_CORRUPTIONS), ("Extra corruptions: ", "extra: ", EXTRA_CORRUPTIONS))
"""Prefixes of chart titles and table heads, and names, of the 15 corruptions of the suite and of the extra ones."""


def _select(cells: AccuracyCells, corruptions: Sequence[str]) -> AccuracyCells:
    """Return the cells of some corruptions, in their order, by severity."""
    known = [cell for cell in cells if cell[0] in corruptions]
    return {cell: cells[cell] for cell in sorted(known, key=lambda cell: (corruptions.index(cell[0]), cell[1]))}


def _mean_by_corruption(cells: AccuracyCells) -> dict[str, float]:
    """Return the mean over severities."""
    names = dict.fromkeys(name for name, _ in cells)
    return {name: fmean(value for cell, value in cells.items() if cell[0] == name) for name in names}


def _mean_by_severity(cells: AccuracyCells) -> dict[str, float]:
    """Return the mean over corruptions."""
    levels = sorted({severity for _, severity in cells})
    return {f"severity {s}": fmean(value for cell, value in cells.items() if cell[1] == s) for s in levels}


def _cell_matrix(title: str, values: AccuracyCells, low: float, high: float) -> Matrix:
    """Return a chart of values by corruption (down) and severity (across)."""
    rows, columns = list(dict.fromkeys(c for c, _ in values)), sorted({s for _, s in values})
    numbers = [[values.get((row, column), math.nan) for column in columns] for row in rows]
    return Matrix(title, "corruption", "severity", rows, [str(c) for c in columns], numbers, low, high)


def robustness_charts(results: Mapping[str, AccuracyCells], metric: str = "top-1") -> list[Chart]:
    """Return charts of the suite's 15 corruptions, then of the extra ones, both without the clean images.

    The differences of two models have one colour scale in both.
    """
    suites = {
        title: {name: cells for name, all_ in results.items() if (cells := _select(all_, corruptions))}
        for title, _, corruptions in SUITES
    }
    largest = max((abs(points) for suite in suites.values() for points in _gains(suite).values()), default=0.0) or 1.0
    return [
        chart for prefix, suite in suites.items() if suite for chart in _suite_charts(prefix, suite, largest, metric)
    ]


def _gains(results: Mapping[str, AccuracyCells]) -> AccuracyCells:
    """Return the second of two models minus the first, cell by cell; empty for another number of models."""
    if len(results) != 2:
        return {}
    first, second = results.values()
    return {cell: second[cell] - first[cell] for cell in first if cell in second}


def _suite_charts(prefix: str, results: Mapping[str, AccuracyCells], largest_gain: float, metric: str) -> list[Chart]:
    """Return bars by corruption and by severity, and the cells: of two models their difference, else of each model."""
    by_corruption = {name: _mean_by_corruption(cells) for name, cells in results.items()}
    by_severity = {name: _mean_by_severity(cells) for name, cells in results.items()}
    charts: list[Chart] = [
        Bars(f"{prefix}By corruption, mean over severities", f"{metric}, %", by_corruption),
        Bars(f"{prefix}By severity, mean over corruptions", f"{metric}, %", by_severity),
    ]
    if len(results) == 2:
        first, second = results
        title, gains = f"{prefix}Points gained (red) or lost (blue): {second} minus {first}", _gains(results)
        return [*charts, _cell_matrix(title, gains, -largest_gain, largest_gain)] if gains else charts
    return [
        *charts,
        *(
            _cell_matrix(f"{prefix}{metric[:1].upper()}{metric[1:]} (%) of {name}", cells, 0.0, 100.0)
            for name, cells in results.items()
        ),
    ]


def _shared_cells(results: Mapping[str, AccuracyCells], corruptions: Sequence[str]) -> dict[str, AccuracyCells]:
    """Return the cells of some corruptions that all models have, of each model."""
    selected = {name: _select(cells, corruptions) for name, cells in results.items()}
    return {
        name: {cell: value for cell, value in cells.items() if all(cell in others for others in selected.values())}
        for name, cells in selected.items()
    }


def shared_means(results: Mapping[str, AccuracyCells]) -> dict[str, dict[str, float]]:
    """Return the mean by corruption of each model, over the suite's cells that all models have.

    Of results with extra corruptions only, over those.
    """
    for _, _, corruptions in SUITES:
        means = {name: _mean_by_corruption(of) for name, of in _shared_cells(results, corruptions).items()}
        if any(means.values()):
            break
    return means


def _two_decimals(value: float | None) -> str:
    """Return the number with two decimals, a dash for None."""
    return "-" if value is None else f"{value:.2f}"


def robustness_table(results: Mapping[str, AccuracyCells], metric: str = "top-1") -> Table:
    """Return a table of the clean metric and means over the suite's and the extra cells that all models have."""
    rows = [
        ["", f"clean {metric} (%)"],
        *([name, _two_decimals(cells.get((CLEAN, 0)))] for name, cells in results.items()),
    ]
    for _, prefix, corruptions in SUITES:
        counts = [len(_select(cells, corruptions)) for cells in results.values()]
        if not any(counts):
            continue
        shared = list(_shared_cells(results, corruptions).values())
        mean = metric if metric.startswith("mean ") else f"mean {metric}"
        rows[0] += [f"{prefix}cells", f"{prefix}{mean} (%) over {len(shared[0])} shared cells"]
        for row, count, cells in zip(rows[1:], counts, shared, strict=True):
            row += [str(count), _two_decimals(fmean(_mean_by_corruption(cells).values()) if cells else None)]
    return rows


def write_robustness(
    path: Path,
    results: Mapping[str, AccuracyCells],
    metric: str,
    measured: Sequence[str],
    table: Table,
    footer: str = "",
) -> int:
    """Write the page and return its size in bytes. `measured` are lines on the images, `table` has every corruption.

    `results` are the cells of the baseline, if there is one, and of the model, by name; `metric` is what they hold, in
    words ("top-1", "mean IoU").

    Raises: UserError when it cannot be written.
    """
    sections = [
        Section("Clean and corrupted images", " ".join(measured), table=robustness_table(results, metric)),
        Section("By corruption and severity", charts=robustness_charts(results, metric), guide=guides.ROBUSTNESS),
        Section("Every corruption and category", "Columns are severities.", table=table),
    ]
    return write_page(path, "Robustness", robustness_finding(shared_means(results), metric), sections, footer)
