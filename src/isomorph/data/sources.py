"""What a source is: a list of labelled images that are read when asked for, with a transform to be set."""

import copy
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from isomorph.errors import UserError

ImageLike = Image.Image | bytes | Path


class ImageSubset(Sequence[ImageLike]):
    """Some of a sequence's pictures, by their places in it; nothing is read or copied before it is asked for."""

    def __init__(self, pictures: Sequence[ImageLike], places: np.ndarray) -> None:
        self.pictures, self.places = pictures, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return ImageSubset(self.pictures, self.places[index])
        return self.pictures[int(self.places[index])]

    def name(self, index: int) -> str:
        return _describe_image(self.pictures, int(self.places[index]))


def _select_images(pictures: Sequence[ImageLike], indices: np.ndarray) -> ImageSubset:
    """The pictures at these indices; a choice of a choice is one choice."""
    if isinstance(pictures, ImageSubset):
        return ImageSubset(pictures.pictures, pictures.places[indices])
    return ImageSubset(pictures, indices)


def _describe_image(pictures: Sequence[ImageLike], index: int) -> str:
    """What an error calls a picture: its file or archive and member, else its place in the whole source."""
    if hasattr(pictures, "name"):
        return pictures.name(index)
    picture = pictures[index]
    return str(picture) if isinstance(picture, Path) else f"image {index}"


def image_name(pictures: Sequence[ImageLike], index: int) -> str | None:
    """The name of a picture's file below its folder, in its archive or in its data set; None where it has none."""
    if isinstance(pictures, ImageSubset):
        return image_name(pictures.pictures, int(pictures.places[index]))
    named = getattr(pictures, "member", None) or getattr(pictures, "stored", None)
    return named(index) if named else None


def decode(picture: ImageLike) -> Image.Image:
    """The picture in RGB."""
    if isinstance(picture, Image.Image):
        return picture.convert("RGB")
    with Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture) as opened:
        return opened.convert("RGB")


@contextmanager
def explain_decode_errors(name: Callable[[], str]) -> Iterator[None]:
    """Makes whatever the decoding of a damaged picture raises (Pillow raises many things) a UserError that names it."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise unreadable_image_error(name(), error) from None


def unreadable_image_error(name: str, error: Exception) -> UserError:
    """The error that names a picture that cannot be read."""
    return UserError(f"cannot read {name}: {first_line(error)}; remove or replace it")


class Source(Dataset[tuple[Any, int]]):
    """Labelled images of one split. `transform` (PIL image -> anything) is set by the loader.

    `pictures` is any sequence whose `[i]` gives a PIL image, the bytes of an image file or the path of one; it may have
    `name(i)` for errors. `shards`, where known, are the runs of indices that lie together in one file, for an order
    that keeps reads local. A source pickles if its pictures do.

    Shape: labels (n,) int64
    Raises: UserError naming the image when one cannot be read.
    """

    def __init__(
        self,
        pictures: Sequence[ImageLike],
        labels: Sequence[int] | np.ndarray,
        classes: Iterable[str],
        shards: list[range] | None = None,
    ) -> None:
        self.pictures, self.labels, self.classes = pictures, np.asarray(labels, np.int64), tuple(classes)
        self.ids: Sequence[int] | np.ndarray = range(len(self.labels))
        self.shards = shards
        self.transform: Callable[[Image.Image], Any] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """One image in RGB, before the transform."""
        with explain_decode_errors(lambda: _describe_image(self.pictures, index)):
            return decode(self.pictures[index])

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.image(index)
        return (image if self.transform is None else self.transform(image)), int(self.labels[index])

    def subset(self, indices: Sequence[int] | np.ndarray) -> "Source":
        """The given images, in the given order; `ids` keeps their places in the whole source.

        `shards` become the runs among them; None when the order jumps back and forth between files.
        """
        part, places = copy.copy(self), np.asarray(indices, np.int64)
        part.pictures, part.labels = _select_images(self.pictures, places), self.labels[places]
        part.ids = np.asarray(self.ids)[places]
        part.shards = None if self.shards is None else _select_runs(self.shards, places)
        return part


def _select_runs(shards: Sequence[range], indices: np.ndarray) -> list[range] | None:
    """The runs that chosen indices form, given the runs of all; None when a run is left and come back to."""
    if not len(indices):
        return []
    owner = np.searchsorted([run.stop for run in shards], indices % shards[-1].stop, side="right")
    edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(indices)]
    if len(edges) - 1 != len(np.unique(owner)):
        return None
    return [range(start, stop) for start, stop in pairwise(edges)]


def consecutive_ranges(lengths: Iterable[int]) -> list[range]:
    """Runs of these lengths, one after the other; empty ones are left out."""
    edges = [0, *np.cumsum(list(lengths), dtype=np.int64).tolist()]
    return [range(start, stop) for start, stop in pairwise(edges) if start < stop]


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def class_fraction(source: Source, fraction: float, seed: int | None = 0) -> Source:
    """The same fraction of every class, rounded down but at least one image each, in the source's order.

    Rounded down as ConViT's code does: 5% of 732 images are 36. A seeded draw; with seed None the first images of each
    class (of sorted files, as that code takes them).

    Raises: UserError when the fraction is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise UserError(f"fraction {fraction} is not in (0, 1]")
    labels, rng = np.asarray(source.labels), None if seed is None else np.random.default_rng(seed)
    kept = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members if rng is None else rng.permutation(members)
        kept.append(members[: max(1, int(fraction * len(members)))])
    return source.subset(np.sort(np.concatenate(kept)))


def first_classes(source: Source, number: int) -> Source:
    """The images of the first classes only.

    Raises: UserError when the source has fewer.
    """
    if not 0 < number <= len(source.classes):
        raise UserError(f"{number} classes are not between 1 and the {len(source.classes)} that the data has")
    part = source.subset(np.flatnonzero(np.asarray(source.labels) < number))
    part.classes = source.classes[:number]
    return part
