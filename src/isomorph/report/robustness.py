"""Robustness results as charts: by corruption, by severity, and model against model."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from isomorph.errors import UserError
from isomorph.report.charts import Bars, Chart, Matrix, Table, number

Cells = dict[tuple[str, int], float]
"""Top-1 (%) by corruption and severity."""


def read_cells(path: Path) -> tuple[Cells, int]:
    """Results of `isomorph robustness`, a line a cell with corruption, severity and top1; and how many lines are none.

    Raises: UserError when the file is missing or has no such line.
    """
    if not path.is_file():
        raise UserError(f"no results {path}; isomorph robustness writes them")
    cells: Cells = {}
    skipped = 0
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
            cells[str(row["corruption"]), int(row["severity"])] = float(row["top1"])
        except (ValueError, KeyError, TypeError):
            skipped += bool(line.strip())
    if not cells:
        raise UserError(f"{path} has no line with corruption, severity and top1; isomorph robustness writes such files")
    return cells, skipped


def means(cells: Cells, by: int) -> dict[str, float]:
    """Mean top-1 by corruption (0) or severity (1)."""
    names = list(dict.fromkeys(cell[by] for cell in cells))
    names = names if by == 0 else sorted(names)
    return {f"severity {n}" if by else str(n): fmean(v for c, v in cells.items() if c[by] == n) for n in names}


def grid(title: str, values: Mapping[tuple[str, int], float], low: float, high: float) -> Matrix:
    """Corruptions down, severities across."""
    rows, columns = list(dict.fromkeys(c for c, _ in values)), sorted({s for _, s in values})
    numbers = [[values.get((row, column), math.nan) for column in columns] for row in rows]
    return Matrix(title, "corruption", "severity", rows, [str(c) for c in columns], numbers, low, high)


def robustness_charts(results: Mapping[str, Cells]) -> list[Chart]:
    """Bars by corruption and by severity; the difference of two models cell by cell, or the one model's cells."""
    charts: list[Chart] = [
        Bars("By corruption, mean over severities", "top-1, %", {n: means(c, 0) for n, c in results.items()}),
        Bars("By severity, mean over corruptions", "top-1, %", {n: means(c, 1) for n, c in results.items()}),
    ]
    if len(results) == 2:
        (first, a), (second, b) = results.items()
        change = {cell: b[cell] - a[cell] for cell in a if cell in b}
        top = max((abs(value) for value in change.values()), default=0.0) or 1.0
        return [*charts, grid(f"Points gained: {second} minus {first}", change, -top, top)] if change else charts
    return [*charts, *(grid(f"Top-1 (%) of {name}", cells, 0.0, 100.0) for name, cells in results.items())]


def robustness_table(results: Mapping[str, Cells]) -> Table:
    """Cells measured and mean top-1 of each model, over the cells that all of them have."""
    shared = [cell for cell in next(iter(results.values())) if all(cell in cells for cells in results.values())]
    rows = [
        [name, str(len(cells)), number(fmean(cells[cell] for cell in shared) if shared else math.nan)]
        for name, cells in results.items()
    ]
    return [["", "cells", f"mean top-1 (%) over {len(shared)} shared cells"], *rows]


def open_results(paths: Sequence[Path], names: Sequence[str]) -> tuple[dict[str, Cells], list[str]]:
    """Results by model: a file for each name, else by the files' own; and a line for each file that was cut short."""
    labels = list(names) if len(paths) == len(names) else [path.stem for path in paths]
    results: dict[str, Cells] = {}
    problems = []
    for label, path in zip(labels, paths, strict=True):
        results[label if label not in results else str(path)], skipped = read_cells(path)
        if skipped:
            problems.append(f"{path.name}: {skipped} lines could not be read and are left out.")
    return results, problems
