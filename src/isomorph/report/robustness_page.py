"""The page of `isomorph robustness`: a metric by corruption and severity, of one model or next to a baseline."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from isomorph.data.corruptions.corrupt import CLEAN, EXTRA_CORRUPTIONS, IMAGENET_C_CORRUPTIONS
from isomorph.evaluation.robustness.cells import SavedResult
from isomorph.evaluation.robustness.scores import metric_name, metric_of, severity_table, summary_lines
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


def _select(results: Mapping[str, AccuracyCells], corruptions: Sequence[str]) -> dict[str, AccuracyCells]:
    """Return the cells of some corruptions of every model, in their order, by severity."""
    order = {
        name: sorted((c for c in cells if c[0] in corruptions), key=lambda c: (corruptions.index(c[0]), c[1]))
        for name, cells in results.items()
    }
    return {name: {cell: results[name][cell] for cell in own} for name, own in order.items()}


def _shared(results: Mapping[str, AccuracyCells]) -> dict[str, AccuracyCells]:
    """Return the cells that all models have."""
    both = set.intersection(*map(set, results.values())) if results else set()
    return {name: {cell: value for cell, value in cells.items() if cell in both} for name, cells in results.items()}


def _means(cells: AccuracyCells, key: Callable[[tuple[str, int]], str]) -> dict[str, float]:
    """Return the mean of the cells of each key, in the order of the first."""
    return {each: fmean(v for cell, v in cells.items() if key(cell) == each) for each in dict.fromkeys(map(key, cells))}


def _by_corruption(cells: AccuracyCells) -> dict[str, float]:
    """Return the mean over severities."""
    return _means(cells, lambda cell: cell[0])


def _cell_matrix(title: str, values: AccuracyCells, low: float, high: float) -> Matrix:
    """Return a chart of values by corruption (down) and severity (across)."""
    rows, columns = list(dict.fromkeys(c for c, _ in values)), sorted({s for _, s in values})
    numbers = [[values.get((row, column), math.nan) for column in columns] for row in rows]
    return Matrix(title, "corruption", "severity", rows, [str(c) for c in columns], numbers, low, high)


def robustness_charts(results: Mapping[str, AccuracyCells], metric: str = "top-1") -> list[Chart]:
    """Return charts of the suite's 15 corruptions, then of the extra ones, both without the clean images.

    Bars by corruption and by severity, and the cells: of two models their difference, on one colour scale, else of each
    model.
    """
    suites, changes, charts = {}, dict[str, AccuracyCells](), list[Chart]()
    for prefix, _, corruptions in SUITES:
        suites[prefix] = own = {name: cells for name, cells in _select(results, corruptions).items() if cells}
        if len(own) == 2:
            first, second = _shared(own).values()
            changes[prefix] = {cell: second[cell] - first[cell] for cell in first}
    largest = max((abs(points) for cells in changes.values() for points in cells.values()), default=0.0) or 1.0
    for prefix, own in suites.items():
        if not own:
            continue
        levels = {name: dict(sorted(cells.items(), key=lambda item: item[0][1])) for name, cells in own.items()}
        by_severity = {name: _means(cells, lambda cell: f"severity {cell[1]}") for name, cells in levels.items()}
        by_corruption = {name: _by_corruption(cells) for name, cells in own.items()}
        charts.append(Bars(f"{prefix}By corruption, mean over severities", f"{metric}, %", by_corruption))
        charts.append(Bars(f"{prefix}By severity, mean over corruptions", f"{metric}, %", by_severity))
        if prefix not in changes:
            title = f"{prefix}{metric[:1].upper()}{metric[1:]} (%) of "
            charts += [_cell_matrix(title + name, cells, 0.0, 100.0) for name, cells in own.items()]
        elif changes[prefix]:
            title = "{}Points gained (red) or lost (blue): {} minus {}".format(prefix, *reversed(own))
            charts.append(_cell_matrix(title, changes[prefix], -largest, largest))
    return charts


def shared_means(results: Mapping[str, AccuracyCells]) -> dict[str, dict[str, float]]:
    """Return the mean by corruption of each model, over the suite's cells that all models have.

    Of results with extra corruptions only, over those.
    """
    for _, _, corruptions in SUITES:
        means = {name: _by_corruption(cells) for name, cells in _shared(_select(results, corruptions)).items()}
        if any(means.values()):
            break
    return means


def robustness_table(results: Mapping[str, AccuracyCells], metric: str = "top-1") -> Table:
    """Return a table of the clean metric and means over the suite's and the extra cells that all models have."""

    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    rows = [["", f"clean {metric} (%)"], *([name, text(cells.get((CLEAN, 0)))] for name, cells in results.items())]
    mean = metric if metric.startswith("mean ") else f"mean {metric}"
    for _, prefix, corruptions in SUITES:
        own = _select(results, corruptions)
        if not any(own.values()):
            continue
        shared = _shared(own)
        rows[0] += [f"{prefix}cells", f"{prefix}{mean} (%) over {len(next(iter(shared.values())))} shared cells"]
        for row, (name, cells) in zip(rows[1:], shared.items(), strict=True):
            row += [str(len(own[name])), text(fmean(_by_corruption(cells).values()) if cells else None)]
    return rows


def write_robustness(path: Path, result: Mapping[str, Any], baseline: SavedResult | None, footer: str = "") -> int:
    """Write the page of a result of `iso.robustness`, next to its baseline's, and return its size in bytes.

    Raises: UserError when it cannot be written.
    """
    metric, name = metric_of(result), result["model"]
    cells = [*([result["clean"]] if result["clean"] else []), *result["cells"]]
    results = {name: {(cell["corruption"], cell["severity"]): float(cell[metric]) for cell in cells}}
    if baseline:
        first = str(baseline.identity["model"])
        own = {key: float(cell[metric]) for key, cell in baseline.cells.items() if key in results[name]}
        results = {f"{first} (baseline)" if first == name else first: own, **results}
    words = metric_name(result)
    measured = " ".join(f"{line[:1].upper()}{line[1:]}." for line in summary_lines(result))
    sections = [
        Section("Clean and corrupted images", measured, table=robustness_table(results, words)),
        Section("By corruption and severity", charts=robustness_charts(results, words), guide=guides.ROBUSTNESS),
        Section("Every corruption and category", "Columns are severities.", table=severity_table(result)),
    ]
    return write_page(path, "Robustness", robustness_finding(shared_means(results), words), sections, footer)
