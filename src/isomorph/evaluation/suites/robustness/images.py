"""The images of a robustness evaluation: clean images to corrupt, or a published data set of corrupted ones.

The published data sets are ImageNet-C, CIFAR-10-C and CIFAR-100-C, as their archives unpack.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from torch import nn

from isomorph.data.corruptions.corrupt import CORRUPTION_CATEGORIES, CORRUPTION_VERSION, SEVERITIES, SEVERITY_SCALE
from isomorph.data.corruptions.dataset import (
    IMAGENET_C_CROP,
    CorruptedImages,
    ImageTransform,
    check_input_size,
    fingerprint,
    image_transform,
)
from isomorph.data.formats.imagefolder import imagefolder
from isomorph.data.sources import Source, spaced_images
from isomorph.errors import UserError, first_line
from isomorph.evaluation.input_sizes import built_size, check_own_classes, evaluation_config, input_channels
from isomorph.evaluation.suites.imagenet import with_imagenet_labels

PUBLISHED_SIZE = (224, 224)


class ImageNetC:
    """ImageNet-C: folders CORRUPTION/SEVERITY/WNID/*.JPEG, also inside category folders (`noise/gaussian_noise/1`)."""

    suite: ClassVar[str] = "imagenet-c"
    description: ClassVar[str] = "published pictures, as they are"
    """Part of the identity of saved results: it must not change."""
    constants: ClassVar[str] = SEVERITY_SCALE

    def __init__(self, root: Path) -> None:
        self.root = root

    def check_files(self, wanted: Mapping[str, Sequence[int]]) -> None:
        """Raise UserError if the folder of one of these corruptions and severities is missing."""
        for corruption, severities in wanted.items():
            _corruption_folder(self.root, corruption, severities)

    def cell(self, corruption: str, severity: int, num_classes: int) -> Source:
        """Open the images of a corruption at a severity.

        For 1000 classes, labels follow from the wnids, so classes may be missing; otherwise from the sorted folders.

        Raises: UserError when a folder is missing, or its classes are not the model's.
        """
        folder = _corruption_folder(self.root, corruption, [severity]) / str(severity)
        source = imagefolder("test", folder)
        if num_classes == 1000:
            return with_imagenet_labels(source, str(folder))
        if len(source.classes) != num_classes:
            raise UserError(f"{folder} has {len(source.classes)} classes, the model has {num_classes}")
        return source


class CifarC:
    """CIFAR-10-C or CIFAR-100-C: arrays CORRUPTION.npy with the images of severities 1 to 5 in turn, and labels.npy."""

    suite: ClassVar[str] = "cifar-c"
    description: ClassVar[str] = "published pictures in the model's own test crop"
    """Part of the identity of saved results: it must not change."""
    constants: ClassVar[str] = "CIFAR-C's constants"

    def __init__(self, root: Path) -> None:
        self.root = root

    def check_files(self, wanted: Mapping[str, Sequence[int]]) -> None:
        """Raise UserError if the array of one of these corruptions, or the labels, are missing or do not fit."""
        if not self.root.is_dir():
            raise UserError(f"no folder {self.root}; give the one with CIFAR-C's CORRUPTION.npy and labels.npy")
        for corruption in wanted:
            path = self.root / f"{corruption}.npy"
            images = _open_array(path)
            shape = images.shape
            if len(shape) != 4 or shape[3] != 3 or shape[0] != len(self.labels) or shape[0] % len(SEVERITIES):
                raise UserError(
                    f"{path} has shape {' x '.join(map(str, shape))}; it must be N x height x width x 3 with N a "
                    f"multiple of 5 and equal to the {len(self.labels)} labels"
                )
            if images.dtype != np.uint8 or not images.size:
                raise UserError(f"{path} holds {images.dtype}; it must hold images as uint8")

    @cached_property
    def labels(self) -> np.ndarray:
        """Labels of all images of an array. Shape: (5 * images,)"""
        labels = _open_array(self.root / "labels.npy")
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or not labels.size or labels.min() < 0:
            raise UserError(f"{self.root / 'labels.npy'} must be a 1-D array with a class number for each image")
        return np.asarray(labels, np.int64)

    def cell(self, corruption: str, severity: int, num_classes: int) -> Source:
        """Open the images of a corruption at a severity. Raises: UserError when their labels are not the model's."""
        count = len(self.labels) // len(SEVERITIES)
        labels = self.labels[(severity - 1) * count : severity * count]
        present = int(self.labels.max()) + 1
        if present != num_classes:
            raise UserError(f"the images in {self.root} have {present} classes, the model has {num_classes}")
        images = _ArrayImages(self.root / f"{corruption}.npy", (severity - 1) * count, count)
        return Source(images, labels, map(str, range(num_classes)))


class _ArrayImages(Sequence[Image.Image]):
    """A slice of the images in an array file, read one by one. Shape of the array: (n, H, W, 3) uint8"""

    def __init__(self, path: Path, start: int, count: int) -> None:
        self.path, self.start, self.size = path, start, count

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        position = range(self.start, self.start + self.size)[index]
        return Image.fromarray(np.array(_open_array(self.path)[position]))

    def name(self, index: int) -> str:
        """Return the name of an image for messages."""
        return f"image {self.start + index} of {self.path}"


def _open_array(path: Path) -> np.ndarray:
    """Open an array file, memory-mapped. Raises: UserError when it is missing or not an array."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        present = ", ".join(sorted(file.stem for file in path.parent.glob("*.npy") if file.stem != "labels"))
        hint = f"choose from those present with --corruption: {present}" if present else "unpack CIFAR-10-C there"
        raise UserError(f"no {path}; {hint}") from None
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{path} cannot be read as an array ({first_line(error)})") from None


Published = ImageNetC | CifarC
PUBLISHED_SUITES: dict[str, type[Published]] = {kind.suite: kind for kind in (ImageNetC, CifarC)}


def open_published(suite: str, folder: Path | None) -> Published | None:
    """Open the published data set of a suite; None without a folder.

    Raises: UserError for an unknown suite, the folder of another suite, or no folder for cifar-c.
    """
    if suite not in PUBLISHED_SUITES:
        raise UserError(f"suite {suite!r} is unknown; choose one of {', '.join(PUBLISHED_SUITES)}")
    if folder is None and suite == CifarC.suite:
        raise UserError("the suite cifar-c needs the published images; give the folder of CIFAR-10-C or CIFAR-100-C")
    if folder and suite == ImageNetC.suite and (folder / "labels.npy").is_file():
        raise UserError(f"{folder} holds the arrays of CIFAR-C; choose the suite cifar-c")
    return PUBLISHED_SUITES[suite](folder) if folder else None


def _corruption_folder(root: Path, corruption: str, severities: Sequence[int]) -> Path:
    """Return the folder of a corruption. Raises: UserError when it, the suite's or that of a severity is missing."""
    if not root.is_dir():
        raise UserError(f"no folder {root}; give the one with ImageNet-C's CORRUPTION/SEVERITY/CLASS/*.JPEG")
    for folder in [root / corruption, *sorted(root.glob(f"*/{corruption}"))]:
        if folder.is_dir():
            missing = [severity for severity in severities if not (folder / str(severity)).is_dir()]
            if missing:
                raise UserError(f"{folder} has no folder {missing[0]}; it must hold one per severity, 1 to 5")
            return folder
    present = [
        path.name
        for path in sorted((*root.glob("*"), *root.glob("*/*")))
        if path.is_dir() and path.name not in CORRUPTION_CATEGORIES
    ]
    nearest = "".join(f"; nearest: {name}" for name in get_close_matches(corruption, present, n=1))
    raise UserError(f"{root} has no folder {corruption}{nearest}; unpack it, or choose others with --corruption")


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

    @property
    def clean(self) -> Source:
        """The clean images, which are there without a published data set."""
        assert self.source is not None
        return self.source

    def identity(self) -> dict[str, Any]:
        """Return the values that must be equal for two results to be comparable, and data and constants in words.

        Results are compared by the text of `pictures`, so it must not change.
        """
        if self.published:
            source, data = f"published {self.published.root.resolve()}", ""
            pictures, constants = self.published.description, self.published.constants
        else:
            source = fingerprint(self.clean)
            data = f"{len(self.clean):,} images of {len(self.clean.classes):,} classes"
            middle = "shorter side to 256/224 of the size, middle cut out"
            crop = middle if self.imagenet else "the model's own test crop"
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

    def groups(self, corruption: str, severities: Sequence[int]) -> Iterator[tuple[tuple[int, ...], CorruptedImages]]:
        """Iterate over the data sets of a corruption: one with all severities, or one for each published folder."""
        if self.published is None:
            yield tuple(severities), CorruptedImages(self.clean, self.crop, corruption, severities, self.seed)
            return
        for severity in severities:
            cell = spaced_images(self.published.cell(corruption, severity, self.num_classes), self.limit)
            yield (severity,), CorruptedImages(cell, self.crop)


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
        if not (imagenet and partial):
            hint = ", or --partial (partial=True) to use a part of ImageNet's classes" if imagenet else ""
            check_own_classes(model, source.classes, more=hint)
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
    check_input_size(config)
    return RobustnessInputs(source, published, config, image_transform(config), imagenet, num_classes, seed, limit)
