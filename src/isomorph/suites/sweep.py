"""A model on test sets, at one or several image sizes and ratios of receptive-field calibration: a row for each."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from torch import nn

from isomorph.data.loaders import eval_loader
from isomorph.errors import UserError
from isomorph.evaluation.cost import measure_cost
from isomorph.evaluation.input_sizes import fit_to_size, evaluation_config
from isomorph.evaluation.prediction_counts import PredictionCounts
from isomorph.suites.imagenet.suites import NUM_CLASSES, open_suites
from isomorph.suites.test_set import (
    BatchProgress,
    TestSet,
    check_num_classes,
    no_progress,
    tally_predictions,
)

Size = tuple[int, int]


@dataclass(frozen=True)
class Sweep:
    """Image sizes (height, width) and ratios of receptive-field calibration; none is the model's own."""

    sizes: Sequence[Size] = ()
    ratios: Sequence[float] = ()
    fill: Literal["zero", "black"] = "zero"

    def points(self) -> list[tuple[Size | None, float | None]]:
        """Every size with every ratio."""
        return [(size, ratio) for size in self.sizes or (None,) for ratio in self.ratios or (None,)]

    def place(self, size: Size | None, ratio: float | None) -> dict[str, Any]:
        """What a row says of where in the sweep it stands: size and ratio, where they were asked for."""
        at: dict[str, Any] = {"size": list(size)} if size else {}
        return at | ({"rfc": ratio, "rfc_fill": self.fill} if ratio else {})


def evaluate_suites(
    model: nn.Module,
    suites: str | Sequence[str],
    root: str | Path | None = None,
    form: str | None = None,
    partial: bool = False,
    sweep: Sweep = Sweep(),
    batch_size: int = 100,
    workers: int = 0,
) -> list[dict[str, Any]]:
    """A row of metrics for every suite (and point of the sweep): `evaluate_suites(model, ["imagenet", "real"], root)`.

    Suites are named as for `open_suites`; the model is where it is, on its device.

    Raises: UserError for a model that has not ImageNet-1k's 1000 classes, and as `open_suites`.
    """
    check_num_classes(getattr(model, "num_classes", None), NUM_CLASSES)
    sets = open_suites([suites] if isinstance(suites, str) else suites, root, form, partial)
    return run_sweep(model, sets, sweep, batch_size, workers)[0]


def run_sweep(
    model: nn.Module,
    sets: Sequence[TestSet],
    sweep: Sweep = Sweep(),
    batch_size: int = 100,
    workers: int = 0,
    progress: BatchProgress = no_progress,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of metrics, and rows of single classes, for every test set, size and ratio."""
    loaders = [
        (size, ratio, test, eval_loader(test.numbered(), config, batch_size, workers, ratio, sweep.fill))
        for (size, ratio), test in product(sweep.points(), sets)
        for config in [evaluation_config(model, size)]
    ]
    fitted = {size: fit_to_size(model, size) if size else model for size, *_ in loaders}
    rows: list[dict[str, Any]] = []
    classes: list[dict[str, Any]] = []
    for size, ratio, test, loader in loaders:
        title = " ".join(filter(None, ["evaluating", test.title, *_point_title(size, ratio)]))
        tallies = tally_predictions(fitted[size], progress(loader, title, len(loader)), test.views)
        for view, tally in zip(test.views, tallies, strict=True):
            head = ({"suite": view.name} if view.name else {}) | sweep.place(size, ratio)
            rows.append(head | tally.metrics())
            classes += [head | row for row in _class_rows(tally, view.classes)]
    return rows, classes


def _point_title(size: Size | None, ratio: float | None) -> list[str]:
    """A point of the sweep in words."""
    return ["at {} x {}".format(*size) if size else "", f"at rfc {ratio:g}" if ratio else ""]


def _class_rows(tally: Any, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Images and accuracy (%) of every class that has images; none where images have several labels."""
    if not isinstance(tally, PredictionCounts):
        return []
    return [
        {"class": name, "images": seen, "right": right, "top1": 100 * right / seen}
        for name, seen, right in zip(classes, tally.seen.tolist(), tally.right.tolist(), strict=True)
        if seen
    ]


def measure_costs(model: nn.Module, sizes: Sequence[Size]) -> list[dict[str, Any]]:
    """Parameters, MACs and images a second at every size, or at the model's own."""
    found = []
    for size in sizes or (None,):
        fitted = fit_to_size(model, size) if size else model
        place = {"size": list(size)} if size else {}
        found.append(place | measure_cost(fitted, evaluation_config(model, size)["input_size"]))
    return found


def check_csv_path(path: Path | None) -> None:
    """Raises: UserError, before the work, when a table could not be written there."""
    if path and (path.suffix != ".csv" or path.is_dir()):
        raise UserError(f"cannot write {path}; give a file that ends in .csv")
    try:
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows as a table, with the columns of all of them; a size is written as 224x320."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(row | ({"size": "x".join(map(str, row["size"]))} if "size" in row else {}) for row in rows)
