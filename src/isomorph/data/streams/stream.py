"""Data sets too large to keep: read in passing, shuffled through a buffer, shared out exactly."""

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from isomorph.data.formats.huggingface import (
    DatasetSplit,
    explain_dataset_errors,
    image_from_cell,
    open_split,
)
from isomorph.data.formats.naming import SPLITS
from isomorph.data.sources import ImageLike, decode, explain_decode_errors, unreadable_image_error
from isomorph.errors import UserError

_ROWS_PER_READ = 16
"""Rows fetched at a time."""
StreamSample = tuple[ImageLike, int, int]
"""A picture as stored, its label, its id."""


class Stream:
    """Labelled images of one split, read in passing. `transform` (PIL image -> anything) is for the loader to use.

    An id is (file << 32) + row, the same in every epoch. Pickles.
    """

    def __init__(self, part: DatasetSplit, classes: Iterable[str], images: int | None, buffer: int = 1000) -> None:
        self.part, self.classes, self.images, self.buffer = part, tuple(classes), images, buffer
        self.transform: Callable[[Image.Image], Any] | None = None

    def __len__(self) -> int:
        """Images of the split. Raises: UserError when that is not known."""
        if self.images is None:
            raise UserError(f"{self.part.title} does not say how many images it has; give the number as images=")
        return self.images

    def samples(
        self, epoch: int, seed: int | None, part: int = 0, parts: int = 1, skip: int = 0
    ) -> Iterator[StreamSample]:
        """The `part`-th of `parts` shares of an epoch: (picture as stored, label, id), from the `skip`-th on.

        Every image is in exactly one share. Shares are of whole files as far as these go round; the files left over are
        read by all, a row each in turn, so shares differ in length by as much as files do. The order follows seed and
        epoch, whatever is skipped; with seed None it is the stored one. What is skipped is read, not decoded.

        Raises: UserError for a part that is not in 0 to parts - 1, a label that is no class, data that cannot be read.
        """
        if not 0 <= part < parts:
            raise UserError(f"part {part} is not in 0 to {parts - 1}")
        if seed is None:
            return islice(self.share(range(self.files), part, parts), skip, None)
        order = np.random.default_rng([seed, epoch]).permutation(self.files).tolist()
        share = self.share(order, part, parts)
        return islice(
            _shuffle_through_buffer(share, self.buffer, np.random.default_rng([seed, epoch, part, parts])), skip, None
        )

    def image(self, picture: ImageLike, identity: int) -> Image.Image:
        """A sample's picture in RGB, before the transform. Raises: UserError naming it when it cannot be read."""
        with explain_decode_errors(lambda: self.name(identity)):
            return decode(picture)

    def name(self, identity: int) -> str:
        return f"row {identity & 0xFFFFFFFF} of file {identity >> 32} of {self.part.title}"

    @property
    def files(self) -> int:
        return self.part.dataset.num_shards

    def share(self, order: Iterable[int], part: int, parts: int) -> Iterator[StreamSample]:
        """One share in the order of the files."""
        order = list(order)
        shared = len(order) // parts * parts
        for file in order[part:shared:parts]:
            yield from self.rows(file, 0, 1)
        for file in order[shared:]:
            yield from self.rows(file, part, parts)

    def rows(self, file: int, first: int, step: int) -> Iterator[StreamSample]:
        """Every step-th sample of a file."""
        image, label, row = self.part.image, self.part.label, 0
        with explain_dataset_errors(self.part.title):
            # Not `iter(dataset)`: in a DataLoader's worker that would share the rows out a second time.
            for batch in self.part.dataset.shard(self.files, file).iter(_ROWS_PER_READ):
                for cell, number in zip(batch[image], batch[label], strict=True):
                    if row % step == first:
                        yield self.sample(cell, number, (file << 32) + row)
                    row += 1

    def sample(self, cell: Any, label: Any, identity: int) -> StreamSample:
        if not isinstance(label, int) or not 0 <= label < len(self.classes):
            known = f"0 to {len(self.classes) - 1}"
            raise UserError(f"{self.name(identity)} has label {label!r}, which is no class: they are {known}")
        try:
            return image_from_cell(cell), label, identity
        except OSError as error:
            raise unreadable_image_error(self.name(identity), error) from None


def _shuffle_through_buffer(
    samples: Iterator[StreamSample], buffer: int, rng: np.random.Generator
) -> Iterator[StreamSample]:
    """The samples through a buffer, from which each next one is drawn."""
    held = list(islice(samples, buffer))
    for sample in samples:
        drawn = int(rng.integers(len(held)))
        yield held[drawn]
        held[drawn] = sample
    for drawn in rng.permutation(len(held)).tolist():
        yield held[drawn]


def _huggingface_stream(split: str, root: Path, images: int | None, classes: int | None) -> Stream:
    """A data set on the hub or in a folder, as `huggingface` finds it, never downloaded or converted.

    Raises: UserError as `huggingface`, and when the number of classes is neither given nor to be found.
    """
    part = open_split(split, root, streaming=True)
    names = part.names or [str(i) for i in range(classes or _count_classes(part, root))]
    return Stream(part, names, images or part.images or _count_rows(part))


def _count_rows(part: DatasetSplit) -> int | None:
    """The number of images, from the ends of local parquet files."""
    from pyarrow.parquet import read_metadata

    with explain_dataset_errors(part.title):
        return sum(read_metadata(file).num_rows for file in part.files) if part.files else None


def _count_classes(part: DatasetSplit, root: Path) -> int:
    """The number of classes by the largest label in local parquet files of any split.

    Raises: UserError for other data.
    """
    import pyarrow.compute
    from pyarrow.parquet import read_table

    from isomorph.data.formats.huggingface import parquet_files

    if not part.files:
        raise UserError(f"{part.title} does not name its classes; give their number as classes=")
    files = {*part.files, *(file for words in SPLITS.values() for word in words for file in parquet_files(root, word))}
    with explain_dataset_errors(part.title):
        largest = [pyarrow.compute.max(read_table(file, columns=[part.label])[part.label]).as_py() for file in files]
        return max(largest) + 1


STREAMS: dict[str, Callable[[str, Path, int | None, int | None], Stream]] = {"huggingface-stream": _huggingface_stream}


def open_stream(
    name: str, split: str, root: str | Path | None = None, images: int | None = None, classes: int | None = None
) -> Stream:
    """Opens the `train` or `test` split of a stream: `huggingface-stream`, with `root` as `open_source` takes it.

    `images` and `classes` are the numbers of these, to be given where the data does not tell them.

    Raises: UserError for an unknown stream or split, a number below 1, or missing data.
    """
    if name not in STREAMS:
        raise UserError(f"data stream {name!r} is unknown; choose {', '.join(STREAMS)}")
    if split not in SPLITS:
        raise UserError(f"split {split!r} is unknown; choose 'train' or 'test'")
    if min(images or 1, classes or 1) < 1 or 0 in (images, classes):
        raise UserError(f"images={images} and classes={classes} must be 1 or more where given")
    return STREAMS[name](split, Path(root or os.environ.get("ISOMORPH_DATA", "data")).expanduser(), images, classes)
