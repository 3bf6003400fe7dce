"""The test images of a model, with its labels, and its accuracy on them, also by image size and calibration."""

import csv
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from isomorph.analysis.cost import count_parameters, count_pass
from isomorph.analysis.speed import throughput
from isomorph.errors import DataWarning, UserError
from isomorph.json_values import JsonObject
from isomorph.lab.data.formats import registry
from isomorph.lab.data.formats.naming import ImageFiles, composed
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.formats.tar import TarImages
from isomorph.lab.data.imagenet_labels import NUM_CLASSES
from isomorph.lab.data.loaders import ImageConfig, eval_loader
from isomorph.lab.data.sources import (
    Source,
    first_classes,
    random_indices,
    renumbered,
    spaced_indices,
    with_changes,
)
from isomorph.lab.distributed import ALONE, Runtime
from isomorph.lab.evaluation.accuracy import (
    MultiLabelCounts,
    PredictionCounts,
    for_each_batch,
    sum_counts,
)
from isomorph.lab.evaluation.classes import check_own_classes, config_labels, shorten
from isomorph.models.input_sizes import (
    evaluation_config,
    fit_to_size,
    label_names,
)
from isomorph.spec import ImageSize, spec_of
from isomorph.surgery.rule import record, update_record
from isomorph.terminal_tables import Row, Rows

_WEIGHT_LOCATIONS = ("hf-hub", "local-dir", "url", "file")  # timm's `source` of loaded weights


def default_data(model: nn.Module) -> str:
    """Return the data source that a model was trained on, or "imagefolder" if its config names none."""
    config = spec_of(model).config
    source = config.get("source")
    # a file may name no folder of this machine
    named = source in registry.SOURCES or not Path(str(source)).exists()
    if source and source not in _WEIGHT_LOCATIONS and named:
        return source
    if "cifar10" in (config.get("tag") or ""):
        return "cifar10"
    return "imagefolder"


def record_root(model: nn.Module, recipe: JsonObject) -> None:
    """Record the folder of the data that a run's recipe names. It is not saved with the model."""
    data = recipe.get("data")
    root = data.get("root") if isinstance(data, Mapping) else None
    update_record(model, data_root=root if isinstance(root, str) else None)


def training_root(model: nn.Module, data: str | None, root: Path | None) -> Path | None:
    """Return the given folder or, of the model's own data, the one its run was trained on; None if unknown or gone."""
    if data or root:
        return root
    own: Any = record(model).data_root
    if not own:
        return None
    place = Path(own).expanduser()
    if place.exists():
        return place
    return None


def open_test_images(
    model: nn.Module,
    data: str | None,
    root: Path | None,
    classes: int | None = None,
    test_fraction: float | None = None,
) -> Source:
    """Open the test images of a data source or folder, by default of the model's own, with the model's labels.

    With `classes`, only of the first classes. `test_fraction` is as in `open_source`, and 1 for all images of a folder;
    by default, of the folder that the model's training split, the images that it left out.

    Raises: UserError when the data is missing, the folder's classes are not the model's, or the model was trained on
    some of these images.
    """
    source = open_split(model, "test", data, root, test_fraction)
    if test_fraction != 1:
        _check_unseen(source, model)
    if classes is not None:
        source = first_classes(source, classes)
    return with_model_labels(source, model)


def open_split(
    model: nn.Module,
    split: str,
    data: str | None,
    root: Path | None,
    test_fraction: float | None = None,
) -> Source:
    """Open the `train` or `test` images of a data source or folder, by default of the model's own.

    A folder that training split is split alike, unless another `test_fraction` is given (1: all images on both sides);
    a folder of the same classes also if it has more or fewer images now, with a warning.

    Raises: UserError when the data is missing.
    """
    if test_fraction == 1:
        return _open(model, "test", data, root)
    if test_fraction is not None:
        return _open(model, split, data, root, test_fraction)
    fraction, images = spec_of(model).split
    if fraction:
        with suppress(UserError):  # other data, which cannot be split
            part = _open(model, split, data, root, fraction)
            _, now = part.split or (0, 0)
            if now == images:
                return part
            if _may_be_that_of_training(part, model, data):
                warnings.warn(
                    f"the folder has {now} images, that of training had {images}: those that "
                    f"test_fraction={fraction:g} gives to {split}ing are used ({len(part)}); test_fraction=1 takes all",
                    DataWarning,
                    stacklevel=2,
                )
                return part
    return _open(model, split, data, root)


def _may_be_that_of_training(part: Source, model: nn.Module, data: str | None) -> bool:
    """True for a folder with the model's classes, some of them, or more, of which it may know the first."""
    trained = set(map(composed, label_names(model)))
    if not trained:  # a network without classes
        return data is None
    present = set(part.classes)
    return present <= trained or trained <= present


def _open(
    model: nn.Module, split: str, data: str | None, root: Path | None, fraction: float | None = None
) -> Source:
    name = data or default_data(model)
    try:
        return open_source(name, split, training_root(model, data, root), fraction)
    except UserError as error:
        if data or root or name != "imagefolder":
            raise
        raise UserError(
            f"give data=NAME, a folder of images or a data source; without it, {error}"
        ) from None


def _check_unseen(source: Source, model: nn.Module) -> None:
    """Raise for more images of a folder than training left out; a smaller fraction is part of a larger one."""
    fraction, images = spec_of(model).split
    tested, total = source.split or (1.0, len(source))
    if fraction and total == images and tested > fraction:
        raise UserError(
            f"the model was trained on a folder of {images} images like this one; give "
            f"test_fraction={fraction:g} to test on the images left out, or test_fraction=1 for all of them"
        )


def with_model_labels(source: Source, model: nn.Module) -> Source:
    """Return the source with labels by the names of the model's classes, where both are known, else unchanged.

    Raises: UserError when a model has classes of other names than a folder or a tar of images, or than some of the
    data's, or a name stands for several.
    """
    own = tuple(map(composed, label_names(model))) or _names_in_config(model, source.classes)
    if not own:
        return _by_label_number(source)
    if own == source.classes:
        return source
    unknown = [name for name in source.classes if name not in own]
    if not unknown:
        _check_unique("the model", own, source.classes)
        _check_unique("the data", source.classes, source.classes)
        numbers = np.asarray([own.index(name) for name in source.classes])
        return with_changes(source, labels=renumbered(source.labels, numbers), classes=own)
    some_known = len(unknown) < len(source.classes)
    stored = getattr(source.images, "images", source.images)
    if some_known or isinstance(stored, ImageFiles | TarImages):
        todo = (
            "give images of the model's classes (classnames.txt names those of shards, one a line)"
        )
        if source.classes[: len(own)] == own:
            todo = f"give classes={len(own)} to test on these alone"
        elif some_known:
            todo = f"rename the folders that differ ({shorten(unknown)})"
        raise UserError(
            f"the model has {len(own)} classes ({shorten(own)}), the data has {len(source.classes)} "
            f"({shorten(source.classes)}); {todo}"
        )
    return source


def _by_label_number(source: Source) -> Source:
    """Give a source whose 1000 classes are named by ImageNet's label numbers these as labels; others stay."""
    if len(source.classes) != NUM_CLASSES or not all(map(str.isdecimal, source.classes)):
        return source
    numbers = np.asarray(list(map(int, source.classes)))
    if sorted(numbers.tolist()) != list(range(NUM_CLASSES)):
        return source
    warnings.warn(
        "folders 0 to 999 are read as ImageNet's label numbers; save a model that was trained on another order with "
        "its label_names",
        DataWarning,
        stacklevel=2,
    )
    classes = tuple(map(str, range(NUM_CLASSES)))
    return with_changes(source, labels=renumbered(source.labels, numbers), classes=classes)


def _check_unique(whose: str, names: Sequence[str], used: Iterable[str]) -> None:
    for name in used:
        count = names.count(name)
        if count > 1:
            raise UserError(
                f"{whose} has {count} classes named {name!r}; give each class a name of its own"
            )


def _names_in_config(model: nn.Module, classes: Sequence[str]) -> tuple[str, ...]:
    own = tuple(map(composed, config_labels(model)))
    if set(own) & set(classes):
        return own
    return ()


def sample_images(source: Source, samples: int) -> Source:
    """Return random images of a source in random order, the same ones at every call."""
    return source.subset(random_indices(len(source), samples))


def evaluation_data(
    model: nn.Module,
    data: str | None = None,
    root: Path | None = None,
    size: ImageSize | None = None,
    classes: int | None = None,
    test_fraction: float | None = None,
) -> tuple[Source, ImageConfig]:
    """Open the test split of a data source (by default the model's own) and return it with the model's data config.

    Raises: UserError when the data is missing, the size is not positive, or the data has not the model's classes.
    """
    config = evaluation_config(model, size)
    source = open_test_images(model, data, root, classes, test_fraction)
    where = ""
    if not data and not root:
        folder = registry.data_root(training_root(model, data, root))
        where = f" in {folder} (data=NAME is not given)"
    check_own_classes(model, source.classes, where, size=size)
    return source, config


# batches, title, number of batches
BatchProgress = Callable[[Iterable[Any], str, int], Iterable[Any]]


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

    def spaced(self, count: int) -> "TestSet":
        """Return `count` images, as `spaced_indices`, with their scorings. Raises: UserError for a count below 1."""
        indices = spaced_indices(self.source.labels, count)
        return TestSet(
            self.source.subset(indices),
            [replace(s, labels=s.labels[indices]) for s in self.scorings],
        )

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

    sizes: Sequence[ImageSize] = ()
    ratios: Sequence[float] = ()
    fill: Literal["zero", "black"] = "zero"

    def points(self) -> list[tuple[ImageSize | None, float | None]]:
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
) -> tuple[Rows, Rows]:
    """Evaluate every test set at every point of a sweep; return rows of metrics and rows of single classes.

    The processes of `runtime` share the batches, and all of them return the same rows.

    Raises: UserError when a size does not fit, or the model has not the number of classes of a suite.
    """
    jobs = []
    for (size, ratio), test_set in product(sweep.points(), test_sets):
        config = evaluation_config(model, size)
        numbered = with_changes(test_set.source, labels=np.arange(len(test_set.source)))
        loader = eval_loader(
            numbered, config, batch_size, workers, ratio, sweep.fill, batches=runtime.share
        )
        jobs.append((size, ratio, test_set, loader))
    fitted = {size: fit_to_size(model, size) if size else model for size, *_ in jobs}
    rows: Rows = []
    class_rows: Rows = []
    while jobs:
        size, ratio, test_set, loader = jobs.pop(0)  # the processes of a loader end with it
        title = "evaluating"
        if test_set.title:
            title += f" {test_set.title}"
        point: Row = {}
        if size:
            title += " at {} x {}".format(*size)
            point["size"] = list(size)
        if ratio:
            title += f" at rfc {ratio:g}"
            point["rfc"] = ratio
            point["rfc_fill"] = sweep.fill
        batches: Iterable[Any] = loader
        if runtime.is_main:
            batches = progress(loader, title, len(loader))
        counts = _score_predictions(fitted[size], batches, test_set.scorings, runtime)
        for scoring, own in zip(test_set.scorings, counts, strict=True):
            head = {"suite": scoring.name} | point if scoring.name else point
            rows.append(head | own.metrics())
            if isinstance(own, PredictionCounts):
                class_rows += [head | row for row in _rows_of_classes(own, scoring.classes)]
    return rows, class_rows


def _rows_of_classes(counts: PredictionCounts, classes: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each class that has images."""
    for name, images, right in zip(
        classes, counts.total.tolist(), counts.correct.tolist(), strict=True
    ):
        if images:
            yield {"class": name, "images": images, "right": right, "top1": 100 * right / images}


def _score_predictions(
    model: nn.Module, batches: Iterable[Any], scorings: Sequence[Scoring], runtime: Runtime
) -> list[PredictionCounts | MultiLabelCounts]:
    """Count predictions for every scoring in one pass over this process's share; counts are of all processes."""
    counts: list[PredictionCounts | MultiLabelCounts] = []
    for scoring in scorings:
        if scoring.labels.ndim > 1:
            counts.append(MultiLabelCounts())
        else:
            counts.append(PredictionCounts(len(scoring.classes)))
    labels = [torch.as_tensor(scoring.labels) for scoring in scorings]

    def add_batch(logits: Tensor, indices: Tensor) -> None:
        for scoring, own_labels, own in zip(scorings, labels, counts, strict=True):
            check_num_classes(logits.shape[1], scoring.num_classes)
            scored = logits
            if scoring.class_indices is not None:
                scored = logits[:, torch.as_tensor(scoring.class_indices)]
            own.add(scored, own_labels[indices])

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
    model: nn.Module, sizes: Sequence[ImageSize], images: int, exported: bool
) -> Rows:
    """Measure parameters, MACs and images per second at every size, or at the model's own if none is given.

    Fewer than 32 `images` are the batch of the speed. Nothing counts those of an `exported` model.
    """
    rows = []
    for size in sizes or (None,):
        fitted = fit_to_size(model, size) if size else model
        shape = evaluation_config(model, size)["input_size"]
        row: Row = {}
        if size:
            row["size"] = list(size)
        if not exported:
            macs = count_pass(fitted, shape)
            row["parameters"] = count_parameters(fitted)
            row["macs"] = macs.per_image
            if macs.per_pass:
                row["step_macs"] = macs.per_pass
        batch = max(1, min(images, 32))
        row["images_per_second"] = throughput(fitted, shape, batch)
        rows.append(row)
    return rows


def write_csv(path: Path, rows: Rows) -> None:
    """Write rows as CSV with the columns of all of them; a size is written as 224x320."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    # names of folders that are not UTF-8 have no other form
    with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in rows:
            if "size" in row:
                row = row | {"size": "x".join(map(str, row["size"]))}
            writer.writerow(row)
