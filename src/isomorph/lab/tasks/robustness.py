"""Accuracy of image classifiers under corruptions."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from isomorph.errors import UserError, did_you_mean
from isomorph.json_values import JsonObject
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.sources import Source
from isomorph.lab.evaluation.robustness.cells import measure_classifier
from isomorph.lab.evaluation.robustness.images import RobustnessOptions
from isomorph.lab.training.task import task_of
from isomorph.operations import unwrap
from isomorph.spec import spec_of


def robustness(
    model: nn.Module,
    source: Source | str | Path | None = None,
    suite: str = "imagenet-c",
    **options: Any,
) -> JsonObject:
    """Measure accuracy under the corruptions of ImageNet-C: by corruption, category and severity, and mCE if defined.

    A cell is a corruption at a severity. The images of `source` are first cropped (for 1000 classes as ImageNet-C's
    were, to 224 px; else with the model's own test crop), then corrupted. Each image has its own random generator, so
    `workers` and the order do not change the result. Accuracies are in per cent.

    Args:
        source: The clean images: a source, a folder, or the name of a data source. With `folder`, they are optional and
            give the clean error.
        suite: "imagenet-c", or "cifar-c" for the arrays of CIFAR-10-C or CIFAR-100-C in `folder`.
        options: Any of the following.
        folder: Published data set to evaluate on instead of corrupting `source`.
        corruptions: The corruptions; by default the 15 of the suite.
        severities: The severities; by default 1 to 5.
        extra: Also use the four extra corruptions.
        size: Height and width of the images, or one number for both; by default 224 x 224 for 1000 classes, unless the
            model was built for another size; else the model's own.
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
    known = [field.name for field in fields(RobustnessOptions)]
    for name in options.keys() - set(known):
        hint = did_you_mean(name, known, f"did you mean {' or '.join(known)}?")
        raise UserError(f"robustness has no argument {name!r}; {hint}")
    given = RobustnessOptions(suite, **options)
    model = unwrap(model, to_copy=False)
    check_classifier(model, "the model")
    source = open_source(source, "test") if isinstance(source, str | Path) else source
    return measure_classifier(model, source, given)


def check_classifier(model: nn.Module, name: str) -> None:
    """Raise UserError for a model of another task; `name` is the model's in the message."""
    if task_of(model):
        raise UserError(
            f"robustness is for image classifiers; {name} is for {spec_of(model).task['name']}"
        )
