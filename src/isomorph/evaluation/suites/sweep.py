"""Evaluation on test sets at one or several image sizes and ratios of receptive-field calibration."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from torch import nn

from isomorph.data.corruptions.corrupt import fingerprint
from isomorph.data.loaders import eval_loader
from isomorph.distributed import ALONE, Runtime
from isomorph.evaluation.accuracy import PredictionCounts
from isomorph.evaluation.cost import count_parameters, count_pass
from isomorph.evaluation.input_sizes import evaluation_config, fit_to_size
from isomorph.evaluation.robustness.cells import weights_hash
from isomorph.evaluation.speed import throughput
from isomorph.evaluation.suites.imagenet import NUM_CLASSES, open_suites
from isomorph.evaluation.suites.test_set import (
    BatchProgress,
    TestSet,
    check_num_classes,
    no_progress,
    score_predictions,
)

Size = tuple[int, int]


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
        return [(size, ratio) for size in self.sizes or (None,) for ratio in self.ratios or (None,)]

    def point_columns(self, size: Size | None, ratio: float | None) -> dict[str, Any]:
        """Return the columns of a result row that name its size and ratio, if any were given."""
        columns: dict[str, Any] = {"size": list(size)} if size else {}
        return columns | ({"rfc": ratio, "rfc_fill": self.fill} if ratio else {})


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
    """Evaluate a model on ImageNet test suites: a row of metrics for every suite and point of the sweep.

    `suites`, `root`, `form`, `partial`: as in `open_suites`. The model stays on its device; `workers` processes
    load the images.

    Raises: UserError when the model has not ImageNet-1k's 1000 classes, and as `open_suites`.

    >>> from pathlib import Path
    >>> from PIL import Image
    >>> folder = Path("data/imagenet/val/n01440764")
    >>> folder.mkdir(parents=True)
    >>> Image.new("RGB", (32, 32)).save(folder / "1.png")
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    >>> sweep = iso.evaluation.Sweep(sizes=[(32, 32)])
    >>> rows = iso.evaluation.evaluate_suites(model, "imagenet", root="data", partial=True, sweep=sweep)
    >>> [(row["suite"], row["images"]) for row in rows]
    [('imagenet', 1)]
    """
    check_num_classes(getattr(model, "num_classes", None), NUM_CLASSES)
    test_sets = open_suites([suites] if isinstance(suites, str) else suites, root, form, partial)
    return run_sweep(model, test_sets, sweep, batch_size, workers)[0]


def run_sweep(
    model: nn.Module,
    test_sets: Sequence[TestSet],
    sweep: Sweep = Sweep(),
    batch_size: int = 100,
    workers: int = 0,
    progress: BatchProgress = no_progress,
    runtime: Runtime = ALONE,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Evaluate every test set at every point of a sweep; return rows of metrics and rows of single classes.

    The processes of `runtime` share the batches, and all of them return the same rows.

    Raises: UserError when the processes have not the same model and images.
    """
    if runtime.world > 1:
        runtime.require_equal(weights_hash(model), "weights")
        runtime.require_equal([(test_set.title, fingerprint(test_set.source)) for test_set in test_sets], "images")
    loaders = [
        (
            size,
            ratio,
            test_set,
            eval_loader(
                test_set.with_index_labels(), config, batch_size, workers, ratio, sweep.fill, batches=runtime.share
            ),
        )
        for (size, ratio), test_set in product(sweep.points(), test_sets)
        for config in [evaluation_config(model, size)]
    ]
    fitted = {size: fit_to_size(model, size) if size else model for size, *_ in loaders}
    rows: list[dict[str, Any]] = []
    class_rows: list[dict[str, Any]] = []
    for size, ratio, test_set, loader in loaders:
        title = " ".join(filter(None, ["evaluating", test_set.title, *_point_title(size, ratio)]))
        counts = score_predictions(fitted[size], progress(loader, title, len(loader)), test_set.scorings, runtime)
        for scoring, own_counts in zip(test_set.scorings, counts, strict=True):
            head = ({"suite": scoring.name} if scoring.name else {}) | sweep.point_columns(size, ratio)
            rows.append(head | own_counts.metrics())
            class_rows += [head | row for row in _class_rows(own_counts, scoring.classes)]
    return rows, class_rows


def _point_title(size: Size | None, ratio: float | None) -> list[str]:
    """Return the size and the ratio of a point in words, "" for the model's own."""
    return ["at {} x {}".format(*size) if size else "", f"at rfc {ratio:g}" if ratio else ""]


def _class_rows(counts: Any, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return images and accuracy (%) of every class with images; none if images have several labels."""
    if not isinstance(counts, PredictionCounts):
        return []
    return [
        {"class": name, "images": seen, "right": right, "top1": 100 * right / seen}
        for name, seen, right in zip(classes, counts.total.tolist(), counts.correct.tolist(), strict=True)
        if seen
    ]


def measure_costs(
    model: nn.Module, sizes: Sequence[Size], images: int = 32, exported: bool = False
) -> list[dict[str, Any]]:
    """Measure parameters, MACs and images per second at every size, or at the model's own if none is given.

    With fewer than 32 `images` to evaluate, speed is measured with batches of that many. Nothing counts the parameters
    and MACs of an `exported` model.
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
