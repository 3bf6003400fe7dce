"""`Stream`, a data set that is read in order without being stored, and shuffled through a buffer."""

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
    open_split,
)
from isomorph.data.formats.naming import SPLITS, number_classes
from isomorph.data.sources import ImageLike, decode, explain_decode_errors, unreadable_image_error
from isomorph.errors import UserError

_ROWS_PER_READ = 16
"""Number of rows that are fetched at a time."""
StreamSample = tuple[ImageLike, int, int]
"""An image as stored, its label, its id."""


class Stream:
    """Labelled images of one split that are read in order, without an index.

    `samples` yields them; `image` decodes one. `transform` (PIL image -> anything) is for a loader to use. The id of a
    sample is (file << 32) + row, the same in every epoch. A stream can be pickled.

    >>> from datasets import Dataset, Features, Image, Value
    >>> row = {"image": iso.data.open_source("digits", "test").image(0), "label": 0}
    >>> Dataset.from_list([row], Features(image=Image(), label=Value("int64"))).to_parquet("test-00000.parquet") > 0
    True
    >>> stream = iso.data.open_stream("huggingface-stream", "test", ".")
    >>> len(stream), [(label, identity) for _, label, identity in stream.samples(epoch=0, seed=None)]
    (1, [(0, 0)])
    """

    def __init__(self, split: DatasetSplit, classes: Iterable[str], images: int | None, buffer: int = 1000) -> None:
        self.split, self.classes, self.images, self.buffer = split, tuple(classes), images, buffer
        self.transform: Callable[[Image.Image], Any] | None = None

    def __len__(self) -> int:
        """Return the number of images of the split. Raises: UserError when it is not known."""
        if self.images is None:
            raise UserError(f"{self.split.title} does not tell how many images it has; give the number as images=")
        return self.images

    def samples(
        self, epoch: int, seed: int | None, share: int = 0, shares: int = 1, skip: int = 0
    ) -> Iterator[StreamSample]:
        """Yield one of `shares` shares of an epoch, from sample `skip` on: (image as stored, label, id).

        Every image is in exactly one share. A share is made of whole files, as many as divide evenly; the remaining
        files are read by all, each taking every n-th row, so shares differ in length by as much as files do. The order
        depends on seed and epoch, not on `skip`; with seed None it is the stored one. Skipped samples are read, but not
        decoded.

        Raises: UserError for a share that is not in 0 to shares - 1, a label that is not a class, unreadable data.
        """
        if not 0 <= share < shares:
            raise UserError(f"share {share} is not in 0 to {shares - 1}")
        if seed is None:
            return islice(self._rows_of_share(range(self._num_files), share, shares), skip, None)
        order = np.random.default_rng([seed, epoch]).permutation(self._num_files).tolist()
        rows, rng = self._rows_of_share(order, share, shares), np.random.default_rng([seed, epoch, share, shares])
        return islice(_shuffle_through_buffer(rows, self.buffer, rng), skip, None)

    def image(self, stored: ImageLike, identity: int) -> Image.Image:
        """Return a sample's image in RGB, before the transform.

        Raises: UserError naming it when it cannot be read.
        """
        with explain_decode_errors(lambda: self.name(identity)):
            return decode(stored)

    def name(self, identity: int) -> str:
        """Return what errors call a sample."""
        return f"row {identity & 0xFFFFFFFF} of file {identity >> 32} of {self.split.title}"

    @property
    def _num_files(self) -> int:
        return self.split.dataset.num_shards

    def _rows_of_share(self, files: Iterable[int], share: int, shares: int) -> Iterator[StreamSample]:
        """Yield one share of the samples, in the order of the given files."""
        files = list(files)
        divided = len(files) // shares * shares
        for file in files[share:divided:shares]:
            yield from self._rows_of_file(file, 0, 1)
        for file in files[divided:]:
            yield from self._rows_of_file(file, share, shares)

    def _rows_of_file(self, file: int, first: int, step: int) -> Iterator[StreamSample]:
        """Yield every step-th sample of a file."""
        image, label, row = self.split.image, self.split.label, 0
        with explain_dataset_errors(self.split.title):
            # Not `iter(dataset)`: in a DataLoader's worker that would divide the rows among workers a second time.
            for batch in self.split.dataset.shard(self._num_files, file).iter(_ROWS_PER_READ):
                for cell, number in zip(batch[image], batch[label], strict=True):
                    if row % step == first:
                        yield self._sample(cell, number, (file << 32) + row)
                    row += 1

    def _sample(self, cell: Any, label: Any, identity: int) -> StreamSample:
        if not isinstance(label, int) or not 0 <= label < len(self.classes):
            raise UserError(f"{self.name(identity)} has label {label!r}; labels must be 0 to {len(self.classes) - 1}")
        try:
            return self.split.stored_image(cell), label, identity
        except OSError as error:
            raise unreadable_image_error(self.name(identity), error) from None


def _shuffle_through_buffer(
    samples: Iterator[StreamSample], buffer: int, rng: np.random.Generator
) -> Iterator[StreamSample]:
    """Yield the samples in random order: each one is drawn from a buffer, which the next sample fills up again."""
    held = list(islice(samples, buffer))
    for sample in samples:
        drawn = int(rng.integers(len(held)))
        yield held[drawn]
        held[drawn] = sample
    for drawn in rng.permutation(len(held)).tolist():
        yield held[drawn]


def _huggingface_stream(split: str, root: Path, images: int | None, classes: int | None) -> Stream:
    """Open a data set on the hub or in a folder as `huggingface` does, without downloading or converting it.

    Raises: UserError as `huggingface`, and when the number of classes is neither given nor stored.
    """
    found = open_split(split, root, streaming=True)
    names = found.names or [str(i) for i in range(classes or _count_classes(found, root))]
    return Stream(found, names, images or found.images or _count_rows(found))


def _count_rows(split: DatasetSplit) -> int | None:
    """Count the images from the metadata of local parquet files; None for other data."""
    from pyarrow.parquet import read_metadata

    with explain_dataset_errors(split.title):
        return sum(read_metadata(file).num_rows for file in split.files) if split.files else None


def _count_classes(split: DatasetSplit, root: Path) -> int:
    """Count the classes by the largest label in the local parquet files of all splits.

    Raises: UserError for other data.
    """
    import pyarrow.compute
    from pyarrow.parquet import read_table

    from isomorph.data.formats.huggingface import parquet_files

    if not split.files:
        raise UserError(f"{split.title} has no names of classes; give their number as classes=")
    files = {*split.files, *(file for words in SPLITS.values() for word in words for file in parquet_files(root, word))}
    with explain_dataset_errors(split.title):
        largest = [pyarrow.compute.max(read_table(file, columns=[split.label])[split.label]).as_py() for file in files]
        return len(number_classes(max(largest), split.title))


STREAMS: dict[str, Callable[[str, Path, int | None, int | None], Stream]] = {"huggingface-stream": _huggingface_stream}


def open_stream(
    name: str, split: str, root: str | Path | None = None, images: int | None = None, classes: int | None = None
) -> Stream:
    """Open the `train` or `test` split of a stream: `huggingface-stream`, with `root` as in `open_source`.

    `images` and `classes` are their numbers, needed where the data does not tell them.

    Raises: UserError for an unknown stream or split, a number below 1, or missing data.

    >>> iso.data.open_stream("webdataset", "train")
    Traceback (most recent call last):
    isomorph.errors.UserError: data stream 'webdataset' is unknown; choose huggingface-stream
    """
    if name not in STREAMS:
        raise UserError(f"data stream {name!r} is unknown; choose {', '.join(STREAMS)}")
    if split not in SPLITS:
        raise UserError(f"split {split!r} is unknown; choose 'train' or 'test'")
    if min(images or 1, classes or 1) < 1 or 0 in (images, classes):
        raise UserError(f"images={images} and classes={classes} must be 1 or more where given")
    return STREAMS[name](split, Path(root or os.environ.get("ISOMORPH_DATA", "data")).expanduser(), images, classes)
