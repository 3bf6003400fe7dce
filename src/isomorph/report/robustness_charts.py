"""Robustness results as charts: by corruption, by severity, and model against model."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from isomorph.data.corruptions.corrupt import EXTRA, IMAGENET_C
from isomorph.data.corruptions.dataset import CLEAN
from isomorph.report.charts import Bars, Chart, Matrix, Table

AccuracyCells = Mapping[tuple[str, int], float]
"""Top-1 (%) by corruption and severity; of the clean images as (clean, 0)."""
RobustnessData = tuple[Mapping[str, AccuracyCells], str, Sequence[str]]
"""Cells by model, in words what was measured, and what could not be read."""


def part(cells: AccuracyCells, corruptions: Sequence[str]) -> AccuracyCells:
    """The cells of some corruptions, in their order, by severity."""
    known = [cell for cell in cells if cell[0] in corruptions]
    return {cell: cells[cell] for cell in sorted(known, key=lambda cell: (corruptions.index(cell[0]), cell[1]))}


def by_corruption(cells: AccuracyCells) -> dict[str, float]:
    """Mean top-1 over severities."""
    names = dict.fromkeys(name for name, _ in cells)
    return {name: fmean(top1 for cell, top1 in cells.items() if cell[0] == name) for name in names}


def by_severity(cells: AccuracyCells) -> dict[str, float]:
    """Mean top-1 over corruptions."""
    levels = sorted({severity for _, severity in cells})
    return {f"severity {s}": fmean(top1 for cell, top1 in cells.items() if cell[1] == s) for s in levels}


def grid(title: str, values: AccuracyCells, low: float, high: float) -> Matrix:
    """Corruptions down, severities across."""
    rows, columns = list(dict.fromkeys(c for c, _ in values)), sorted({s for _, s in values})
    numbers = [[values.get((row, column), math.nan) for column in columns] for row in rows]
    return Matrix(title, "corruption", "severity", rows, [str(c) for c in columns], numbers, low, high)


def robustness_charts(results: Mapping[str, AccuracyCells]) -> list[Chart]:
    """Charts of the suite's 15 corruptions, then of the extra ones by themselves; neither has the clean images.

    What one of two models has more than the other is on one scale in both.
    """
    parts = {
        head: {name: cells for name, all_ in results.items() if (cells := part(all_, corruptions))}
        for head, corruptions in (("", IMAGENET_C), ("Extra corruptions: ", EXTRA))
    }
    most = max((abs(points) for kept in parts.values() for points in gains(kept).values()), default=0.0) or 1.0
    return [chart for head, kept in parts.items() if kept for chart in _charts_of(head, kept, most)]


def gains(results: Mapping[str, AccuracyCells]) -> AccuracyCells:
    """What the second of two models has more than the first, cell by cell; nothing for another number of models."""
    if len(results) != 2:
        return {}
    first, second = results.values()
    return {cell: second[cell] - first[cell] for cell in first if cell in second}


def _charts_of(head: str, results: Mapping[str, AccuracyCells], most: float) -> list[Chart]:
    """Bars by corruption and by severity; two models' difference by cell, up to `most`, or the one model's cells."""
    charts: list[Chart] = [
        Bars(
            f"{head}By corruption, mean over severities", "top-1, %", {n: by_corruption(c) for n, c in results.items()}
        ),
        Bars(f"{head}By severity, mean over corruptions", "top-1, %", {n: by_severity(c) for n, c in results.items()}),
    ]
    if len(results) == 2:
        first, second = results
        title, change = f"{head}Points gained (red) or lost (blue): {second} minus {first}", gains(results)
        return [*charts, grid(title, change, -most, most)] if change else charts
    return [*charts, *(grid(f"{head}Top-1 (%) of {name}", cells, 0.0, 100.0) for name, cells in results.items())]


def _hundredths(value: float | None) -> str:
    """A number with two decimals, a dash for none."""
    return "-" if value is None else f"{value:.2f}"


def robustness_table(results: Mapping[str, AccuracyCells]) -> Table:
    """Clean top-1 of each model, and its means over the suite's and the extra cells that all of them have."""
    rows = [
        ["", "clean top-1 (%)"],
        *([name, _hundredths(cells.get((CLEAN, 0)))] for name, cells in results.items()),
    ]
    for title, corruptions in (("", IMAGENET_C), ("extra: ", EXTRA)):
        kept = [part(cells, corruptions) for cells in results.values()]
        if not any(kept):
            continue
        shared = [cell for cell in kept[0] if all(cell in cells for cells in kept)]
        means = [by_corruption({cell: cells[cell] for cell in shared}) for cells in kept]
        rows[0] += [f"{title}cells", f"{title}mean top-1 (%) over {len(shared)} shared cells"]
        for row, cells, found in zip(rows[1:], kept, means, strict=True):
            row += [str(len(cells)), _hundredths(fmean(found.values()) if found else None)]
    return rows
