"""What a model says of itself: how it was created, the images that it takes, and its classes.

timm keeps this in two attributes of the model: `pretrained_cfg`, and the arguments of timm.create_model. This file is
the only one that reads and writes them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from timm.models import get_model_args
from torch import nn

from isomorph.errors import UserError

# Height and width in pixels.
ImageSize = tuple[int, int]


@dataclass(frozen=True)
class ModelSpec:
    """What a model is, apart from its weights and edits.

    >>> from isomorph.spec import spec_of
    >>> spec = spec_of(timm.create_model("cifar_resnet20", num_classes=3))
    >>> spec.name, spec.arguments["num_classes"], spec.input_size
    ('cifar_resnet20', 3, (3, 32, 32))
    """

    name: str = ""
    """Name in timm's registry, "" for a model that timm did not create."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of timm.create_model that JSON can hold, as they would be for the model as it is now."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """timm's `pretrained_cfg`: images (input_size, mean, std, crop_pct, ...), label_names, and names of layers."""

    @property
    def input_size(self) -> tuple[int, ...] | None:
        """Channels, height and width of the images for which the weights were trained, or None."""
        size = self.config.get("input_size")
        return tuple(size) if size else None

    @property
    def classes(self) -> list[str]:
        """Names of the classes of the weights, empty where they are not known."""
        return list(self.config.get("label_names") or ())

    @property
    def task(self) -> dict[str, Any]:
        """Name and options of the task that the model was trained for; empty for image classification."""
        return self.config.get("task") or {}

    @property
    def split(self) -> tuple[float | None, int | None]:
        """The fraction of the data that training left out, and the number of examples before that."""
        fraction, examples = self.config.get("split") or (None, None)
        return fraction, examples

    @property
    def first_layers(self) -> tuple[str, ...]:
        """Names of the layers that read the images."""
        return layer_names(self.config.get("first_conv"))

    @property
    def classifiers(self) -> tuple[str, ...]:
        """Names of the layers that give the classes."""
        return layer_names(self.config.get("classifier"))


def layer_names(entry: Any) -> tuple[str, ...]:
    """Return the names of layers in an entry of timm's configs: one name, several or None."""
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry or ())


def spec_of(model: Any) -> ModelSpec:
    """Return what a model says of itself; empty for one that says nothing."""
    config = getattr(model, "pretrained_cfg", None) or {}
    return ModelSpec(config.get("architecture") or "", _arguments(model), config)


def _arguments(model: Any) -> dict[str, Any]:
    """Return the arguments that timm recorded, and what a model says of its classes, channels, pooling and size now."""
    recorded = {**getattr(model, "_model_args", {}), **get_model_args(model)}
    return {name: value for name, value in recorded.items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    """Return True for a value that JSON can hold, as checkpoints need it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def record_config(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Replace what a model says of its images and classes, where timm's resolve_data_config reads it."""
    model.pretrained_cfg = dict(config)  # type: ignore[assignment]
    model.default_cfg = model.pretrained_cfg


def image_size(size: int | Sequence[int]) -> ImageSize:
    """Return a height and a width; one number is both. Raises: UserError for anything else."""
    sides = (size, size) if isinstance(size, int) else size
    if isinstance(sides, Sequence) and len(sides) == 2:
        height, width = sides
        if isinstance(height, int) and isinstance(width, int) and min(height, width) > 0:
            return height, width
    raise UserError(
        f"size {size!r} must be a height and a width in pixels, like (224, 224) or 224 for both"
    )
