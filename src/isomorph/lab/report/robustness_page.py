"""The page of `isomorph robustness`: top-1 by corruption and severity, of one model or next to a baseline."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from isomorph.json_values import JsonObject
from isomorph.lab.data.corruptions.corrupt import CLEAN, EXTRA_CORRUPTIONS, IMAGENET_C_CORRUPTIONS
from isomorph.lab.evaluation.robustness.cells import SavedResult
from isomorph.lab.evaluation.robustness.scores import (
    CellValues,
    means_by_corruption,
    means_by_severity,
    severity_table,
    summary_lines,
)
from isomorph.lab.report import guides
from isomorph.lab.report.charts import Bars, Chart, Matrix
from isomorph.lab.report.html import Section, write_page
from isomorph.terminal_tables import Table


def _corrupted(cells: CellValues) -> CellValues:
    """Return the cells of corrupted images, without ("clean", 0), in the suite's order of corruptions."""
    order = (*IMAGENET_C_CORRUPTIONS, *EXTRA_CORRUPTIONS)
    corrupted = [cell for cell in cells if cell[0] != CLEAN]
    corrupted.sort(key=lambda cell: order.index(cell[0]))
    return {cell: cells[cell] for cell in corrupted}


def _suite(cells: CellValues) -> CellValues:
    """Return the cells of the suite's corruptions; of the extra ones if there are no others."""
    corrupted = _corrupted(cells)
    suite = {cell: top1 for cell, top1 in corrupted.items() if cell[0] in IMAGENET_C_CORRUPTIONS}
    return suite or corrupted


def robustness_charts(results: Mapping[str, CellValues]) -> list[Chart]:
    """Return bars by corruption and by severity, and the cells: of two models their difference, else of each model.

    Means by severity are over the suite's corruptions. Two models have the same cells.
    """
    cells = {name: _corrupted(own) for name, own in results.items()}
    by_corruption = {name: means_by_corruption(own) for name, own in cells.items()}
    by_severity = {}
    for name, own in cells.items():
        means = means_by_severity(_suite(own))
        by_severity[name] = {f"severity {severity}": mean for severity, mean in means.items()}
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
        charts.append(_matrix(title, own, *limits))
    return charts


def _matrix(title: str, cells: CellValues, low: float, high: float) -> Matrix:
    corruptions = list(dict.fromkeys(corruption for corruption, _ in cells))
    severities = sorted({severity for _, severity in cells})
    values = []
    for corruption in corruptions:
        values.append([cells.get((corruption, severity), math.nan) for severity in severities])
    columns = list(map(str, severities))
    return Matrix(title, "corruption", "severity", corruptions, columns, values, low, high)


def robustness_table(results: Mapping[str, CellValues]) -> Table:
    """Return a table of top-1 on the clean images, and its mean over the suite's cells."""
    rows = [["", "clean top-1 (%)", "cells", "mean top-1 under corruption (%)"]]
    for name, cells in results.items():
        clean = cells.get((CLEAN, 0))
        suite = _suite(cells)
        clean_text = "-" if clean is None else f"{clean:.2f}"
        average = fmean(means_by_corruption(suite).values())
        rows.append([name, clean_text, str(len(suite)), f"{average:.2f}"])
    return rows


def robustness_finding(results: Mapping[str, CellValues]) -> str:
    """Return the mean top-1 of a model and its lowest corruption, or of two models the best and worst change."""
    all_means = [(name, means_by_corruption(_suite(cells))) for name, cells in results.items()]
    (name, means), *others = all_means
    average = fmean(means.values())
    if not others:
        worst = min(means, key=means.__getitem__)
        reached = f"{name} reaches {average:.2f} % top-1 on corrupted images"
        return f"{reached}; its lowest is {means[worst]:.2f} %, under {worst}."
    second, new = others[0]
    gains = {corruption: new[corruption] - means[corruption] for corruption in means}
    best = max(gains, key=gains.__getitem__)
    worst = min(gains, key=gains.__getitem__)
    change = fmean(new.values()) - average
    verdict = f"equal to {name}"
    if change > 0:
        verdict = f"{change:.2f} points above {name}"
    elif change < 0:
        verdict = f"{-change:.2f} points below {name}"
    reached = f"On corrupted images {second} reaches {average + change:.2f} % top-1, {verdict}"
    return f"{reached}: {gains[best]:+.2f} under {best}, {gains[worst]:+.2f} under {worst}."


def write_robustness(
    path: Path, result: JsonObject, baseline: SavedResult | None, footer: str = ""
) -> int:
    """Write the page of a result of `iso.robustness`, on the cells that its baseline has too, and return its size.

    Raises: UserError when it cannot be written.
    """
    name = result["model"]
    cells = list(result["cells"])
    if result["clean"]:
        cells.insert(0, result["clean"])
    own = {(cell["corruption"], cell["severity"]): float(cell["top1"]) for cell in cells}
    results: dict[str, CellValues] = {name: own}
    if baseline:
        first = str(baseline.identity["model"])
        if first == name:
            first = f"{first} (baseline)"
        common = own.keys() & baseline.cells.keys()
        base = {key: float(baseline.cells[key]["top1"]) for key in common}
        results = {first: base, name: {key: own[key] for key in common}}
    sentences = [f"{line[:1].upper()}{line[1:]}." for line in summary_lines(result)]
    measured = " ".join(sentences)
    sections = [
        Section("Clean and corrupted images", measured, table=robustness_table(results)),
        Section(
            "By corruption and severity", charts=robustness_charts(results), guide=guides.ROBUSTNESS
        ),
        Section(
            "Every corruption and category", "Columns are severities.", table=severity_table(result)
        ),
    ]
    return write_page(path, "Robustness", robustness_finding(results), sections, footer)
