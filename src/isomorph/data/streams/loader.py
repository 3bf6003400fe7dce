"""Loaders of training and test batches from a stream; processes and workers read separate shares of it."""

import copy
import math
from collections.abc import Callable, Iterator
from itertools import chain, count, cycle, islice
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from isomorph.data.loaders import Example, IsolatedDataLoader, Labels, collate, ignore_stop_signals
from isomorph.data.sampler import BatchParts, TrainSampler
from isomorph.data.streams.stream import Stream, StreamSample
from isomorph.distributed import derive_seed, seed_generators
from isomorph.errors import UserError

_StreamBatch = tuple[Tensor, Labels, list[str]]
"""Images, labels, error messages of unreadable images."""


def workers_of_part(parts: BatchParts, workers: int) -> int:
    """Return how many of the loader workers produce a given part of the batches in turn."""
    return workers // math.gcd(len(parts.own), workers)


def _worker_position() -> tuple[int, int]:
    """Return the index of the current loader worker, and the number of workers."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


class _TrainBatches(IterableDataset[_StreamBatch]):
    """One process's parts of every batch, from a step on; the workers produce the parts in turn.

    Each pair of a part and a worker that produces it reads its own share of the stream, in a new order every epoch; a
    share that ends before the epoch starts again. With the same number of workers a step sees the same images from
    whichever step the run resumes: the samples of earlier steps are skipped.
    """

    def __init__(self, stream: Stream, sampler: TrainSampler, unreadable: int) -> None:
        self.stream, self.sampler, self.unreadable = stream, sampler, unreadable

    def __iter__(self) -> Iterator[_StreamBatch]:
        order, parts, first = self.sampler.order, self.sampler.parts.own, self.sampler.first
        worker, workers = _worker_position()
        turn = (worker + first * len(parts)) % workers  # the loader asks worker 0 first, at whichever step it starts
        start = first
        for epoch in range(first // order.steps, self.sampler.epochs):
            begin, end = epoch * order.steps, (epoch + 1) * order.steps
            batches = [(step, part) for step in range(begin, end) for part in parts]
            own = [batch for n, batch in enumerate(batches, begin * len(parts)) if n % workers == turn]
            done = {part: sum(1 for step, p in own if p == part and step < start) for part in parts}
            steps = {part: step for step, part in reversed(own)}  # of a part of this worker, the first
            shares = {part: self._share(epoch, part, steps[part], workers, done[part]) for part in steps}
            for step, part in own:
                if step >= start:
                    yield self._batch(shares[part], step, part)
            start = end

    def _share(self, epoch: int, part: int, step: int, workers: int, done: int) -> Iterator[StreamSample]:
        """Yield the samples of a share of the stream without end, after the batches that are done."""
        each = workers_of_part(self.sampler.parts, workers)
        index, shares = part * each + step % each, self.sampler.parts.total * each

        def rounds() -> Iterator[Iterator[StreamSample]]:
            for number in count():
                samples = self.stream.samples(
                    derive_seed("round", epoch, number), self.sampler.order.seed, index, shares
                )
                first = next(samples, None)
                if first is None:
                    raise UserError(
                        f"the stream has too few images for {shares} shares; use fewer data.workers or scale.accumulate"
                    )
                yield chain([first], samples)

        return islice(chain.from_iterable(rounds()), done * self._part_size, None)

    @property
    def _part_size(self) -> int:
        """Images of a part of a batch."""
        return self.sampler.order.batch // self.sampler.parts.total

    def _batch(self, share: Iterator[StreamSample], step: int, part: int) -> _StreamBatch:
        """Return the next part of a batch from a share; other images of the part, repeated, replace unreadable ones."""
        examples: list[Example] = []
        problems: list[str] = []
        for position, (stored, label, identity) in enumerate(islice(share, self._part_size)):
            seed_generators(derive_seed("streamed", self.sampler.order.seed, step, part, position), devices=False)
            try:
                examples.append((_apply_transform(self.stream, self.stream.image(stored, identity)), label, []))
            except UserError as error:
                problems.append(str(error))
                if len(problems) > self.unreadable:
                    raise
        if not examples:
            raise UserError(f"no image of a part can be read; the latest: {problems[-1]}")
        images, labels, _ = collate(list(islice(cycle(examples), self._part_size)))
        return images, labels, problems


def _apply_transform(stream: Stream, image: Image.Image) -> Any:
    return image if stream.transform is None else stream.transform(image)


class _StreamTestImages(IterableDataset[tuple[Any, int]]):
    """One process's share of a stream, read once in the stored order."""

    def __init__(self, stream: Stream, parts: BatchParts) -> None:
        self.stream, self.parts = stream, parts

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        worker, workers = _worker_position()
        share, shares = self.parts.own[0] * workers + worker, self.parts.total * workers
        for stored, label, identity in self.stream.samples(0, None, share, shares):
            yield _apply_transform(self.stream, self.stream.image(stored, identity)), label


def stream_loader(
    stream: Stream,
    transform: Callable[[Image.Image], Any],
    sampler: TrainSampler,
    workers: int = 0,
    unreadable: int = 0,
) -> DataLoader[Any]:
    """Return a loader of training batches from a stream, with the interface of `train_loader`.

    Shape: yields images (B, C, H, W), labels (B,), messages
    Raises: UserError when a part of a batch has more than `unreadable` images that cannot be read.
    """
    stream = copy.copy(stream)
    stream.transform = transform
    return IsolatedDataLoader(
        _TrainBatches(stream, sampler, unreadable),
        batch_size=None,
        num_workers=workers,
        worker_init_fn=ignore_stop_signals,
        pin_memory=torch.cuda.is_available(),
    )


def stream_test_loader(
    stream: Stream, transform: Callable[[Image.Image], Any], batch_size: int, workers: int, parts: BatchParts
) -> DataLoader[Any]:
    """Return a loader of test batches from a stream, with every image in one process's share once.

    Shape: yields images (B, C, H, W), labels (B,)
    """
    stream = copy.copy(stream)
    stream.transform = transform
    return IsolatedDataLoader(
        _StreamTestImages(stream, parts),
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=default_collate,
        worker_init_fn=ignore_stop_signals,
    )
