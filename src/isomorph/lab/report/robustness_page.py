"""The page of `isomorph robustness`: top-1 by corruption and severity, of one model or next to a baseline."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from isomorph.lab.data.corruptions.corrupt import CLEAN, EXTRA_CORRUPTIONS, IMAGENET_C_CORRUPTIONS
from isomorph.lab.evaluation.robustness.cells import SavedResult
from isomorph.lab.evaluation.robustness.scores import severity_table, summary_lines
from isomorph.lab.report import guides
from isomorph.lab.report.charts import Bars, Chart, Matrix, Table
from isomorph.lab.report.html import Section, write_page

# Top-1 (%) by (corruption, severity); of the clean images under ("clean", 0).
CellValues = Mapping[tuple[str, int], float]


def _corrupted(cells: CellValues) -> CellValues:
    order = (*IMAGENET_C_CORRUPTIONS, *EXTRA_CORRUPTIONS)
    corrupted = (cell for cell in cells if cell[0] != CLEAN)
    return {cell: cells[cell] for cell in sorted(corrupted, key=lambda cell: order.index(cell[0]))}


def _keys(cells: CellValues, axis: int) -> list[Any]:
    found = dict.fromkeys(cell[axis] for cell in cells)
    return sorted(found) if axis else list(found)


def _means(cells: CellValues, axis: int) -> dict[Any, float]:
    return {key: fmean(v for cell, v in cells.items() if cell[axis] == key) for key in _keys(cells, axis)}


def _suite(cells: CellValues) -> CellValues:
    corrupted = _corrupted(cells)
    return {cell: value for cell, value in corrupted.items() if cell[0] in IMAGENET_C_CORRUPTIONS} or corrupted


def robustness_charts(results: Mapping[str, CellValues]) -> list[Chart]:
    """Return bars by corruption and by severity, and the cells: of two models their difference, else of each model.

    Means by severity are over the suite's corruptions. Two models have the same cells.
    """
    cells = {name: _corrupted(own) for name, own in results.items()}
    by_corruption = {name: _means(own, 0) for name, own in cells.items()}
    by_severity = {
        name: {f"severity {severity}": mean for severity, mean in _means(_suite(own), 1).items()}
        for name, own in cells.items()
    }
    charts: list[Chart] = [
        Bars("By corruption, mean over severities", "top-1, %", by_corruption),
        Bars("By severity, mean over corruptions", "top-1, %", by_severity),
    ]
    limits = 0.0, 100.0
    matrices = {f"Top-1 (%) of {name}": own for name, own in cells.items()}
    if len(cells) == 2:
        first, second = cells.values()
        change = {cell: second[cell] - first[cell] for cell in first}
        largest = max(map(abs, change.values())) or 1.0
        matrices = {"Points gained (red) or lost (blue): {1} minus {0}".format(*cells): change}
        limits = -largest, largest
    for title, own in matrices.items():
        rows = _keys(own, 0)
        columns = _keys(own, 1)
        values = [[own.get((row, column), math.nan) for column in columns] for row in rows]
        charts.append(Matrix(title, "corruption", "severity", rows, list(map(str, columns)), values, *limits))
    return charts


def robustness_table(results: Mapping[str, CellValues]) -> Table:
    """Return a table of top-1 on the clean images, and its mean over the suite's cells."""
    rows = [["", "clean top-1 (%)", "cells", "mean top-1 under corruption (%)"]]
    for name, cells in results.items():
        clean = cells.get((CLEAN, 0))
        suite = _suite(cells)
        texts = [
            "-" if clean is None else f"{clean:.2f}",
            str(len(suite)),
            f"{fmean(_means(suite, 0).values()):.2f}",
        ]
        rows.append([name, *texts])
    return rows


def robustness_finding(results: Mapping[str, CellValues]) -> str:
    """Return the mean top-1 of a model and its lowest corruption, or of two models the best and worst change."""
    (name, means), *others = ((name, _means(_suite(cells), 0)) for name, cells in results.items())
    average = fmean(means.values())
    if not others:
        worst = min(means, key=means.__getitem__)
        reached = f"{name} reaches {average:.2f} % top-1 on corrupted images"
        return f"{reached}; its lowest is {means[worst]:.2f} %, under {worst}."
    second, new = others[0]
    gains = {corruption: new[corruption] - means[corruption] for corruption in means}
    best, worst = (choose(gains, key=gains.__getitem__) for choose in (max, min))
    change = fmean(new.values()) - average
    if change:
        verdict = f"{abs(change):.2f} points {'above' if change > 0 else 'below'} {name}"
    else:
        verdict = f"equal to {name}"
    reached = f"On corrupted images {second} reaches {average + change:.2f} % top-1, {verdict}"
    return f"{reached}: {gains[best]:+.2f} under {best}, {gains[worst]:+.2f} under {worst}."


def write_robustness(path: Path, result: Mapping[str, Any], baseline: SavedResult | None, footer: str = "") -> int:
    """Write the page of a result of `iso.robustness`, on the cells that its baseline has too, and return its size.

    Raises: UserError when it cannot be written.
    """
    name = result["model"]
    cells = [*([result["clean"]] if result["clean"] else []), *result["cells"]]
    own = {(cell["corruption"], cell["severity"]): float(cell["top1"]) for cell in cells}
    results: dict[str, CellValues] = {name: own}
    if baseline:
        first = str(baseline.identity["model"])
        common = own.keys() & baseline.cells.keys()
        base = {key: float(baseline.cells[key]["top1"]) for key in common}
        results = {
            f"{first} (baseline)" if first == name else first: base,
            name: {key: own[key] for key in common},
        }
    measured = " ".join(f"{line[:1].upper()}{line[1:]}." for line in summary_lines(result))
    sections = [
        Section("Clean and corrupted images", measured, table=robustness_table(results)),
        Section("By corruption and severity", charts=robustness_charts(results), guide=guides.ROBUSTNESS),
        Section("Every corruption and category", "Columns are severities.", table=severity_table(result)),
    ]
    return write_page(path, "Robustness", robustness_finding(results), sections, footer)
