"""The published pictures of ImageNet-C and of CIFAR-10-C and CIFAR-100-C, as their archives unpack."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from isomorph.data.corruptions.corrupt import CORRUPTION_CATEGORIES, SEVERITIES
from isomorph.data.formats.imagefolder import imagefolder
from isomorph.data.sources import Source, first_line
from isomorph.errors import UserError
from isomorph.suites.imagenet.classes import with_imagenet_labels


class ImageNetC:
    """The folders CORRUPTION/SEVERITY/WNID/*.JPEG, also below those of their categories (`noise/gaussian_noise/1`)."""

    suite: ClassVar[str] = "imagenet-c"
    shown: ClassVar[str] = "published pictures, as they are"

    def __init__(self, root: Path) -> None:
        self.root = root

    def refuse_missing(self, wanted: Mapping[str, Sequence[int]]) -> None:
        """Raises: UserError when a folder of these corruptions and severities is not there."""
        for corruption, severities in wanted.items():
            _corruption_folder(self.root, corruption, severities)

    def cell(self, corruption: str, severity: int, classes: int) -> Source:
        """The pictures of one cell.

        Labels of a 1000-class model go by WordNet id, so part of the classes will do; others go by sorted folder.

        Raises: UserError when a folder is missing, or its classes are not the model's.
        """
        folder = _corruption_folder(self.root, corruption, [severity]) / str(severity)
        source = imagefolder("test", folder)
        if classes == 1000:
            return with_imagenet_labels(source, str(folder))
        if len(source.classes) != classes:
            raise UserError(f"{folder} has {len(source.classes)} classes, the model knows {classes}")
        return source


class CifarC:
    """The arrays CORRUPTION.npy, the images of severity 1 to 5 one after the other, and their labels.npy."""

    suite: ClassVar[str] = "cifar-c"
    shown: ClassVar[str] = "published pictures in the model's own test crop"

    def __init__(self, root: Path) -> None:
        self.root = root

    def refuse_missing(self, wanted: Mapping[str, Sequence[int]]) -> None:
        """Raises: UserError when an array of these corruptions, or the labels, are not there or do not fit."""
        if not self.root.is_dir():
            raise UserError(f"no folder {self.root}; give the one with CIFAR-C's CORRUPTION.npy and labels.npy")
        for corruption in wanted:
            pictures = _open_array(self.root / f"{corruption}.npy")
            shape = pictures.shape
            if len(shape) != 4 or shape[3] != 3 or shape[0] != len(self.labels) or shape[0] % len(SEVERITIES):
                raise UserError(
                    f"{self.root / corruption}.npy is {' x '.join(map(str, shape))}, not five times as many images as "
                    f"there are, height, width and 3, with {len(self.labels)} labels"
                )
            if pictures.dtype != np.uint8 or not pictures.size:
                raise UserError(f"{self.root / corruption}.npy holds {pictures.dtype}, not images as uint8")

    @cached_property
    def labels(self) -> np.ndarray:
        labels = _open_array(self.root / "labels.npy")
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or not labels.size or labels.min() < 0:
            raise UserError(f"{self.root / 'labels.npy'} is not a row of class numbers, one for each image")
        return np.asarray(labels, np.int64)

    def cell(self, corruption: str, severity: int, classes: int) -> Source:
        """The pictures of one cell. Raises: UserError when their labels are not the model's."""
        count = len(self.labels) // len(SEVERITIES)
        labels = self.labels[(severity - 1) * count : severity * count]
        found = int(self.labels.max()) + 1
        if found != classes:
            raise UserError(f"the pictures in {self.root} are of {found} classes, the model knows {classes}")
        pictures = _ArrayImages(self.root / f"{corruption}.npy", (severity - 1) * count, count)
        return Source(pictures, labels, map(str, range(classes)))


class _ArrayImages(Sequence[Image.Image]):
    """Images of an array in a file, read one by one when asked for. Shape of the array: (n, H, W, 3) uint8"""

    def __init__(self, path: Path, start: int, count: int) -> None:
        self.path, self.start, self.size = path, start, count

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        place = range(self.start, self.start + self.size)[index]
        return Image.fromarray(np.array(_open_array(self.path)[place]))

    def name(self, index: int) -> str:
        return f"image {self.start + index} of {self.path}"


def _open_array(path: Path) -> np.ndarray:
    """An array in a file, mapped into memory. Raises: UserError when it is not there or no array."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        there = ", ".join(sorted(found.stem for found in path.parent.glob("*.npy") if found.stem != "labels"))
        others = f"choose those that are there with --corruption: {there}" if there else "unpack CIFAR-10-C there"
        raise UserError(f"no {path}; {others}") from None
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{path} cannot be read as an array ({first_line(error)})") from None


Published = ImageNetC | CifarC
PUBLISHED_SUITES: dict[str, type[Published]] = {kind.suite: kind for kind in (ImageNetC, CifarC)}


def open_published(suite: str, folder: Path | None) -> Published | None:
    """The published pictures of a suite; None without a folder.

    Raises: UserError for an unknown suite, a suite that is published only without its folder, or another's folder.
    """
    if suite not in PUBLISHED_SUITES:
        raise UserError(f"suite {suite!r} is unknown; choose one of {', '.join(PUBLISHED_SUITES)}")
    if folder is None and suite == CifarC.suite:
        raise UserError("cifar-c is published pictures only: give the folder of CIFAR-10-C or CIFAR-100-C")
    if folder and suite == ImageNetC.suite and (folder / "labels.npy").is_file():
        raise UserError(f"{folder} holds the arrays of CIFAR-C; choose the suite cifar-c")
    return PUBLISHED_SUITES[suite](folder) if folder else None


def _corruption_folder(root: Path, corruption: str, severities: Sequence[int]) -> Path:
    """Raises: UserError when there is no folder of the suite, of the corruption, or of a severity."""
    if not root.is_dir():
        raise UserError(f"no folder {root}; give the one with ImageNet-C's CORRUPTION/SEVERITY/CLASS/*.JPEG")
    found = [root / corruption, *sorted(root.glob(f"*/{corruption}"))]
    for folder in found:
        if folder.is_dir():
            missing = [severity for severity in severities if not (folder / str(severity)).is_dir()]
            if missing:
                raise UserError(f"{folder} has no folder {missing[0]}; it must hold one per severity, 1 to 5")
            return folder
    below = [
        path.name
        for path in sorted((*root.glob("*"), *root.glob("*/*")))
        if path.is_dir() and path.name not in CORRUPTION_CATEGORIES
    ]
    nearest = "".join(f"; nearest: {close}" for close in get_close_matches(corruption, below, n=1))
    raise UserError(f"{root} has no folder {corruption}{nearest}; unpack it, or choose others with --corruption")
