"""Evaluation on test sets at one or several image sizes and ratios of receptive-field calibration."""

import copy
import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from isomorph.data.loaders import eval_loader
from isomorph.data.sources import Source, spaced_indices
from isomorph.distributed import ALONE, Runtime
from isomorph.errors import UserError
from isomorph.evaluation.accuracy import MultiLabelCounts, PredictionCounts, for_each_batch, sum_counts
from isomorph.evaluation.cost import count_parameters, count_pass
from isomorph.evaluation.input_sizes import evaluation_config, fit_to_size
from isomorph.evaluation.speed import throughput

Size = tuple[int, int]
BatchProgress = Callable[[Iterable[Any], str, int], Iterable[Any]]  # batches, title, number of batches


@dataclass(frozen=True)
class Scoring:
    """How a suite scores a model's predictions on the images of a source.

    `labels` holds a class index per image, or several per image padded with -1. `class_indices` are the model's classes
    that the suite uses, in the order of `classes`; None for all. `num_classes` is the number of classes that the model
    must have; None for any.

    Shape: labels (n,) or (n, K)
    """

    name: str
    labels: np.ndarray
    classes: Sequence[str]
    class_indices: np.ndarray | None = None
    num_classes: int | None = None


@dataclass(frozen=True)
class TestSet:
    """The images of one or several suites, with the scoring of each suite."""

    __test__ = False  # pytest would collect a class of this name
    source: Source
    scorings: Sequence[Scoring]

    @classmethod
    def from_source(cls, source: Source) -> "TestSet":
        """Return all images of a source, scored by the source's own labels."""
        return cls(source, [Scoring("", source.labels, source.classes)])

    def spaced(self, count: int) -> "TestSet":
        """Return `count` images, as `spaced_indices`, with their scorings. Raises: UserError for a count below 1."""
        indices = spaced_indices(self.source.labels, count)
        return TestSet(self.source.subset(indices), [replace(s, labels=s.labels[indices]) for s in self.scorings])

    @property
    def title(self) -> str:
        """Names of the suites, joined by "+"."""
        return "+".join(scoring.name for scoring in self.scorings)


@dataclass(frozen=True)
class Sweep:
    """Image sizes (height, width) and ratios of receptive-field calibration to evaluate at, in all combinations.

    Without sizes, the model's own input size is used; without ratios, its own crop. `fill` pads images that are smaller
    than the input: "zero" after normalisation (the mean colour), "black" before it.

    >>> iso.evaluation.Sweep(sizes=[(160, 160), (224, 224)], ratios=[1.13]).points()
    [((160, 160), 1.13), ((224, 224), 1.13)]
    """

    sizes: Sequence[Size] = ()
    ratios: Sequence[float] = ()
    fill: Literal["zero", "black"] = "zero"

    def points(self) -> list[tuple[Size | None, float | None]]:
        """Return every combination of size and ratio; None stands for the model's own."""
        return list(product(self.sizes or (None,), self.ratios or (None,)))


def run_sweep(
    model: nn.Module,
    test_sets: Sequence[TestSet],
    sweep: Sweep = Sweep(),
    batch_size: int = 100,
    workers: int = 0,
    progress: BatchProgress = lambda batches, title, total: batches,
    runtime: Runtime = ALONE,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Evaluate every test set at every point of a sweep; return rows of metrics and rows of single classes.

    The processes of `runtime` share the batches, and all of them return the same rows.

    Raises: UserError when a size does not fit, or the model has not the number of classes of a suite.
    """
    jobs = []
    for (size, ratio), test_set in product(sweep.points(), test_sets):
        numbered, config = copy.copy(test_set.source), evaluation_config(model, size)
        numbered.labels = np.arange(len(numbered))
        loader = eval_loader(numbered, config, batch_size, workers, ratio, sweep.fill, batches=runtime.share)
        jobs.append((size, ratio, test_set, loader))
    fitted = {size: fit_to_size(model, size) if size else model for size, *_ in jobs}
    rows: list[dict[str, Any]] = []
    class_rows: list[dict[str, Any]] = []
    for size, ratio, test_set, loader in jobs:
        at = ["at {} x {}".format(*size) if size else "", f"at rfc {ratio:g}" if ratio else ""]
        batches = progress(loader, " ".join(filter(None, ["evaluating", test_set.title, *at])), len(loader))
        counts = _score_predictions(fitted[size], batches, test_set.scorings, runtime)
        point: dict[str, Any] = {"size": list(size)} if size else {}
        point |= {"rfc": ratio, "rfc_fill": sweep.fill} if ratio else {}
        for scoring, own in zip(test_set.scorings, counts, strict=True):
            head = ({"suite": scoring.name} if scoring.name else {}) | point
            rows.append(head | own.metrics())
            if isinstance(own, PredictionCounts):
                found = zip(scoring.classes, own.total.tolist(), own.correct.tolist(), strict=True)
                class_rows += [
                    {**head, "class": name, "images": seen, "right": right, "top1": 100 * right / seen}
                    for name, seen, right in found
                    if seen
                ]
    return rows, class_rows


def _score_predictions(
    model: nn.Module, batches: Iterable[Any], scorings: Sequence[Scoring], runtime: Runtime
) -> list[PredictionCounts | MultiLabelCounts]:
    """Count predictions for every scoring in one pass over this process's share; counts are of all processes."""
    counts = [MultiLabelCounts() if s.labels.ndim > 1 else PredictionCounts(len(s.classes)) for s in scorings]
    labels = [torch.as_tensor(scoring.labels) for scoring in scorings]

    def add_batch(logits: Tensor, indices: Tensor) -> None:
        for scoring, own_labels, own in zip(scorings, labels, counts, strict=True):
            check_num_classes(logits.shape[1], scoring.num_classes)
            chosen = slice(None) if scoring.class_indices is None else torch.as_tensor(scoring.class_indices)
            own.add(logits[:, chosen], own_labels[indices])

    for_each_batch(model, batches, add_batch)
    return [sum_counts(list(parts)) for parts in zip(*runtime.gather(counts), strict=True)]


def check_num_classes(num_classes: int | None, expected: int | None) -> None:
    """Raise UserError if a model has not the expected number of classes; None stands for unknown and passes."""
    if num_classes is not None and expected is not None and num_classes != expected:
        raise UserError(
            f"the model has {num_classes} classes, these suites are for the {expected} of ImageNet-1k; use a model with"
            " that head, such as timm's models whose names end in in1k"
        )


def measure_costs(
    model: nn.Module, sizes: Sequence[Size], images: int = 32, exported: bool = False
) -> list[dict[str, Any]]:
    """Measure parameters, MACs and images per second at every size, or at the model's own if none is given.

    Fewer than 32 `images` are the batch of the speed. Nothing counts those of an `exported` model.
    """
    rows = []
    for size in sizes or (None,):
        fitted = fit_to_size(model, size) if size else model
        shape = evaluation_config(model, size)["input_size"]
        row: dict[str, Any] = {"size": list(size)} if size else {}
        if not exported:
            macs = count_pass(fitted, shape)
            row |= {"parameters": count_parameters(model), "macs": macs.per_image}
            row |= {"step_macs": macs.per_pass} if macs.per_pass else {}
        rows.append(row | {"images_per_second": throughput(fitted, shape, max(1, min(images, 32)))})
    return rows


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as CSV with the columns of all of them; a size is written as 224x320."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(row | ({"size": "x".join(map(str, row["size"]))} if "size" in row else {}) for row in rows)
