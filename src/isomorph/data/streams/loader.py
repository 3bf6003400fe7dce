"""Batches out of a stream: every process and worker reads a lane of its own, and can begin anywhere in it."""

import copy
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
from isomorph.errors import UserError
from isomorph.seeding import mixed_seed, seed_generators

_StreamBatch = tuple[Tensor, Labels, list[str]]
"""Images, labels, problems."""


def _worker_position() -> tuple[int, int]:
    """The place of the loader's worker that asks, and how many there are."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


class _TrainBatches(IterableDataset[_StreamBatch]):
    """One process's parts of every batch, from a step on, read from a stream: parts go to the workers in turn.

    Each part and worker has a lane of the stream, shuffled anew every epoch; one that is short begins again. With the
    same workers, a step sees the same images wherever the run is taken up: what was used of a lane is skipped.
    """

    def __init__(self, stream: Stream, deals: TrainSampler, unreadable: int) -> None:
        self.stream, self.deals, self.unreadable = stream, deals, unreadable

    def __iter__(self) -> Iterator[_StreamBatch]:
        order, mine, first = self.deals.order, self.deals.share.mine, self.deals.first
        worker, workers = _worker_position()
        lane = (worker + first * len(mine)) % workers  # the loader begins with worker 0, wherever the run does
        start = first
        for epoch in range(first // order.steps, self.deals.epochs):
            begin, end = epoch * order.steps, (epoch + 1) * order.steps
            turns = [(step, part) for step in range(begin, end) for part in mine]
            own = [turn for n, turn in enumerate(turns, begin * len(mine)) if n % workers == lane]
            past = {part: sum(1 for step, p in own if p == part and step < start) for part in mine}
            lanes = {part: self.lane(epoch, part, lane, workers, past[part]) for part in mine}
            for step, part in own:
                if step >= start:
                    yield self.batch(lanes[part], step, part)
            start = end

    def lane(self, epoch: int, part: int, lane: int, workers: int, past: int) -> Iterator[StreamSample]:
        """A share of the stream without end, past so many batches."""
        place, lanes = part * workers + lane, self.deals.share.of * workers

        def rounds() -> Iterator[Iterator[StreamSample]]:
            for again in count():
                samples = self.stream.samples(mixed_seed("round", epoch, again), self.deals.order.seed, place, lanes)
                first = next(samples, None)
                if first is None:
                    raise UserError(f"the stream has no image for {lanes} lanes (parts times workers); use fewer")
                yield chain([first], samples)

        return islice(chain.from_iterable(rounds()), past * self.size, None)

    @property
    def size(self) -> int:
        """Images of a part."""
        return self.deals.order.batch // self.deals.share.of

    def batch(self, lane: Iterator[StreamSample], step: int, part: int) -> _StreamBatch:
        """The next part of a batch from a lane; what cannot be read is filled up with others of the part, again."""
        examples: list[Example] = []
        problems: list[str] = []
        for place, (picture, label, identity) in enumerate(islice(lane, self.size)):
            seed_generators(mixed_seed("streamed", self.deals.order.seed, step, part, place), devices=False)
            try:
                examples.append((_apply_transform(self.stream, self.stream.image(picture, identity)), label, []))
            except UserError as error:
                problems.append(str(error))
                if len(problems) > self.unreadable:
                    raise
        if not examples:
            raise UserError(f"no image of a part can be read; the latest: {problems[-1]}")
        images, labels, _ = collate(list(islice(cycle(examples), self.size)))
        return images, labels, problems


def _apply_transform(stream: Stream, image: Image.Image) -> Any:
    """The image as the stream's transform has it."""
    return image if stream.transform is None else stream.transform(image)


class _TestImages(IterableDataset[tuple[Any, int]]):
    """One process's share of a stream, once, in the stored order."""

    def __init__(self, stream: Stream, share: BatchParts) -> None:
        self.stream, self.share = stream, share

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        worker, workers = _worker_position()
        part, parts = self.share.mine[0] * workers + worker, self.share.of * workers
        for picture, label, identity in self.stream.samples(0, None, part, parts):
            yield _apply_transform(self.stream, self.stream.image(picture, identity)), label


def stream_loader(
    stream: Stream, transform: Callable[[Image.Image], Any], deals: TrainSampler, workers: int = 0, unreadable: int = 0
) -> DataLoader[Any]:
    """Training batches out of a stream, as `train_loader` gives them out of a source."""
    stream = copy.copy(stream)
    stream.transform = transform
    return IsolatedDataLoader(
        _TrainBatches(stream, deals, unreadable),
        batch_size=None,
        num_workers=workers,
        worker_init_fn=ignore_stop_signals,
        pin_memory=torch.cuda.is_available(),
    )


def stream_test_loader(
    stream: Stream, transform: Callable[[Image.Image], Any], batch_size: int, workers: int, share: BatchParts
) -> DataLoader[Any]:
    """Test batches out of a stream: every image in the share of one process."""
    stream = copy.copy(stream)
    stream.transform = transform
    dataset = _TestImages(stream, share)
    return IsolatedDataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=default_collate,
        worker_init_fn=ignore_stop_signals,
    )
