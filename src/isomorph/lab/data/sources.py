"""`Source`, a list of labelled images that are read when asked for, and subsets of it."""

import copy
import hashlib
import io
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import ExifTags, Image
from PIL.Image import Transpose
from torch.utils.data import Dataset

from isomorph.errors import UserError, first_line
from isomorph.spec import ImageSize

ImageLike = Image.Image | np.ndarray | bytes | Path  # pixels are (H, W, 3) uint8
# A 16-bit image whose largest pixel is below this may hold 8, 10 or 12 bits: it is rejected, not guessed.
_DIMMEST_WHITE = 4096
_TURNS = {  # by the orientation in EXIF data
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}


class ImageSubset(Sequence[ImageLike]):
    """Some images of a sequence, by their indices in it; nothing is read or copied before it is asked for."""

    images: Sequence[ImageLike]
    indices: np.ndarray

    def __init__(self, images: Sequence[ImageLike], indices: np.ndarray) -> None:
        if isinstance(images, ImageSubset):
            indices = images.indices[indices]
            images = images.images
        self.images = images
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.images[int(self.indices[index])]

    def name(self, index: int) -> str:
        return _describe_image(self.images, int(self.indices[index]))


def _describe_image(images: Sequence[ImageLike], index: int) -> str:
    """Name an image for an error: by its file, or archive and member, else by its index in the whole source."""
    if hasattr(images, "name"):
        return images.name(index)
    image = images[index]
    if isinstance(image, Path):
        return str(image)
    return f"image {index}"


def image_name(images: Sequence[ImageLike], index: int) -> str | None:
    """Return the name of an image's file below its folder, in its archive or in its data set; None without one."""
    if isinstance(images, ImageSubset):
        return image_name(images.images, int(images.indices[index]))
    if hasattr(images, "file_name"):
        return images.file_name(index)
    return None


def decode(image: ImageLike) -> Image.Image:
    """Return the image in RGB, turned as its EXIF data says."""
    if isinstance(image, Image.Image):
        return _to_rgb(upright(image))
    if isinstance(image, np.ndarray):
        return _to_rgb(Image.fromarray(np.array(image)))
    file = io.BytesIO(image) if isinstance(image, bytes) else image
    with Image.open(file) as opened:
        return _to_rgb(upright(opened))


def upright(image: Image.Image) -> Image.Image:
    """Return the image turned as the orientation in its EXIF data says.

    >>> from PIL import Image
    >>> from isomorph.lab.data.sources import upright
    >>> photo, exif = Image.new("RGB", (40, 30)), Image.Exif()
    >>> exif[274] = 6  # the camera was turned by a quarter
    >>> photo.save("photo.jpg", exif=exif)
    >>> upright(Image.open("photo.jpg")).size
    (30, 40)
    """
    image.load()  # PNG may store EXIF data behind the pixels; TIFF is turned here
    turn = _TURNS.get(_orientation(image))
    if turn is None:
        return image
    return image.transpose(turn)


def upright_size(image: Image.Image) -> ImageSize:
    """Return width and height of an opened image as `upright` returns it, without decoding it."""
    turned = image.format != "TIFF" and _orientation(image) in (5, 6, 7, 8)
    if turned:
        return (image.height, image.width)
    return image.size


def _orientation(image: Image.Image) -> int:
    """Return the orientation in an image's EXIF data; 1 (upright) without one, or if the data is damaged."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # of many types
        return 1


def read_image(path: Path) -> Image.Image:
    """Return the image of a file in RGB. Raises: UserError naming the file when it cannot be read."""
    with explain_decode_errors(lambda: str(path)):
        return decode(path)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to RGB; 16 bits per pixel are scaled to 8, which Pillow would clip to white.

    Raises: ValueError for wider pixels outside the range of 8 bits, which Pillow would clip to black and white.
    """
    # PPM gives its white, by which Pillow has scaled the pixels to 16 bits
    if image.mode == "I" and image.format == "PPM":
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    if image.mode in ("F", "I"):
        low, high = image.getextrema()
        if not 0 <= low <= high <= 255 or (image.mode == "F" and high <= 1):  # type: ignore[operator]
            raise ValueError(
                f"its pixels are from {low:g} to {high:g}, without a known white; convert it to 8 bits"
            )
    if image.mode.startswith("I;16"):
        pixels = np.asarray(image)
        high = pixels.max()
        if 0 < high < _DIMMEST_WHITE:
            raise ValueError(
                f"its 16-bit pixels are at most {high}, without a known white; convert it to 8 bits"
            )
        image = Image.fromarray((pixels // 257).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


@contextmanager
def explain_decode_errors(name: Callable[[], str]) -> Iterator[None]:
    """Turn whatever decoding a damaged image raises (Pillow raises many things) into a UserError that names it."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise unreadable_image_error(name(), error) from None


class UnreadableImage(UserError):
    """An image file that cannot be decoded."""


def unreadable_image_error(name: str, error: Exception) -> UnreadableImage:
    """Return the error that names an image that cannot be read."""
    return UnreadableImage(f"cannot read {name}: {first_line(error)}; remove or replace it")


Examples = TypeVar("Examples")


def with_changes(examples: Examples, **changes: Any) -> Examples:
    """Return a shallow copy of an object with other values of some attributes."""
    changed = copy.copy(examples)
    vars(changed).update(changes)
    return changed


class Source(Dataset[tuple[Any, int]]):
    """Labelled images of one split, each read when it is indexed.

    `source[i]` is an image and its label. `transform` (PIL image -> anything) is None, or set by a loader. `images` is
    any sequence whose `[i]` gives a PIL image, the bytes of an image file or the path of one; it may have a method
    `name(i)`, which errors use. `split`, where `split_classes` made the source, is its fraction for testing and the
    number of images before the split. A source can be pickled if its images can.

    Shape: labels (n,) int64
    Raises: UserError naming the image when one cannot be read.

    >>> source = iso.data.open_source("digits", "test")
    >>> len(source), source.classes[:3]
    (450, ('0', '1', '2'))
    >>> image, label = source[0]
    >>> image.size
    (8, 8)
    >>> len(source.subset(range(10)))
    10
    """

    def __init__(
        self,
        images: Sequence[ImageLike],
        labels: Sequence[int] | np.ndarray,
        classes: Iterable[str],
    ) -> None:
        self.images = images
        self.labels = np.asarray(labels, np.int64)
        self.classes = tuple(classes)
        if len(images) != len(self.labels):
            raise UserError(
                f"a source needs as many labels as images; it has {len(self.labels)} and {len(images)}"
            )
        self.ids: Sequence[int] | np.ndarray = range(len(self.labels))
        self.split: tuple[float, int] | None = None
        self.transform: Callable[[Image.Image], Any] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Return one image in RGB, before the transform."""
        with explain_decode_errors(lambda: _describe_image(self.images, index)):
            return decode(self.images[index])

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image: Any = self.image(index)
        if self.transform is not None:
            image = self.transform(image)
        return image, int(self.labels[index])

    def subset(self, indices: Sequence[int] | np.ndarray) -> "Source":
        """Return the images of the given indices, in that order, or of a mask; `ids` stay those of the whole source.

        Raises: UserError for what is neither whole numbers nor a mask of all images.
        """
        chosen = chosen_indices(indices, len(self))
        images = ImageSubset(self.images, chosen)
        ids = np.asarray(self.ids)[chosen]
        return with_changes(self, images=images, labels=self.labels[chosen], ids=ids)


def chosen_indices(indices: Any, count: int) -> np.ndarray:
    """Return indices as an array; for a mask of `count` examples, those where it is True.

    Raises: UserError for anything else.
    """
    given = indices if isinstance(indices, np.ndarray) else np.asarray(list(indices))
    if given.dtype == bool and given.shape == (count,):
        return np.flatnonzero(given)
    if given.size and (given.dtype.kind not in "iu" or given.ndim != 1):
        raise UserError(
            f"indices of shape {given.shape} and type {given.dtype} cannot choose examples; give whole numbers, or a "
            f"mask of all {count}"
        )
    return given.astype(np.int64)


def drawn_once(examples: Any, count: int | None) -> Any:
    """Draw `count` examples in their order, the same at every call; all for None, or if there are fewer."""
    if count is None or count >= len(examples):
        return examples
    return examples.subset(np.sort(random_indices(len(examples), count)))


def drawn_fraction(examples: Any, fraction: float, seed: int | None) -> Any:
    """Draw a fraction of the examples in their order, at least one, with `seed`; the first ones for None."""
    if fraction == 1:
        return examples
    count = max(1, int(fraction * len(examples)))
    if seed is None:
        return examples.subset(range(count))
    return examples.subset(np.sort(random_indices(len(examples), count, seed)))


def spaced_images(source: Source, count: int | None) -> Source:
    """Return `count` images of a source, as `spaced_indices`; all of them for None, or where it has fewer."""
    if count is None or count >= len(source):
        return source
    return source.subset(spaced_indices(source.labels, count))


def random_indices(length: int, count: int, seed: int = 0) -> np.ndarray:
    """Return `count` indices below `length` in random order, the same for every call with a seed. Shape: (count,)"""
    return np.random.default_rng(seed).permutation(length)[:count]


def spaced_indices(labels: np.ndarray, count: int) -> np.ndarray:
    """Return `count` ascending indices, evenly spaced over each class in turn, so that each has its share.

    Shape: labels (n,) -> (count,)
    Raises: UserError for a count below 1.
    """
    if count < 1:
        raise UserError(f"the number of images, {count}, must be at least 1")
    by_class = np.argsort(labels, kind="stable")
    positions = np.linspace(0, len(labels) - 1, min(count, len(labels)))
    return np.sort(by_class[positions.astype(int)])


def class_fraction(source: Source, fraction: float, seed: int | None = 0) -> Source:
    """Return the same fraction of every class, at least one image each, in the source's order.

    Rounded down as in ConViT's code: 5% of 732 images are 36. `seed` draws the images; with seed None they are the
    first of each class (of sorted files, as in that code).

    Raises: UserError when the fraction is not in (0, 1].

    >>> source = iso.data.open_source("digits", "train")
    >>> len(source), len(iso.data.class_fraction(source, 0.1))
    (1347, 129)
    """
    if not 0 < fraction <= 1:
        raise UserError(f"fraction {fraction} is not in (0, 1]")
    rng = np.random.default_rng(seed)
    chosen = []
    for label in np.unique(source.labels):
        members = np.flatnonzero(source.labels == label)
        if seed is not None:
            members = rng.permutation(members)
        count = max(1, int(fraction * len(members)))
        chosen.append(members[:count])
    return source.subset(np.sort(np.concatenate(chosen)))


def renumbered(labels: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the new number of every label; -1, which is none, stays. Shape: (n,), (classes,) -> (n,)"""
    new = np.full(len(labels), -1, np.int64)
    known = labels >= 0
    new[known] = numbers[labels[known]]
    return new


def split_classes(source: Source, test_fraction: float) -> tuple[Source, Source]:
    """Split a source in two, for training and for testing, with about the same fraction of every class for testing.

    An image is for testing if the hash of its file's name in the folder, as a number from 0 to 1, is below the fraction
    (of images without file names, of their index), so images keep their side when others are added or removed. A class
    that has no image on one side gives it the one with the lowest or highest hash; a single image is for training.

    Raises: UserError when the fraction is not between 0 and 1, or leaves no image for testing.

    >>> train, test = iso.data.split_classes(iso.data.open_source("digits", "train"), 0.2)
    >>> len(train), len(test)
    (1070, 277)
    """
    if not 0 < test_fraction < 1:
        raise UserError(
            f"the fraction for testing, {test_fraction}, must be above 0 and below 1, like 0.2"
        )
    labels = np.asarray(source.labels)
    names = [image_name(source.images, i) or str(source.ids[i]) for i in range(len(labels))]
    places = np.array([hash_to_unit(name) for name in names])
    held_out = places < test_fraction
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        held_out[members[places[members].argmin()]] = True
        held_out[members[places[members].argmax()]] = False
    if not held_out.any():
        raise UserError(
            f"{len(labels)} images of {len(source.classes)} classes are too few to split; add images"
        )
    train = source.subset(np.flatnonzero(~held_out))
    test = source.subset(np.flatnonzero(held_out))
    train.split = test.split = (test_fraction, len(labels))
    return train, test


def hash_to_unit(name: str) -> float:
    """Return a number from 0 to 1 that depends on the name alone."""
    composed = unicodedata.normalize("NFC", name)  # file systems differ in it
    digest = hashlib.blake2b(composed.encode("utf-8", "surrogateescape"), digest_size=6).digest()
    return int.from_bytes(digest) / 2**48


def first_classes(source: Source, number: int) -> Source:
    """Return the images of the first `number` classes only. Raises: UserError when the source has fewer.

    >>> iso.data.first_classes(iso.data.open_source("digits", "test"), 3).classes
    ('0', '1', '2')
    """
    if not 0 < number <= len(source.classes):
        raise UserError(
            f"cannot take the first {number} classes; the data has {len(source.classes)}"
        )
    part = source.subset(np.flatnonzero(np.asarray(source.labels) < number))
    return with_changes(part, classes=source.classes[:number])
