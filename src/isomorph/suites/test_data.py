"""The test images of a model, and the data config to evaluate it with."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isomorph.data.formats.registry import open_source
from isomorph.data.sources import Source, first_classes
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import evaluation_config


def default_data(model: nn.Module) -> str:
    """Return the data source that a model was trained on, or "imagefolder" if its config names none."""
    config = getattr(model, "pretrained_cfg", None) or {}
    return config.get("source") or ("cifar10" if "cifar10" in (config.get("tag") or "") else "imagefolder")


def open_test_images(model: nn.Module, data: str | None, root: Path | None, classes: int | None = None) -> Source:
    """Open the test split of a data source, by default the model's own; with `classes`, only of the first classes."""
    source = open_source(data or default_data(model), "test", root)
    return source if classes is None else first_classes(source, classes)


def sample_images(source: Source, samples: int) -> Source:
    """Return random images of a source, the same ones at every call."""
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
    return source.subset(order[:samples].tolist())


def images_on_device(loader: Iterable[Any], model: nn.Module) -> Iterator[torch.Tensor]:
    """Iterate over the image batches of a loader, moved to the model's device."""
    device = next(model.parameters()).device
    return (images.to(device) for images, _ in loader)


def evaluation_data(
    model: nn.Module,
    data: str | None = None,
    root: Path | None = None,
    size: tuple[int, int] | None = None,
    classes: int | None = None,
) -> tuple[Source, dict[str, Any]]:
    """Open the test split of a data source (by default the model's own) and return it with the model's data config.

    Raises: UserError when the data is missing, the size is not positive, or the data has not the model's classes.
    """
    config, source = evaluation_config(model, size), open_test_images(model, data, root, classes)
    count = len(source.classes)
    num_classes = getattr(model, "num_classes", count)
    if num_classes != count:
        raise UserError(
            f"the model has {num_classes} classes, the data has {count}; give data with the model's labels, or "
            "--classes if it was trained with data.classes"
        )
    return source, config
