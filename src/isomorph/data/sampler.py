"""Which images each step sees, in which order and how varied: a function of seed, epoch and place alone.

However many processes and workers share the work, and wherever a run is taken up again, every step's batch is the
same: nothing about it lives in a generator that has to be kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Sampler

from isomorph.errors import UserError
from isomorph.seeding import mixed_seed

SeededIndex = tuple[int, int]
"""An image, and the seed of its augmentation."""


@dataclass(frozen=True)
class BatchOrder:
    """The images of every step of a run, in full batches; what is left of an epoch is dropped.

    `repeats` > 1 shows each image of an epoch so many times running, each time augmented anew, and a share of the
    images an epoch (DeiT's repeated augmentation). With `shards` (runs of indices that lie together) and a `window`,
    shards are shuffled, and images within so many shards at a time: reads stay local.
    """

    images: int
    batch: int
    seed: int = 0
    repeats: int = 1
    shards: Sequence[range] | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.batch <= self.images:
            raise UserError(f"{self.images} images make no batch of {self.batch}; lower data.batch_size")
        if self.window and not self.shards:
            raise UserError("data.shuffle_shards needs data in shards: tar or webdataset")

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.images // self.batch

    def epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Images of an epoch and the seed of each one's augmentation. Shape: -> (steps * batch,), the same"""
        generator = torch.Generator().manual_seed(mixed_seed("order", self.seed, epoch))
        order, kept = self.shuffled(generator), self.steps * self.batch
        if self.repeats > 1:
            order = order[: -(-self.images // self.repeats)].repeat_interleave(self.repeats)
        return order[:kept], torch.randint(2**62, (kept,), generator=generator)

    def shuffled(self, generator: torch.Generator) -> Tensor:
        """All images in a drawn order. Shape: -> (images,)"""
        if not self.window or not self.shards:
            return torch.randperm(self.images, generator=generator)
        shards = [self.shards[i] for i in torch.randperm(len(self.shards), generator=generator)]
        windows = (shards[i : i + self.window] for i in range(0, len(shards), self.window))
        groups = [torch.cat([torch.arange(s.start, s.stop) for s in window]) for window in windows]
        return torch.cat([group[torch.randperm(len(group), generator=generator)] for group in groups])


@dataclass(frozen=True)
class BatchParts:
    """The parts of every step's batch that one process takes, one after another: `mine` of `of`.

    A batch is dealt to its parts like cards, so a part is the same images whoever takes it.
    """

    mine: range = range(1)
    of: int = 1


class TrainSampler(Sampler[list[SeededIndex]]):
    """One process's parts of every batch, from step `first` to the last of the run, epoch after epoch."""

    def __init__(self, order: BatchOrder, epochs: int, first: int = 0, share: BatchParts = BatchParts()) -> None:
        self.order, self.epochs, self.first, self.share = order, epochs, first, share

    def __len__(self) -> int:
        return (self.epochs * self.order.steps - self.first) * len(self.share.mine)

    def __iter__(self) -> Iterator[list[SeededIndex]]:
        start, steps, batch = self.first, self.order.steps, self.order.batch
        for epoch in range(start // steps, self.epochs):
            images, seeds = self.order.epoch(epoch)
            for place in range(start - epoch * steps, steps):
                step = slice(place * batch, (place + 1) * batch)
                for part in self.share.mine:
                    dealt = images[step][part :: self.share.of], seeds[step][part :: self.share.of]
                    yield list(zip(dealt[0].tolist(), dealt[1].tolist(), strict=True))
            start = (epoch + 1) * steps
