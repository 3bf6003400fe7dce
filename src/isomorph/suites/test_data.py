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
    """The source that a model's weights were trained on, as far as isomorph has it."""
    config = getattr(model, "pretrained_cfg", None) or {}
    return config.get("source") or ("cifar10" if "cifar10" in (config.get("tag") or "") else "imagefolder")


def open_test_images(model: nn.Module, data: str | None, root: Path | None, classes: int | None = None) -> Source:
    """The test split of a source, by default the model's own; only its first classes where a number is given."""
    source = open_source(data or default_data(model), "test", root)
    return source if classes is None else first_classes(source, classes)


def sample_images(source: Source, samples: int) -> Source:
    """Images of a source drawn at random, the same ones at every call."""
    drawn = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:samples]
    return source.subset(drawn.tolist())


def images_on_device(loader: Iterable[Any], model: nn.Module) -> Iterator[torch.Tensor]:
    """The images of a loader, on the model's device."""
    device = next(model.parameters()).device
    return (images.to(device) for images, _ in loader)


def evaluation_data(
    model: nn.Module,
    data: str | None = None,
    root: Path | None = None,
    size: tuple[int, int] | None = None,
    classes: int | None = None,
) -> tuple[Source, dict[str, Any]]:
    """The test split of a source (by default the model's own) and the data config to evaluate the model with.

    Raises: UserError when the data is missing, the size has no pixel, or the classes are not those of the model.
    """
    config, source = evaluation_config(model, size), open_test_images(model, data, root, classes)
    known, found = getattr(model, "num_classes", len(source.classes)), len(source.classes)
    if known != found:
        raise UserError(
            f"the model knows {known} classes, the data has {found}: these labels are not its own "
            "(trained with data.classes? then give --classes)"
        )
    return source, config
