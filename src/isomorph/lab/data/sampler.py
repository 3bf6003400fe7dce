"""The order of training images: the images of every step, and the seed of each one's augmentation.

Both depend on the run's seed, the epoch and the step alone, whatever the processes, workers and resumed steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Sampler

from isomorph.errors import UserError
from isomorph.lab.distributed import derive_seed

SeededIndex = tuple[int, int]  # the index of an image, and the seed of its augmentation


@dataclass(frozen=True)
class BatchOrder:
    """The images of every step of a run, in full batches; the incomplete batch at the end of an epoch is dropped.

    `images` is the number of images, `batch` the batch size. With `repeats` > 1 an epoch takes 1 / repeats of the
    images and shows each that many times in a row, with a new augmentation each time (DeiT's repeated augmentation).

    Raises: UserError for fewer images than a batch.
    """

    images: int
    batch: int
    seed: int = 0
    repeats: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.batch <= self.images:
            raise UserError(
                f"{self.images} images make no batch of {self.batch}; lower data.batch_size"
            )

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return self.images // self.batch

    def epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Return the images of an epoch and the seeds of their augmentation. Shape: -> (steps * batch,), the same"""
        generator = torch.Generator().manual_seed(derive_seed("order", self.seed, epoch))
        order = torch.randperm(self.images, generator=generator)
        count = self.steps * self.batch
        if self.repeats > 1:
            order = order[: -(-self.images // self.repeats)].repeat_interleave(self.repeats)
        return order[:count], torch.randint(2**62, (count,), generator=generator)


@dataclass(frozen=True)
class BatchParts:
    """The parts of every batch that one process takes: those numbered `own`, of `total` parts.

    Part p of n is every n-th image of the batch from the p-th on, so it is the same whichever process takes it.
    """

    own: range = range(1)
    total: int = 1


@dataclass(frozen=True)
class TrainSampler(Sampler[list[SeededIndex]]):
    """Sampler of one process's parts of every batch, from step `first` to the last of the run, epoch after epoch."""

    order: BatchOrder
    epochs: int
    first: int = 0
    parts: BatchParts = BatchParts()

    def __len__(self) -> int:
        return (self.epochs * self.order.steps - self.first) * len(self.parts.own)

    def __iter__(self) -> Iterator[list[SeededIndex]]:
        start = self.first
        steps = self.order.steps
        batch = self.order.batch
        for epoch in range(start // steps, self.epochs):
            images, seeds = self.order.epoch(epoch)
            for position in range(start - epoch * steps, steps):
                step = slice(position * batch, (position + 1) * batch)
                for part in self.parts.own:
                    every_nth = slice(part, None, self.parts.total)
                    yield list(
                        zip(
                            images[step][every_nth].tolist(),
                            seeds[step][every_nth].tolist(),
                            strict=True,
                        )
                    )
            start = (epoch + 1) * steps
