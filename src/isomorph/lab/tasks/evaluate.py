"""The metrics of a trained model, whatever it was trained for."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from isomorph.errors import UserError
from isomorph.lab.data.loaders import eval_loader
from isomorph.lab.data.sources import Source
from isomorph.lab.distributed import open_runtime
from isomorph.lab.evaluation.accuracy import evaluate as evaluate_loader
from isomorph.lab.evaluation.classes import check_own_classes
from isomorph.lab.evaluation.model_data import (
    evaluation_data,
    training_root,
    with_model_labels,
)
from isomorph.lab.training.task import EvaluationOptions, task_of
from isomorph.layers.modes import first_float
from isomorph.models.input_sizes import evaluation_config, fit_to_size, image_size
from isomorph.operations import unwrap
from isomorph.spec import ImageSize
from isomorph.terminal_tables import Metrics


def evaluate(
    model: nn.Module,
    data: Iterable[Any] | Source | str | Path | None = None,
    *,
    test_fraction: float | None = None,
    size: int | ImageSize | None = None,
    batch_size: int = 100,
    workers: int = 0,
) -> Metrics:
    """Return the accuracy of a classifier: top1, top5 of more than five classes (%), nll (nats), ece (%), images.

    `data` is a folder of images, the name of a data source, a `Source`, or a loader that yields images and labels; by
    default the data source that the model was trained on. All but a loader are resized and normalised as the model
    expects. A folder has one folder per class, in `val/` (or test, validation) or directly; of one without these,
    `test_fraction` takes the part that training leaves out. `size` is the height and width that the images are resized
    to (one number is both), by default the model's own, else 224. Images labelled -1 do not count. Memory does not grow
    with the number of images. The model's output is (images, classes), or holds that as `logits`.

    A model that `iso.train` trained for another task (segmentation, ...) has the metrics of that task; its `data` is
    the name of a data source or a folder.

    Raises: UserError when the data is missing, empty, or has not the model's classes; NotFinite for outputs that are
    NaN or infinite.

    >>> model = timm.create_model("cifar_resnet20")
    >>> source = iso.data.open_source("digits", "test").subset(range(20))
    >>> sorted(iso.evaluate(model, source))
    ['ece', 'images', 'nll', 'top1', 'top5']
    >>> loader = iso.data.eval_loader(source, timm.data.resolve_data_config(model=model))
    >>> iso.evaluate(model, loader)["images"]
    20
    """
    model = unwrap(model, to_copy=False)
    task = task_of(model)
    is_named = data is None or isinstance(data, str | Path)
    named = str(data) if is_named and data else None
    if task is not None:
        if not is_named or test_fraction is not None or size is not None:
            raise UserError(
                "give the data of this model's task as a folder or the name of a data source, nothing else"
            )
        options = EvaluationOptions(named, training_root(model, named, None), batch_size, workers)
        return task.evaluate(model, options, open_runtime(str(first_float(model).device)))[0]
    sides = None if size is None else image_size(size)
    if is_named:
        source, config = evaluation_data(model, named, size=sides, test_fraction=test_fraction)
    elif test_fraction is not None:
        raise UserError(
            "test_fraction splits a folder of images; leave it out for a source or a loader"
        )
    elif isinstance(data, Source):
        source = with_model_labels(data, model)
        config = evaluation_config(model, sides)
        check_own_classes(model, source.classes, size=sides)
    elif sides:
        raise UserError(
            "size is that of images from a folder or a source; leave it out for a loader"
        )
    else:
        loader: Any = data
        return evaluate_loader(model, loader)
    fitted = fit_to_size(model, sides) if sides else model
    return evaluate_loader(fitted, eval_loader(source, config, batch_size, workers))
