"""The cells of a robustness evaluation, a corruption at a severity each: those wanted, finished and missing."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from isomorph.data.corruptions.corrupt import (
    EXTRA_CORRUPTIONS,
    IMAGENET_C_CORRUPTIONS,
    SEVERITIES,
    check_corruption,
)
from isomorph.data.corruptions.dataset import CLEAN
from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.evaluation.suites.robustness.results import CellFile, check_same_inputs, open_cell_file, read_result
from isomorph.evaluation.suites.robustness.scores import (
    Cell,
    Cells,
    common_cells,
    compare_to_baseline,
    metric_of,
    robustness_summary,
)

ProgressCallback = Callable[[float, int, str], None]
"""Takes the number of finished cells, the number of all cells, and the name of the current corruption."""


class CellOptions(NamedTuple):
    """Which cells to measure, and the files of results: that of this evaluation, and that of a model to compare with.

    >>> CellOptions(corruptions=["fog"], severities=[1, 3]).wanted()
    {'fog': (1, 3)}
    """

    corruptions: Sequence[str] | None = None
    severities: Sequence[int] = SEVERITIES
    extra: bool = False
    out: str | Path | None = None
    baseline: str | Path | None = None
    progress: ProgressCallback | None = None

    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Return the severities of each corruption. Raises: UserError as `wanted_cells`."""
        return wanted_cells(self.corruptions, self.severities, self.extra)


def wanted_cells(
    corruptions: Sequence[str] | None, severities: Sequence[int], extra: bool
) -> dict[str, tuple[int, ...]]:
    """Return the severities of each corruption. Raises: UserError for an unknown corruption or severity, or none."""
    names = [*(IMAGENET_C_CORRUPTIONS if corruptions is None else corruptions), *(EXTRA_CORRUPTIONS if extra else ())]
    if not names or not severities:
        raise UserError("there is nothing to do: give at least one corruption and one severity")
    for corruption in names:
        for severity in severities:
            check_corruption(corruption, severity)
    return dict.fromkeys(names, tuple(sorted(set(severities))))


class CellProgress:
    """The finished and missing cells of an evaluation; reports progress."""

    def __init__(
        self,
        cell_file: CellFile,
        wanted: Mapping[str, tuple[int, ...]],
        progress: ProgressCallback | None = None,
        base: tuple[dict[str, Any], Cells] | None = None,
    ) -> None:
        self.cell_file, self.wanted, self.base = cell_file, wanted, base
        self.progress = progress or (lambda done, total, step: None)
        self.total = sum(map(len, wanted.values()))
        self.resumed = len(self.cells)

    @property
    def cells(self) -> dict[tuple[str, int], Cell]:
        """Finished cells among the wanted ones."""
        return {key: cell for key, cell in self.cell_file.cells.items() if key[1] in self.wanted.get(key[0], ())}

    @property
    def missing(self) -> dict[str, tuple[int, ...]]:
        """Severities to be measured, by corruption; the clean images come first."""
        done = self.cell_file.cells
        cells = {CLEAN: (0,), **self.wanted}
        return {name: left for name, all_ in cells.items() if (left := tuple(s for s in all_ if (name, s) not in done))}

    def update(self, name: str, severities: Sequence[int], fraction: float = 0) -> None:
        """Report that a fraction of the severities of a corruption is done."""
        self.progress(len(self.cells) + fraction * len(severities) * (name != CLEAN), self.total, name)

    def add(self, name: str, severity: int, metrics: Mapping[str, Any]) -> None:
        """Save the metrics of a finished cell."""
        self.cell_file.add(name, severity, metrics)

    def result(self, imagenet: bool = False) -> dict[str, Any]:
        """Return the identity of the evaluation, every cell, and the means over cells; `imagenet` as in the summary."""
        cells = {
            (name, s): self.cell_file.cells[name, s] for name, severities in self.wanted.items() for s in severities
        }
        clean = self.cell_file.cells.get((CLEAN, 0))
        images = min(int(cell.get("images", 0)) for cell in cells.values())
        result = {**self.cell_file.identity, "images": images, "clean": clean, "cells": list(cells.values())}
        metric = metric_of(self.cell_file.identity)
        result |= robustness_summary(cells, clean, imagenet, metric) | {"resumed": self.resumed}
        if self.base:
            result["against"] = compare_to_baseline(self.cells, self.base[1], self.base[0]["model"], metric)
        return result


def open_cells(
    identity: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]], options: CellOptions, runtime: Runtime
) -> CellProgress:
    """Open the results of an evaluation and of the model to compare with, for all processes.

    Raises: UserError when a file cannot be read, is of another model or other images, or has no cell to compare, or the
    processes differ.
    """
    base = read_result(Path(options.baseline).expanduser()) if options.baseline else None
    if base:
        check_same_inputs(str(options.baseline), base[0], identity)
        common_cells([(name, severity) for name in wanted for severity in wanted[name]], base[1], base[0]["model"])
    runtime.require_equal(dict(identity), "weights or images")
    cell_file = open_cell_file(Path(options.out).expanduser() if options.out else None, identity, runtime)
    return CellProgress(cell_file, wanted, options.progress, base)
