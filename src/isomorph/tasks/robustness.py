"""Metrics under corruptions, of image classifiers and of models for other tasks on images."""

import copy
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from isomorph.data.corruptions.corrupt import (
    CORRUPTION_VERSION,
    SEVERITIES,
    SEVERITY_SCALE,
    ImageCorruption,
    corruption_functions,
)
from isomorph.data.corruptions.dataset import CLEAN
from isomorph.data.sources import Source
from isomorph.distributed import ALONE, Runtime
from isomorph.errors import UserError
from isomorph.evaluation.suites.robustness import measure_classifier
from isomorph.evaluation.suites.robustness.cells import CellOptions, ProgressCallback, open_cells, weights_hash
from isomorph.operations import unwrap
from isomorph.training.task import EvaluationOptions, ImagesWithTruth, Task, task_of, task_record

_PICTURES = "files at their own size, corrupted, then as in testing"
"""How images are made. Results are compared by this text, so it must not change."""


def robustness(
    model: nn.Module,
    source: Source | str | Path | None = None,
    suite: str = "imagenet-c",
    *,
    folder: str | Path | None = None,
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] = SEVERITIES,
    extra: bool = False,
    size: tuple[int, int] | None = None,
    seed: int = 0,
    limit: int | None = None,
    partial: bool = False,
    batch_size: int = 100,
    workers: int = 0,
    out: str | Path | None = None,
    cache: str | Path | None = None,
    baseline: str | Path | None = None,
    name: str | None = None,
    progress: ProgressCallback | None = None,
    runtime: Runtime = ALONE,
) -> dict[str, Any]:
    """Measure accuracy under the corruptions of ImageNet-C: by corruption, category and severity, and mCE if defined.

    A cell is a corruption at a severity. The images of `source` are first cropped (for 1000 classes as ImageNet-C's
    were, to 224 px; else with the model's own test crop), then corrupted. Each image has its own random generator, so
    `workers` and the order do not change the result. Accuracies are in per cent.

    A model that `iso.train` trained for segmentation or detection is measured by mean IoU or box AP: its images are
    corrupted at their own size and then processed as in testing; masks and boxes stay those of the clean images.

    Args:
        source: The clean images. With `folder`, they are optional and give the clean error. For segmentation and
            detection a folder, or None for the data of $ISOMORPH_DATA.
        suite: "imagenet-c", or "cifar-c" for the arrays of CIFAR-10-C or CIFAR-100-C in `folder`.
        folder: Published data set to evaluate on instead of corrupting `source`.
        corruptions: The corruptions; by default the 15 of the suite.
        severities: The severities; by default 1 to 5.
        extra: Also use the four extra corruptions.
        size: Height and width of the images; by default 224 x 224 for 1000 classes, unless the model was built for
            another size; else the model's own.
        limit: Use only this many images, evenly spaced over the classes.
        partial: Accept a source with only some of ImageNet's classes. For 1000 classes, labels follow from the class
            names: wnids, label numbers or ImageNet's English names.
        out: File for the results of finished cells, from which a later call resumes.
        cache: Folder to store corrupted images in for further models.
        baseline: Another model's `out` file, or its result as JSON; adds the gain over it to the result.
        name: Name of the model in the result; by default its class.
        progress: Called with the number of finished cells, of all cells, and the current corruption.
        runtime: The processes that share the images of every cell, all of which call this and get the result;
            `isomorph robustness` gives those that torchrun started. By default this process does it all.

    Source: Hendrycks and Dietterich 2019
    Raises: UserError when an argument does not fit the model or the data, or something is missing.

    >>> model = timm.create_model("cifar_resnet20")
    >>> digits = iso.data.open_source("digits", "test")
    >>> result = iso.robustness(model, digits, corruptions=["fog", "snow"], severities=[1], limit=10)
    >>> result["images"], list(result["by_corruption"])
    (10, ['snow', 'fog'])
    """
    cells = CellOptions(corruptions, severities, extra, out, baseline, progress)
    model = unwrap(model, to_copy=False)
    name = name or type(model).__name__
    options: dict[str, Any] = dict(folder=folder, size=size, partial=partial, cache=cache)
    if (task := task_of(model)) is None:
        if isinstance(source, str | Path):
            raise UserError("give the images of a classifier as a source, such as iso.data.open_source(name, 'test')")
        loading: dict[str, Any] = dict(limit=limit, batch_size=batch_size, workers=workers)
        return measure_classifier(model, source, suite, cells, name, seed=seed, runtime=runtime, **options, **loading)
    for option, value in {"suite": suite != "imagenet-c", **options}.items():
        if value:
            raise UserError(f"{option} is for image classifiers; leave it out for this model")
    if isinstance(source, Source):
        raise UserError("give the data of this model's task as a folder or the name of a data source")
    data = EvaluationOptions(str(source) if source else None, None, batch_size, workers, None, limit)
    return measure_task(model, task, data, cells, name, seed, runtime)


def measure_task(
    model: nn.Module,
    task: Task,
    options: EvaluationOptions,
    cells: CellOptions,
    name: str,
    seed: int = 0,
    runtime: Runtime = ALONE,
) -> dict[str, Any]:
    """Measure the metric of a model's own task under corruptions of the images. Returns the same as `robustness`.

    Raises: UserError for a task without images that can be corrupted, and as `robustness`.
    """
    metric = task.corruption_metric
    if not metric:
        raise UserError(f"the model is for {task_record(model)['name']}: corruptions of images do not apply to it")
    wanted = cells.wanted()
    corruption_functions()  # raises now, not after hours, if their package is missing
    images = task.open_images(model, options)
    identity = {  # what must be equal for two results to be comparable, and the images in words
        "model": name,
        "weights": weights_hash(model),
        "metric": metric,
        "suite": "imagenet-c",
        "version": CORRUPTION_VERSION,
        "source": _fingerprint(images),
        "limit": options.max_images,
        "size": list(images.image(0).size[::-1]),
        "seed": seed,
        "pictures": _PICTURES,
        "data": f"{len(images):,} images of {len(images.classes):,} classes",
        "constants": SEVERITY_SCALE,
    }
    state = open_cells(identity, wanted, cells, runtime)
    for corruption, severities in state.missing.items():
        for number, severity in enumerate(severities):
            state.update(corruption, severities[number:])
            given = copy.copy(images)
            given.alter = None if corruption == CLEAN else ImageCorruption(corruption, severity, seed)
            state.add(corruption, severity, task.evaluate_images(model, given, options, runtime)[0])
    return state.result()


def _fingerprint(images: ImagesWithTruth) -> str:
    """Return a hash of the names of images and classes, and of the first, the middle and the last image and truth."""
    names = [images.file_name(index) for index in range(len(images))]
    digest = hashlib.sha256("\n".join([*images.classes, *names]).encode())
    for index in sorted({0, len(images) // 2, len(images) - 1}):
        for values in (np.asarray(images.image(index)), *images.truth(index)):
            digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:16]
