"""`Stream`, a data set that is read in order, and its loaders, whose processes and workers read separate shares."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from isomorph.errors import UserError
from isomorph.lab.data.formats.huggingface import (
    DatasetSplit,
    explain_dataset_errors,
    open_dataset_split,
)
from isomorph.lab.data.formats.naming import SPLITS
from isomorph.lab.data.formats.registry import SOURCES, data_root
from isomorph.lab.data.loaders import (
    Example,
    IsolatedDataLoader,
    Labels,
    collate,
    ignore_stop_signals,
)
from isomorph.lab.data.sampler import BatchParts, TrainSampler
from isomorph.lab.data.sources import (
    decode,
    explain_decode_errors,
)
from isomorph.lab.distributed import derive_seed, seed_generators

STREAMS = ("huggingface-stream",)
# All data of labelled images by name.
IMAGE_SOURCES = (*SOURCES, *STREAMS)
_ROWS_PER_READ = 16
Transform = Callable[[Image.Image], Any]
StreamSample = tuple[Any, int, int]  # the cell of an image, its label, its id


class Stream:
    """Labelled images of one split that are read in order, without an index.

    `samples` yields them; `image` decodes one. The id of a sample is (file << 32) + row, the same in every epoch. A
    stream can be pickled.

    >>> from datasets import Dataset, Features, Image, Value
    >>> row = {"image": iso.data.open_source("digits", "test").image(0), "label": 0}
    >>> Dataset.from_list([row], Features(image=Image(), label=Value("int64"))).to_parquet("test-00000.parquet") > 0
    True
    >>> stream = iso.data.open_stream("huggingface-stream", "test", ".", classes=1)
    >>> len(stream), [(label, identity) for _, label, identity in stream.samples(epoch=0, seed=None)]
    (1, [(0, 0)])
    """

    def __init__(
        self, split: DatasetSplit, classes: Iterable[str], images: int | None, buffer: int = 1000
    ) -> None:
        self.split = split
        self.classes = tuple(classes)
        self.images = images
        self.buffer = buffer
        self._numbers = split.numbering()[1].tolist() or list(range(len(self.classes)))

    def __len__(self) -> int:
        if self.images is None:
            raise UserError(
                f"{self.split.title} does not tell how many images it has; give the number as images="
            )
        return self.images

    def samples(
        self, epoch: int, seed: int | None, share: int = 0, shares: int = 1, skip: int = 0
    ) -> Iterator[StreamSample]:
        """Yield one of `shares` shares of an epoch, from sample `skip` on: (image as stored, label, id).

        A share is made of whole files, as many as divide evenly; the remaining files are read by all, each taking
        every n-th row. The order depends on seed and epoch, not on `skip`; with seed None it is the stored one.
        Skipped samples are read, but not decoded.

        Raises: UserError for a share that is not in 0 to shares - 1, a label that is not a class, unreadable data.
        """
        if not 0 <= share < shares:
            raise UserError(f"share {share} is not in 0 to {shares - 1}")
        if seed is None:
            return islice(self._rows_of_share(range(self._num_files), share, shares), skip, None)
        order = np.random.default_rng([seed, epoch]).permutation(self._num_files).tolist()
        rows = self._rows_of_share(order, share, shares)
        rng = np.random.default_rng([seed, epoch, share, shares])
        return islice(_shuffle_through_buffer(rows, self.buffer, rng), skip, None)

    def image(self, cell: Any, identity: int) -> Image.Image:
        """Return a sample's image in RGB, before the transform. Raises: UserError naming it when it cannot be read."""
        with explain_decode_errors(lambda: self.name(identity)):
            return decode(self.split.stored_image(cell))

    def name(self, identity: int) -> str:
        """Return what errors call a sample."""
        return f"row {identity & 0xFFFFFFFF} of file {identity >> 32} of {self.split.title}"

    def _name_after(self, start: int, index: int) -> str:
        return self.name(start + index)

    @property
    def _num_files(self) -> int:
        return self.split.dataset.num_shards

    def _rows_of_share(
        self, files: Iterable[int], share: int, shares: int
    ) -> Iterator[StreamSample]:
        files = list(files)
        divided = len(files) // shares * shares
        for file in files[share:divided:shares]:
            yield from self._rows_of_file(file, 0, 1)
        for file in files[divided:]:
            yield from self._rows_of_file(file, share, shares)

    def _rows_of_file(self, file: int, first: int, step: int) -> Iterator[StreamSample]:
        image = self.split.image
        columns = self.split.label_columns
        row = 0
        with explain_dataset_errors(self.split.title):
            # Not `iter(dataset)`: in a DataLoader's worker that would divide the rows among workers a second time.
            for batch in self.split.dataset.shard(self._num_files, file).iter(_ROWS_PER_READ):
                labels = [batch[column] for column in columns]
                if len(labels) > 1:
                    start = (file << 32) + row
                    self.split.check_same_labels(labels, partial(self._name_after, start))
                for cell, label in zip(batch[image], labels[0], strict=True):
                    if row % step == first:
                        yield self._sample(cell, label, (file << 32) + row)
                    row += 1

    def _sample(self, cell: Any, label: Any, identity: int) -> StreamSample:
        if not isinstance(label, int) or not 0 <= label < len(self._numbers):
            raise UserError(
                f"{self.name(identity)} has label {label!r}; labels must be 0 to {len(self._numbers) - 1}"
            )
        return cell, self._numbers[label], identity


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


def open_stream(
    name: str,
    split: str,
    root: str | Path | None = None,
    images: int | None = None,
    classes: int | None = None,
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
    opened = open_dataset_split(split, data_root(root), streaming=True)
    names, _ = opened.numbering()
    if not (names or classes):
        raise UserError(f"{opened.title} has no names of classes; give their number as classes=")
    return Stream(opened, names or map(str, range(classes or 0)), images or opened.images)


# images, labels, error messages of unreadable images
_StreamBatch = tuple[Tensor, Labels, list[str]]


def workers_of_part(parts: BatchParts, workers: int) -> int:
    """Return how many of the loader workers produce a given part of the batches in turn."""
    return workers // math.gcd(len(parts.own), workers)


def _worker_position() -> tuple[int, int]:
    info = get_worker_info()
    if info:
        return (info.id, info.num_workers)
    return (0, 1)


@dataclass(frozen=True)
class _TrainBatches(IterableDataset[_StreamBatch]):
    """One process's parts of every batch, from a step on; the workers produce the parts in turn.

    Each pair of a part and a worker that produces it reads its own share of the stream, in a new order every epoch; a
    share that ends before the epoch starts again. With the same number of workers a step sees the same images from
    whichever step the run resumes: the samples of earlier steps are skipped.
    """

    stream: Stream
    transform: Transform
    sampler: TrainSampler
    unreadable: int

    @property
    def size(self) -> int:
        """Images of a part of a batch."""
        return self.sampler.order.batch // self.sampler.parts.total

    def __iter__(self) -> Iterator[_StreamBatch]:
        steps = self.sampler.order.steps
        parts = self.sampler.parts.own
        first = self.sampler.first
        worker, workers = _worker_position()
        # the loader asks worker 0 first, at whichever step it starts
        turn = (worker + first * len(parts)) % workers
        for epoch in range(first // steps, self.sampler.epochs):
            shares: dict[int, Iterator[StreamSample]] = {}
            for number in range(epoch * steps * len(parts), (epoch + 1) * steps * len(parts)):
                if number % workers != turn:
                    continue
                step = number // len(parts)
                part = parts[number % len(parts)]
                if part not in shares:
                    shares[part] = self._share(epoch, part, step, workers)
                samples = list(islice(shares[part], self.size))
                if step >= first:
                    yield self._batch(samples, step, part)

    def _share(self, epoch: int, part: int, step: int, workers: int) -> Iterator[StreamSample]:
        each = workers_of_part(self.sampler.parts, workers)
        index = part * each + step % each
        shares = self.sampler.parts.total * each
        for number in count():
            samples = self.stream.samples(
                derive_seed("round", epoch, number), self.sampler.order.seed, index, shares
            )
            first = next(samples, None)
            if first is None:
                raise UserError(
                    f"the stream has too few images for {shares} shares; use fewer data.workers or scale.accumulate"
                )
            yield first
            yield from samples

    def _batch(self, samples: list[StreamSample], step: int, part: int) -> _StreamBatch:
        """Return a part of a batch from its samples; other images of the part, repeated, replace unreadable ones."""
        examples: list[Example] = []
        problems: list[str] = []
        for position, (stored, label, identity) in enumerate(samples):
            seed_generators(
                derive_seed("streamed", self.sampler.order.seed, step, part, position),
                devices=False,
            )
            try:
                examples.append((self.transform(self.stream.image(stored, identity)), label, []))
            except UserError as error:
                problems.append(str(error))
                if len(problems) > self.unreadable:
                    raise
        if not examples:
            raise UserError(f"no image of a part can be read; the latest: {problems[-1]}")
        images, labels, _ = collate(list(islice(cycle(examples), self.size)))
        return images, labels, problems


@dataclass(frozen=True)
class _StreamTestImages(IterableDataset[tuple[Any, int]]):
    stream: Stream
    transform: Transform
    parts: BatchParts

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        worker, workers = _worker_position()
        share = self.parts.own[0] * workers + worker
        shares = self.parts.total * workers
        for stored, label, identity in self.stream.samples(0, None, share, shares):
            yield self.transform(self.stream.image(stored, identity)), label


def stream_loader(
    stream: Stream,
    transform: Transform,
    sampler: TrainSampler,
    workers: int = 0,
    unreadable: int = 0,
) -> DataLoader[Any]:
    """Return a loader of training batches from a stream, like those of `train_loader`.

    Shape: yields images (B, C, H, W), labels (B,), messages
    Raises: UserError when a part of a batch has more than `unreadable` images that cannot be read.
    """
    return _loader(_TrainBatches(stream, transform, sampler, unreadable), None, workers)


def stream_test_loader(
    stream: Stream, transform: Transform, batch_size: int, workers: int, parts: BatchParts
) -> DataLoader[Any]:
    """Return a loader of test batches from a stream, with every image in one process's share once.

    Shape: yields images (B, C, H, W), labels (B,)
    """
    return _loader(_StreamTestImages(stream, transform, parts), batch_size, workers)


def _loader(batches: IterableDataset[Any], batch_size: int | None, workers: int) -> DataLoader[Any]:
    pin = torch.cuda.is_available()
    return IsolatedDataLoader(
        batches, batch_size, num_workers=workers, worker_init_fn=ignore_stop_signals, pin_memory=pin
    )
