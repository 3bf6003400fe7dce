"""The test images of a model, with its labels, and its accuracy on them."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from isomorph.data.formats import registry
from isomorph.data.formats.naming import ImageFiles, composed
from isomorph.data.formats.registry import open_source
from isomorph.data.loaders import eval_loader
from isomorph.data.sources import Source, first_classes, random_indices
from isomorph.errors import UserError
from isomorph.evaluation.accuracy import evaluate as evaluate_loader
from isomorph.evaluation.input_sizes import (
    check_own_classes,
    evaluation_config,
    fit_to_size,
    label_names,
    shorten,
)
from isomorph.surgery.record import record, update_record

_WEIGHT_LOCATIONS = ("hf-hub", "local-dir", "url", "file")  # timm's `source` of loaded weights


def default_data(model: nn.Module) -> str:
    """Return the data source that a model was trained on, or "imagefolder" if its config names none."""
    config = getattr(model, "pretrained_cfg", None) or {}
    source = config.get("source")
    named = source in registry.SOURCES or not Path(str(source)).exists()  # a file may name no folder of this machine
    if source and source not in _WEIGHT_LOCATIONS and named:
        return source
    return "cifar10" if "cifar10" in (config.get("tag") or "") else "imagefolder"


def record_root(model: nn.Module, recipe: Mapping[str, Any]) -> None:
    """Record the folder of the data that a run's recipe names. It is not saved with the model."""
    data = recipe.get("data")
    root = data.get("root") if isinstance(data, Mapping) else None
    update_record(model, data_root=root if isinstance(root, str) else None)


def data_root(model: nn.Module, data: str | None, root: Path | None) -> Path | None:
    """Return the given folder or, of the model's own data, the one its run was trained on; None if unknown or gone."""
    own: Any = None if data or root else record(model).data_root
    return Path(own) if own and Path(own).is_dir() else root


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
    source = source if classes is None else first_classes(source, classes)
    return with_model_labels(source, model)


def open_split(
    model: nn.Module, split: str, data: str | None, root: Path | None, test_fraction: float | None = None
) -> Source:
    """Open the `train` or `test` images of a data source or folder, by default of the model's own.

    A folder that training split is split alike, unless another `test_fraction` is given (1: all images on both sides).

    Raises: UserError when the data is missing.
    """
    if test_fraction is not None:
        return _open(model, "test" if test_fraction == 1 else split, data, root, test_fraction % 1 or None)
    fraction, images = _recorded_split(model)
    if fraction:
        with suppress(UserError):  # other data, which cannot be split
            part = _open(model, split, data, root, fraction)
            if part.split == (fraction, images):
                return part
    return _open(model, split, data, root)


def _open(model: nn.Module, split: str, data: str | None, root: Path | None, fraction: float | None = None) -> Source:
    try:
        return open_source(data or default_data(model), split, data_root(model, data, root), fraction)
    except UserError as error:
        if data or root or default_data(model) != "imagefolder":
            raise
        raise UserError(f"give --data, a folder of images or a data source; without it, {error}") from None


def _recorded_split(model: nn.Module) -> tuple[float | None, int | None]:
    """Return the fraction of a folder that a model's training left out, and the number of images in the folder."""
    fraction, images = (getattr(model, "pretrained_cfg", None) or {}).get("split") or (None, None)
    return fraction, images


def _check_unseen(source: Source, model: nn.Module) -> None:
    """Raise for more images of a folder than training left out; a smaller fraction is part of a larger one."""
    fraction, images = _recorded_split(model)
    tested, total = source.split or (1.0, len(source))
    if fraction and total == images and tested > fraction:
        raise UserError(
            f"the model was trained on a folder of {images} images like this one, with --split {fraction:g}; give "
            f"--split {fraction:g} to test on the images left out, or --split 1 for all of them"
        )


def with_model_labels(source: Source, model: nn.Module) -> Source:
    """Return the source with labels by the names of the model's classes, where both are known, else unchanged.

    Raises: UserError when a model has classes of other names than a folder of images, or a name stands for several.
    """
    own = tuple(map(composed, label_names(model))) or _names_in_config(model, source.classes)
    if not own or own == source.classes:
        return source
    unknown = [name for name in source.classes if name not in own]
    if not unknown:
        for names, whose in ((own, "the model"), (source.classes, "the data")):
            for name in source.classes:
                if (count := names.count(name)) > 1:
                    raise UserError(f"{whose} has {count} classes named {name!r}; give each class a name of its own")
        relabelled = copy.copy(source)
        relabelled.labels = np.asarray([own.index(name) for name in source.classes])[source.labels]
        relabelled.classes = own
        return relabelled
    if isinstance(getattr(source.images, "images", source.images), ImageFiles):
        known = len(unknown) < len(source.classes)
        todo = f"rename the folders that differ ({shorten(unknown)})" if known else "give images of the model's classes"
        raise UserError(
            f"the model has {len(own)} classes ({shorten(own)}), the data has {len(source.classes)} "
            f"({shorten(source.classes)}); {todo}"
        )
    return source


def _names_in_config(model: nn.Module, classes: Sequence[str]) -> tuple[str, ...]:
    names = getattr(getattr(model, "config", None), "id2label", None)
    own = tuple(composed(str(name)) for name in names.values()) if isinstance(names, Mapping) else ()
    return own if set(own) & set(classes) else ()


def sample_images(source: Source, samples: int) -> Source:
    """Return random images of a source in random order, the same ones at every call."""
    return source.subset(random_indices(len(source), samples))


def images_on_device(loader: Iterable[Any], model: nn.Module) -> Iterator[torch.Tensor]:
    """Iterate over the image batches of a loader, on the device and in the precision of the model."""
    parameter = next(model.parameters())
    return (images.to(parameter) for images, _ in loader)


def evaluation_data(
    model: nn.Module,
    data: str | None = None,
    root: Path | None = None,
    size: tuple[int, int] | None = None,
    classes: int | None = None,
    test_fraction: float | None = None,
) -> tuple[Source, dict[str, Any]]:
    """Open the test split of a data source (by default the model's own) and return it with the model's data config.

    Raises: UserError when the data is missing, the size is not positive, or the data has not the model's classes.
    """
    config = evaluation_config(model, size)
    source = open_test_images(model, data, root, classes, test_fraction)
    where = "" if data or root else f" in {registry.data_root(data_root(model, data, root))}"
    check_own_classes(model, source.classes, where, size=size)
    return source, config


def evaluate_classifier(
    model: nn.Module,
    data: Iterable[Any] | Source | str | Path | None,
    *,
    test_fraction: float | None = None,
    size: tuple[int, int] | None = None,
    batch_size: int = 100,
    workers: int = 0,
) -> dict[str, float]:
    """Return the accuracy as `iso.evaluate`. Raises: UserError when the data is missing, empty, or of other classes."""
    if data is None or isinstance(data, str | Path):
        source, config = evaluation_data(model, str(data) if data else None, size=size, test_fraction=test_fraction)
    elif test_fraction is not None:
        raise UserError("test_fraction splits a folder of images; leave it out for a source or a loader")
    elif isinstance(data, Source):
        source, config = with_model_labels(data, model), evaluation_config(model, size)
        check_own_classes(model, source.classes, size=size)
    elif size:
        raise UserError("size is that of images from a folder or a source; leave it out for a loader")
    else:
        return evaluate_loader(model, data)
    fitted = fit_to_size(model, size) if size else model
    return evaluate_loader(fitted, eval_loader(source, config, batch_size, workers))
