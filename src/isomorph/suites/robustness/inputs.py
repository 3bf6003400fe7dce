"""What a model is shown: clean images framed as the suite asks, or the published pictures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from isomorph.data.corruptions.corrupt import CORRUPTION_VERSION, SEVERITY_SCALE
from isomorph.data.corruptions.dataset import (
    IMAGENET_C_CROP,
    CorruptedImages,
    ImageTransform,
    check_input_size,
    fingerprint,
    image_transform,
)
from isomorph.data.sources import Source
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import evaluation_config, input_channels
from isomorph.suites.imagenet.classes import with_imagenet_labels
from isomorph.suites.robustness.published import CifarC, ImageNetC, Published

PUBLISHED_SIZE = (224, 224)


@dataclass(frozen=True)
class RobustnessInputs:
    """What is shown to the model and how: the clean source, the published pictures, size, frame, seed."""

    source: Source | None
    published: Published | None
    config: Mapping[str, Any]
    frame: ImageTransform
    imagenet: bool
    classes: int
    seed: int
    limit: int | None

    @property
    def size(self) -> tuple[int, int]:
        height, width = self.config["input_size"][-2:]
        return height, width

    def identity(self) -> dict[str, Any]:
        """What must be the same for two results to be comparable."""
        source = f"published {self.published.root.resolve()}" if self.published else fingerprint(self.clean_source())
        return {
            "suite": (self.published or ImageNetC).suite,
            "version": CORRUPTION_VERSION,
            "source": source,
            "limit": self.limit,
            "size": list(self.size),
            "seed": self.seed,
            "pictures": self.described(),
        }

    def data(self) -> str:
        """How many images of how many classes there are, in words; nothing of published ones."""
        if self.published:
            return ""
        source = self.clean_source()
        return f"{len(source):,} images of {len(source.classes):,} classes"

    def constants(self) -> str:
        """Whose constants the severities have: CIFAR-10-C, at its size, has others."""
        if isinstance(self.published, CifarC):
            return "CIFAR-C's constants"
        if self.published or self.size == PUBLISHED_SIZE:
            return SEVERITY_SCALE
        return f"{SEVERITY_SCALE} at every size, not CIFAR-10-C's milder ones"

    def described(self) -> str:
        """How the pictures came about, in words."""
        if self.published:
            return self.published.shown
        first = "shorter side to 256/224 of the size, middle cut out" if self.imagenet else "the model's own test crop"
        return f"{first}, {self.size[1]} x {self.size[0]} px, then corrupted"

    def clean_source(self) -> Source:
        """The clean images, all or evenly spaced ones. Raises: UserError when there is no source."""
        if self.source is None:
            raise UserError("there are no clean images; give a source")
        return _limit_images(self.source, self.limit)

    def groups(self, corruption: str, severities: Sequence[int]) -> Iterator[tuple[tuple[int, ...], CorruptedImages]]:
        """Datasets of a corruption's cells: all severities from one decoding, or each from its published folder."""
        if self.published is None:
            source = self.clean_source()
            yield tuple(severities), CorruptedImages(source, self.frame, corruption, severities, self.seed)
            return
        for severity in severities:
            cell = _limit_images(self.published.cell(corruption, severity, self.classes), self.limit)
            yield (severity,), CorruptedImages(cell, self.frame)


def _limit_images(source: Source, limit: int | None) -> Source:
    """So many images, evenly spaced; all of them without a limit."""
    if limit is None or limit >= len(source):
        return source
    return source.subset(np.linspace(0, len(source) - 1, limit).astype(int))


def _match_labels(source: Source, classes: int, imagenet: bool, partial: bool) -> Source:
    """The source with the model's labels. Raises: UserError when its classes are not the model's."""
    if len(source.classes) != classes and not (imagenet and partial):
        hint = "; to use a part of ImageNet's classes: --partial (partial=True)" if imagenet else ""
        raise UserError(
            f"the model knows {classes} classes, the data has {len(source.classes)}: not the same labels (trained with "
            f"data.classes? then give --classes){hint}"
        )
    return with_imagenet_labels(source, "the data") if imagenet else source


def prepare_inputs(
    model: nn.Module,
    source: Source | None,
    published: Published | None,
    size: tuple[int, int] | None,
    seed: int,
    limit: int | None,
    partial: bool = False,
) -> RobustnessInputs:
    """What the model is shown; a source for a model of 1000 classes gets ImageNet's labels by the names of its classes.

    Raises: UserError when classes or sizes do not fit.
    """
    if source is None and published is None:
        raise UserError("give a source of clean images, or the folder of the published suite")
    classes = getattr(model, "num_classes", len(source.classes) if source else 1000)
    imagenet = classes == 1000
    if source is not None:
        source = _match_labels(source, classes, imagenet, partial)
    if input_channels(model) != 3:
        raise UserError(
            f"the corruptions are of colour pictures, the model's images have {input_channels(model)} channels"
        )
    square = imagenet or isinstance(published, ImageNetC)
    if size is None:
        fixed = (getattr(model, "pretrained_cfg", None) or {}).get("fixed_input_size")
        size = PUBLISHED_SIZE if square and not fixed else evaluation_config(model)["input_size"][-2:]
    config = evaluation_config(model, (size[0], size[1])) | (IMAGENET_C_CROP if imagenet else {})
    if published and imagenet and tuple(size) != PUBLISHED_SIZE:
        raise UserError(
            f"the published pictures are 224 x 224, the model is to see {size[1]} x {size[0]}: resampling would change "
            "the corruptions; corrupt on the fly instead (a source and no folder)"
        )
    check_input_size(config)
    return RobustnessInputs(source, published, config, image_transform(config), imagenet, classes, seed, limit)
