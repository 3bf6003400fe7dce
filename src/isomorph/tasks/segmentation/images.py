"""Images and their masks: the classes of every pixel, as numbers in a second image of the same size."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms.v2.functional import pil_to_tensor

from isomorph.data.sources import UnreadableImage, explain_decode_errors, spaced_indices
from isomorph.errors import UserError
from isomorph.tasks.image_sets import ImageSet

IGNORE = 255
"""Class of the pixels that count neither in the loss nor in the metrics."""
MAX_CLASSES = 255
CHECKED_MASKS = 1000
"""Masks whose values are checked before training; of more, those spaced evenly. Each is checked when it is read too."""


class Pair(NamedTuple):
    """An image and its mask. Shape: image (3, H, W) uint8, mask (H, W) int64, IGNORE for pixels without a class"""

    image: tv_tensors.Image
    mask: tv_tensors.Mask


class Files(NamedTuple):
    """The files of an image and its mask."""

    image: Path
    mask: Path


def lookup_table(values: Sequence[int], *ignored: int) -> np.ndarray:
    """Return the class of each value of a mask: values[i] is class i; 255 and `ignored` have none, others are -1.

    Shape: -> (256,)
    """
    table = np.full(256, -1, np.int64)
    table[[IGNORE, *ignored]] = IGNORE
    table[list(values)] = np.arange(len(values))
    return table


def read_mask(path: Path) -> np.ndarray:
    """Return the values of a mask. Shape: -> (H, W) int64

    Raises: UserError naming the file for one that cannot be read, or has several channels.
    """
    with explain_decode_errors(lambda: str(path)), Image.open(path) as opened:
        values = np.asarray(opened)
    if values.ndim != 2:
        raise UserError(f"{path} has {values.shape[2]} channels; a mask has one, with the number of each class")
    return values.astype(np.int64)


class MaskedImages(ImageSet[Files]):
    """Images and their masks; an example is a `Pair`.

    `table` gives the class of each value in the mask files: IGNORE where the value has none, -1 where it must not
    occur. `colours` are those of the classes in figures, or None. `split`, where images without test images were
    split, is the fraction for testing and the number of images before.

    Raises: UserError, from reading, for a damaged file, a mask of another size than its image, or an unknown value.
    """

    split: tuple[float, int] | None = None

    def __init__(
        self,
        samples: Sequence[Files],
        classes: Sequence[str],
        table: np.ndarray,
        colours: Sequence[tuple[int, int, int]] | None = None,
    ) -> None:
        super().__init__(samples, classes)
        self.table, self.colours = table, colours

    def path(self, index: int) -> Path:
        return self.samples[index].image

    def truth(self, index: int) -> list[np.ndarray]:
        return [self.mask(index)]

    def mask(self, index: int) -> np.ndarray:
        """Return the class of every pixel of an image. Shape: -> (H, W)"""
        path = self.samples[index].mask
        values = read_mask(path)
        classes = self.table[np.minimum(values, len(self.table) - 1)]
        wrong = (classes < 0) | (values >= len(self.table))
        if wrong.any():
            raise UserError(
                f"{path} has the value {values[wrong][0]}, which is not one of the {len(self.classes)} classes; "
                f"correct it, or use {IGNORE} for pixels without a class"
            )
        return classes

    def example(self, index: int) -> Pair:
        image, mask = self.image(index), self.mask(index)
        _check_size(self.samples[index], image.size, mask.shape[::-1])
        return Pair(tv_tensors.Image(pil_to_tensor(image)), tv_tensors.Mask(torch.from_numpy(mask)))

    def check(self, unreadable: int | None = None) -> None:
        """Check all files before training: present, of the same size, with known values (in up to CHECKED_MASKS).

        Up to `unreadable` files may be damaged, which training leaves out; None for data that must be whole.

        Raises: UserError for the first file that is wrong, or if no pixel has a class.
        """
        if not len(self):
            raise UserError("there are no images; check data.root")
        damaged, labelled = set[str](), False
        for files in self.samples:
            for path in files:
                if not path.is_file():
                    raise UserError(f"{path} does not exist; every image needs a mask of the same name")
            with _counting(damaged, unreadable):
                sizes = []
                for path in files:
                    with explain_decode_errors(partial(str, path)), Image.open(path) as opened:
                        sizes.append(opened.size)
                _check_size(files, *sizes)
        for index in spaced_indices(np.zeros(len(self)), CHECKED_MASKS):
            with _counting(damaged, unreadable):
                labelled |= bool((self.mask(index) != IGNORE).any())
        if not labelled:
            folder = self.samples[0].mask.parent
            raise UserError(f"no pixel of the masks in {folder} has a class; give masks with class numbers")


@contextmanager
def _counting(damaged: set[str], allowed: int | None) -> Iterator[None]:
    """Add the message about an image that cannot be decoded to `damaged`. Raises: it, when they are too many."""
    try:
        yield
    except UnreadableImage as error:
        damaged.add(str(error))
        if allowed is None:
            raise
        if len(damaged) > allowed:
            raise UserError(f"{error} (or allow unreadable images with data.unreadable)") from None


def _check_size(files: Files, image: tuple[int, ...], mask: tuple[int, ...]) -> None:
    """Raise UserError for a mask of another size (width, height) than its image."""
    if image != mask:
        own, given = ("{} x {}".format(*size) for size in (mask, image))
        raise UserError(
            f"{files.mask} is {own} pixels wide and high, and {files.image.name} is {given}; make them equal"
        )
