"""Where a run computes: device, precision, and the processes that share the work."""

import atexit
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.seeding import mixed_seed, seed_generators

ENVIRONMENT = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
"""What torchrun says, and what one process alone is."""


@dataclass(frozen=True)
class Runtime:
    """A device, the precision of the forward pass on it, and this process's place among those that torchrun started."""

    device: torch.device
    amp: bool
    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def autocast(self) -> AbstractContextManager[object]:
        """bfloat16 where it is safe, or nothing."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.amp else nullcontext()

    def highest(self, *values: float) -> list[float]:
        """The largest of every process's values, one by one: what all can agree on."""
        if self.world == 1:
            return list(values)
        seen = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(seen, dist.ReduceOp.MAX)
        return seen.tolist()

    def mean(self, value: Tensor) -> float:
        """The mean of every process's value."""
        if self.world == 1:
            return value.item()
        seen = value.detach().double().clone()
        dist.all_reduce(seen)
        return seen.item() / self.world

    def gathered(self, values: Any) -> list[Any]:
        """Every process's values, by rank."""
        if self.world == 1:
            return [values]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, values)
        return found

    def evened(self, loader: Iterable[Any]) -> Iterable[Any]:
        """The batches of a loader, as many in every process: one that has no more sees an image again, labelled -1."""
        if self.world == 1:
            return loader
        return self.padded(iter(loader))

    def padded(self, batches: Iterator[Any]) -> Iterator[Any]:
        """What `evened` gives where there are several processes."""
        latest = None
        while True:
            batch = next(batches, None)
            if not self.highest(batch is not None)[0]:
                return
            if batch is None and latest is None:
                raise UserError("the test data has no image for one of the processes; start fewer")
            latest = batch if batch is not None else (latest[0][:1], torch.full_like(latest[1][:1], -1))  # type: ignore[index]
            yield latest

    def share_buffers(self, model: nn.Module) -> None:
        """Gives every process the first one's running statistics, which are those that count."""
        if self.world > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)


def open_runtime(device: str, amp: bool = False) -> Runtime:
    """The runtime for a device name; `auto` takes a GPU when there is one. Under torchrun, joins the other processes.

    Raises: UserError when the device is unknown or not there.
    """
    rank, world, local = (int(os.environ.get(name, alone)) for name, alone in ENVIRONMENT.items())
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if name == "cuda" and world > 1:
        name = f"cuda:{local}"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device!r} cannot be used ({str(error).splitlines()[0]}); try device=cpu") from None
    place = torch.device(name)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
        atexit.register(leave)
    return Runtime(place, amp, rank, world)


def leave() -> None:
    """Takes leave of the other processes, where they are still there."""
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_everything(purpose: str, seed: int, *place: int) -> None:
    """Seeds every generator from a run's seed and a place in it: taken up there, it draws what it would have drawn."""
    seed_generators(mixed_seed(purpose, seed, *place))
