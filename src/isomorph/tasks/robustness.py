"""Metrics under corruptions, of image classifiers and of models for other tasks on images."""

import copy
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from isomorph.data.corruptions.corrupt import (
    CLEAN,
    CORRUPTION_VERSION,
    SEVERITY_SCALE,
    ImageCorruption,
    corruption_functions,
)
from isomorph.data.formats.registry import open_source
from isomorph.data.sources import Source
from isomorph.errors import UserError
from isomorph.evaluation.robustness.cells import RobustnessOptions, measure_cells, measure_classifier
from isomorph.operations import unwrap
from isomorph.training.task import EvaluationOptions, Task, task_of, task_record

_PICTURES = "files at their own size, corrupted, then as in testing"
"""How images are made. Results are compared by this text, so it must not change."""


def robustness(
    model: nn.Module, source: Source | str | Path | None = None, suite: str = "imagenet-c", **options: Any
) -> dict[str, Any]:
    """Measure accuracy under the corruptions of ImageNet-C: by corruption, category and severity, and mCE if defined.

    A cell is a corruption at a severity. The images of `source` are first cropped (for 1000 classes as ImageNet-C's
    were, to 224 px; else with the model's own test crop), then corrupted. Each image has its own random generator, so
    `workers` and the order do not change the result. Accuracies are in per cent.

    A model that `iso.train` trained for segmentation or detection is measured by mean IoU or box AP: its images are
    corrupted at their own size and then processed as in testing; masks and boxes stay those of the clean images.

    Args:
        source: The clean images: a source, a folder, or the name of a data source. With `folder`, they are optional and
            give the clean error. For segmentation and detection a folder, or None for the data of $ISOMORPH_DATA.
        suite: "imagenet-c", or "cifar-c" for the arrays of CIFAR-10-C or CIFAR-100-C in `folder`.
        options: Any of the following.
        folder: Published data set to evaluate on instead of corrupting `source`.
        corruptions: The corruptions; by default the 15 of the suite.
        severities: The severities; by default 1 to 5.
        extra: Also use the four extra corruptions.
        size: Height and width of the images; by default 224 x 224 for 1000 classes, unless the model was built for
            another size; else the model's own.
        seed: Seed of the random corruptions; by default 0.
        limit: Use only this many images, evenly spaced over the classes.
        partial: Accept a source with only some of ImageNet's classes. For 1000 classes, labels follow from the class
            names: wnids, label numbers or ImageNet's English names.
        batch_size: Images of a batch; by default 100.
        workers: Processes that corrupt images; by default 0.
        out: File for the results of finished cells, from which a later call resumes.
        baseline: Another model's `out` file; adds the gain over it to the result.
        name: Name of the model in the result; by default its class.
        progress: Called with the number of finished cells, of all cells, and the current corruption.
        runtime: The processes that share the images of every cell, all of which call this and get the result;
            `isomorph robustness` gives those that torchrun started. By default this process does it all.

    Source: Hendrycks and Dietterich 2019
    Raises: UserError when an argument does not fit the model or the data, or something is missing; NotFinite for
        outputs that are NaN or infinite.

    >>> model = timm.create_model("cifar_resnet20")
    >>> digits = iso.data.open_source("digits", "test")
    >>> result = iso.robustness(model, digits, corruptions=["fog", "snow"], severities=[1], limit=10)
    >>> result["images"], list(result["by_corruption"])
    (10, ['snow', 'fog'])
    """
    given, model = RobustnessOptions(suite, **options), unwrap(model, to_copy=False)
    if (task := task_of(model)) is None:
        source = open_source(source, "test") if isinstance(source, str | Path) else source
        return measure_classifier(model, source, given)
    for option, default in vars(RobustnessOptions()).items():
        if option in ("suite", "folder", "size", "partial") and getattr(given, option) != default:
            raise UserError(f"{option} is for image classifiers; leave it out for this model")
    if isinstance(source, Source):
        raise UserError("give the data of this model's task as a folder or the name of a data source")
    return measure_task(model, task, str(source) if source else None, None, given)


def measure_task(
    model: nn.Module, task: Task, data: str | None, root: Path | None, options: RobustnessOptions
) -> dict[str, Any]:
    """Measure the metric of a model's own task under corruptions of the images. Returns the same as `robustness`.

    Raises: UserError for a task without images that can be corrupted, and as `robustness`.
    """
    metric = task.corruption_metric
    if not metric:
        raise UserError(f"the model is for {task_record(model)['name']}: corruptions of images do not apply to it")
    options.wanted()  # raises before images are opened
    corruption_functions()  # raises now, not after hours, if their package is missing
    given = EvaluationOptions(data, root, options.batch_size, options.workers, None, options.limit)
    images = task.open_images(model, given)
    identity = {  # what must be equal for two results to be comparable, and the images in words
        "metric": metric,
        "suite": "imagenet-c",
        "version": CORRUPTION_VERSION,
        "source": _fingerprint(images),
        "limit": options.limit,
        "size": list(images.image(0).size[::-1]),
        "seed": options.seed,
        "pictures": _PICTURES,
        "data": f"{len(images):,} images of {len(images.classes):,} classes",
        "constants": SEVERITY_SCALE,
    }

    def measure(
        name: str, severities: tuple[int, ...], report: Callable[[float], None]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for severity in severities:
            report(0)
            altered = copy.copy(images)
            altered.alter = None if name == CLEAN else ImageCorruption(name, severity, options.seed)
            yield severity, task.evaluate_images(model, altered, given, options.runtime)[0]

    return measure_cells(model, identity, options, measure)


def _fingerprint(images: Any) -> str:
    """Return a hash of the names of images and classes, and of the first, the middle and the last image and truth."""
    names = [images.file_name(index) for index in range(len(images))]
    digest = hashlib.sha256("\n".join([*images.classes, *names]).encode())
    for index in sorted({0, len(images) // 2, len(images) - 1}):
        for values in (np.asarray(images.image(index)), *images.truth(index)):
            digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:16]
