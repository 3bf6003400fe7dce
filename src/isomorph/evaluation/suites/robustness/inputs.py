"""The images of a robustness evaluation: clean images to corrupt, or a published data set of corrupted ones."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from isomorph.data.sources import Source, spaced_images
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import built_size, evaluation_config, input_channels
from isomorph.evaluation.suites.imagenet.classes import with_imagenet_labels
from isomorph.evaluation.suites.robustness.published import CifarC, ImageNetC, Published

PUBLISHED_SIZE = (224, 224)


@dataclass(frozen=True)
class RobustnessInputs:
    """The images that a model is evaluated on: the clean source, the published data set, data config, crop and seed."""

    source: Source | None
    published: Published | None
    config: Mapping[str, Any]
    crop: ImageTransform
    imagenet: bool
    num_classes: int
    seed: int
    limit: int | None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images."""
        height, width = self.config["input_size"][-2:]
        return height, width

    def identity(self) -> dict[str, Any]:
        """Return the values that must be equal for two results to be comparable."""
        return {
            "suite": (self.published or ImageNetC).suite,
            "version": CORRUPTION_VERSION,
            "source": self._describe_source(),
            "limit": self.limit,
            "size": list(self.size),
            "seed": self.seed,
            "pictures": self.describe_images(),
        }

    def _describe_source(self) -> str:
        """Return a hash of the clean images, or the folder of published ones and how they are chosen."""
        if not self.published:
            return fingerprint(self.clean_source())
        chosen = "" if self.limit is None else ", evenly spaced over the classes"  # older versions: over the files
        return f"published {self.published.root.resolve()}{chosen}"

    def describe_data(self) -> str:
        """Return the number of images and classes in words; "" for a published data set."""
        if self.published:
            return ""
        source = self.clean_source()
        return f"{len(source):,} images of {len(source.classes):,} classes"

    def describe_constants(self) -> str:
        """Return in words which constants define the severities: CIFAR-10-C has others than ImageNet-C."""
        if isinstance(self.published, CifarC):
            return "CIFAR-C's constants"
        if self.published or self.size == PUBLISHED_SIZE:
            return SEVERITY_SCALE
        return f"{SEVERITY_SCALE} at every size, not CIFAR-10-C's milder ones"

    def describe_images(self) -> str:
        """Return in words how the images are made. Results are compared by this text, so it must not change."""
        if self.published:
            return self.published.description
        first = "shorter side to 256/224 of the size, middle cut out" if self.imagenet else "the model's own test crop"
        return f"{first}, {self.size[1]} x {self.size[0]} px, then corrupted"

    def clean_source(self) -> Source:
        """Return `limit` clean images at most, evenly spaced over the classes. Raises: UserError without a source."""
        if self.source is None:
            raise UserError("there are no clean images; give a source")
        return spaced_images(self.source, self.limit)

    def groups(self, corruption: str, severities: Sequence[int]) -> Iterator[tuple[tuple[int, ...], CorruptedImages]]:
        """Iterate over the data sets of a corruption: one with all severities, or one for each published folder."""
        if self.published is None:
            source = self.clean_source()
            yield tuple(severities), CorruptedImages(source, self.crop, corruption, severities, self.seed)
            return
        for severity in severities:
            cell = spaced_images(self.published.cell(corruption, severity, self.num_classes), self.limit)
            yield (severity,), CorruptedImages(cell, self.crop)


def _match_labels(source: Source, num_classes: int, imagenet: bool, partial: bool) -> Source:
    """Return the source with the model's labels. Raises: UserError when its classes are not the model's."""
    if len(source.classes) != num_classes and not (imagenet and partial):
        hint = ", or --partial (partial=True) to use a part of ImageNet's classes" if imagenet else ""
        raise UserError(
            f"the model has {num_classes} classes, the data has {len(source.classes)}; give data with the model's "
            f"labels, or the classes that it was trained with (data.classes){hint}"
        )
    return with_imagenet_labels(source, "the data") if imagenet else source


def _check_channels(model: nn.Module) -> None:
    """Raise UserError unless the model takes colour images."""
    if input_channels(model) != 3:
        raise UserError(f"the corruptions need images of 3 channels, the model takes {input_channels(model)}")


def prepare_inputs(
    model: nn.Module,
    source: Source | None,
    published: Published | None,
    size: tuple[int, int] | None,
    seed: int,
    limit: int | None,
    partial: bool = False,
) -> RobustnessInputs:
    """Return the images for a model; for a model of 1000 classes, with ImageNet's labels by class name.

    Raises: UserError when classes, channels or sizes do not fit.
    """
    if source is None and published is None:
        raise UserError("give a source of clean images, or the folder of a published data set")
    num_classes = getattr(model, "num_classes", len(source.classes) if source else 1000)
    imagenet = num_classes == 1000
    if source is not None:
        source = _match_labels(source, num_classes, imagenet, partial)
    _check_channels(model)
    if size is None:
        fixed = (getattr(model, "pretrained_cfg", None) or {}).get("fixed_input_size")
        published_size = (imagenet or isinstance(published, ImageNetC)) and not fixed and built_size(model) is None
        size = PUBLISHED_SIZE if published_size else evaluation_config(model)["input_size"][-2:]
    config = evaluation_config(model, (size[0], size[1])) | (IMAGENET_C_CROP if imagenet else {})
    if published and imagenet and tuple(size) != PUBLISHED_SIZE:
        raise UserError(
            f"the published images are 224 x 224, the model needs {size[1]} x {size[0]}, and resizing would change the "
            "corruptions; give a source and no folder to corrupt images at that size"
        )
    check_input_size(config)
    return RobustnessInputs(source, published, config, image_transform(config), imagenet, num_classes, seed, limit)
