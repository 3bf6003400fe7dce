"""The images of a robustness evaluation: clean images to corrupt, or a published data set of corrupted ones.

The published data sets are ImageNet-C, CIFAR-10-C and CIFAR-100-C, as their archives unpack.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import nn

from isomorph.data.corruptions.corrupt import (
    CORRUPTION_VERSION,
    IMAGENET_C_CROP,
    MIN_IMAGE_SIDE,
    SEVERITIES,
    SEVERITY_SCALE,
    CorruptedImages,
    ImageTransform,
    fingerprint,
    image_transform,
)
from isomorph.data.formats.imagefolder import imagefolder
from isomorph.data.formats.naming import visible
from isomorph.data.imagenet_labels import with_imagenet_labels
from isomorph.data.sources import Source, spaced_images
from isomorph.errors import UserError, first_line
from isomorph.evaluation.input_sizes import (
    built_size,
    check_own_classes,
    class_count,
    evaluation_config,
    input_channels,
)
from isomorph.evaluation.model_data import with_model_labels

PUBLISHED_SIZE = (224, 224)
Severities = Mapping[str, Sequence[int]]
"""Severities by corruption."""


@dataclass(frozen=True)
class ImageNetC:
    """ImageNet-C: folders CORRUPTION/SEVERITY/WNID/*.JPEG, also inside category folders (`noise/gaussian_noise/1`).

    Raises: UserError if the folder of a wanted corruption or severity is missing.
    """

    root: Path
    wanted: Severities
    suite: ClassVar[str] = "imagenet-c"
    description: ClassVar[str] = "published pictures, as they are"
    """Part of the identity of saved results: it must not change."""
    constants: ClassVar[str] = SEVERITY_SCALE

    def __post_init__(self) -> None:
        for corruption in self.wanted:
            self._folder(corruption)

    def cell(self, corruption: str, severity: int, num_classes: int) -> Source:
        """Open the images of a corruption at a severity.

        For 1000 classes, labels follow from the wnids, so classes may be missing; otherwise from the sorted folders.

        Raises: UserError when the classes are not the model's.
        """
        folder = self._folder(corruption) / str(severity)
        source = imagefolder("test", folder)
        if num_classes == 1000:
            return with_imagenet_labels(source, str(folder))
        if len(source.classes) != num_classes:
            raise UserError(f"{folder} has {len(source.classes)} classes, the model has {num_classes}")
        return source

    def _folder(self, corruption: str) -> Path:
        if not os.path.isdir(self.root):
            raise UserError(f"no folder {self.root}; give the one with ImageNet-C's CORRUPTION/SEVERITY/CLASS/*.JPEG")
        folders = [folder for top in (self.root, *visible(self.root)) for folder in visible(top)]
        found = next((folder for folder in folders if folder.name == corruption), None)
        if found is None:
            raise UserError(f"{self.root} has no folder {corruption}; unpack it, or choose others with --corruption")
        for severity in self.wanted.get(corruption, ()):
            if not (found / str(severity)).is_dir():
                raise UserError(f"{found} has no folder {severity}; it must hold one per severity, 1 to 5")
        return found


@dataclass(frozen=True)
class CifarC:
    """CIFAR-10-C or CIFAR-100-C: arrays CORRUPTION.npy with the images of severities 1 to 5 in turn, and labels.npy.

    Shape of the arrays: (5 n, H, W, 3) uint8, (5 n,)
    Raises: UserError if the array of a wanted corruption, or the labels, are missing or do not fit.
    """

    root: Path
    wanted: Severities
    suite: ClassVar[str] = "cifar-c"
    description: ClassVar[str] = "published pictures in the model's own test crop"
    """Part of the identity of saved results: it must not change."""
    constants: ClassVar[str] = "CIFAR-C's constants"

    def __post_init__(self) -> None:
        if not os.path.isdir(self.root):
            raise UserError(f"no folder {self.root}; give the one with CIFAR-C's CORRUPTION.npy and labels.npy")
        labels = self._array("labels")
        for corruption in self.wanted:
            images = self._array(corruption)
            shape, count = images.shape, len(labels)
            fits = len(shape) == 4 and shape[3] == 3 and shape[0] == count and count % len(SEVERITIES) == 0
            if not fits or images.dtype != np.uint8:
                found = f"{self.root / corruption}.npy has shape {' x '.join(map(str, shape))} of {images.dtype}"
                wanted = f"N x height x width x 3 of uint8, with N a multiple of 5 and equal to the {count} labels"
                raise UserError(f"{found}; it must be {wanted}")

    def cell(self, corruption: str, severity: int, num_classes: int) -> Source:
        """Open the images of a corruption at a severity. Raises: UserError when their labels are not the model's."""
        labels = self._array("labels")
        present, count = int(labels.max()) + 1, len(labels) // len(SEVERITIES)
        if present != num_classes:
            raise UserError(f"the images in {self.root} have {present} classes, the model has {num_classes}")
        part = slice((severity - 1) * count, severity * count)
        images: Any = self._array(corruption)[part]
        return Source(images, labels[part], map(str, range(num_classes)))

    def _array(self, name: str) -> np.ndarray:
        """Open an array file, memory-mapped. Raises: UserError when it is missing or not an array."""
        path = self.root / f"{name}.npy"
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise UserError(f"no {path}; unpack CIFAR-10-C or CIFAR-100-C there") from None
        except (ValueError, EOFError, OSError) as error:
            raise UserError(f"{path} cannot be read as an array ({first_line(error)})") from None


Published = ImageNetC | CifarC
PUBLISHED_SUITES: dict[str, type[Published]] = {kind.suite: kind for kind in (ImageNetC, CifarC)}


def open_published(suite: str, folder: str | Path | None, wanted: Severities) -> Published | None:
    """Open the published data set of a suite; None without a folder.

    Raises: UserError for an unknown suite, the folder of another suite, no folder for cifar-c, or missing images.
    """
    if suite not in PUBLISHED_SUITES:
        raise UserError(f"suite {suite!r} is unknown; choose one of {', '.join(PUBLISHED_SUITES)}")
    if folder is None and suite == CifarC.suite:
        raise UserError("the suite cifar-c needs the published images; give the folder of CIFAR-10-C or CIFAR-100-C")
    path = Path(folder or "").expanduser()
    if folder and suite == ImageNetC.suite and (path / "labels.npy").is_file():
        raise UserError(f"{folder} holds the arrays of CIFAR-C; choose the suite cifar-c")
    return PUBLISHED_SUITES[suite](path, wanted) if folder else None


@dataclass(frozen=True)
class RobustnessInputs:
    """The images that a model is evaluated on: the clean source, the published data set, data config, crop and seed."""

    source: Source | None
    published: Published | None
    config: Mapping[str, Any]
    crop: ImageTransform
    num_classes: int
    seed: int
    limit: int | None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images."""
        height, width = self.config["input_size"][-2:]
        return height, width

    def identity(self) -> dict[str, Any]:
        """Return the values that must be equal for two results to be comparable, and data and constants in words.

        Results are compared by the text of `pictures`, so it must not change.
        """
        if self.published:
            source, data = f"published {self.published.root.resolve()}", ""
            pictures, constants = self.published.description, self.published.constants
        else:
            assert self.source is not None
            source = fingerprint(self.source)
            data = f"{len(self.source):,} images of {len(self.source.classes):,} classes"
            middle = "shorter side to 256/224 of the size, middle cut out"
            crop = middle if self.num_classes == 1000 else "the model's own test crop"
            pictures = f"{crop}, {self.size[1]} x {self.size[0]} px, then corrupted"
            milder = "" if self.size == PUBLISHED_SIZE else " at every size, not CIFAR-10-C's milder ones"
            constants = SEVERITY_SCALE + milder
        return {
            "suite": (self.published or ImageNetC).suite,
            "version": CORRUPTION_VERSION,
            "source": source,
            "limit": self.limit,
            "size": list(self.size),
            "seed": self.seed,
            "pictures": pictures,
            "data": data,
            "constants": constants,
        }

    def groups(self, corruption: str | None, severities: Sequence[int]) -> Iterator[CorruptedImages]:
        """Yield the images of a corruption: of all severities together, or of one at a time from published folders.

        For None the clean images, if there are any.
        """
        if self.source is not None and (corruption is None or self.published is None):
            yield CorruptedImages(self.source, self.crop, corruption, severities, self.seed)
        elif self.published is not None and corruption is not None:
            for severity in severities:
                cell = spaced_images(self.published.cell(corruption, severity, self.num_classes), self.limit)
                yield CorruptedImages(cell, self.crop, None, (severity,))


def prepare_inputs(
    model: nn.Module,
    source: Source | None,
    published: Published | None = None,
    size: tuple[int, int] | None = None,
    seed: int = 0,
    limit: int | None = None,
    partial: bool = False,
) -> RobustnessInputs:
    """Return the images for a model; for a model of 1000 classes, with ImageNet's labels by class name.

    Raises: UserError when classes, channels or sizes do not fit.
    """
    if source is None and published is None:
        raise UserError("give a source of clean images, or the folder of a published data set")
    num_classes = class_count(model, size)
    imagenet = num_classes == 1000
    if source is not None:
        source = source if imagenet else with_model_labels(source, model)
        if not (imagenet and partial):
            hint = ", or --partial (partial=True) to use a part of ImageNet's classes" if imagenet else ""
            check_own_classes(model, source.classes, more=hint, size=size)
        source = spaced_images(with_imagenet_labels(source, "the data") if imagenet else source, limit)
    if (channels := input_channels(model)) != 3:
        raise UserError(f"the corruptions need images of 3 channels, the model takes {channels}")
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
    if min(size) < MIN_IMAGE_SIDE:
        raise UserError(
            f"corruptions need images of {MIN_IMAGE_SIDE} px at least, and the model's input is {size[1]} x {size[0]}; "
            f"give a larger size, for example --size {MIN_IMAGE_SIDE}"
        )
    return RobustnessInputs(source, published, config, image_transform(config), num_classes, seed, limit)
