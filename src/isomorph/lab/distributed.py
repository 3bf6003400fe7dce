"""The device, the precision, the processes and the seeds of a run."""

import atexit
import os
import random
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from isomorph.errors import UserError, first_line
from isomorph.terminal_tables import say

REPEATED = -1  # label of an example that a process repeats so that all processes have the same number of batches

_PATIENCE = 5.0  # seconds after which a process says that it waits for others
T = TypeVar("T")


@dataclass(frozen=True)
class Runtime:
    """Device, precision of the forward pass (`amp`: bfloat16 autocast), rank and number (`world`) of processes."""

    device: torch.device
    amp: bool
    rank: int = 0
    world: int = 1

    @property
    def is_main(self) -> bool:
        """True for the process that prints and writes files for all."""
        return self.rank == 0

    @property
    def share(self) -> slice:
        """This process's share of a sequence: its items rank, rank + world, rank + 2 world, ..."""
        return slice(self.rank, None, self.world)

    def autocast(self) -> AbstractContextManager[object]:
        """Return a bfloat16 autocast context, or one that does nothing."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.amp else nullcontext()

    def maximum(self, *values: float) -> list[float]:
        """Return the maximum of each value over all processes. It also waits for all of them."""
        if self.world == 1:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(reduced, dist.ReduceOp.MAX)
        return reduced.tolist()

    def mean(self, value: Tensor) -> float:
        """Return the mean of a value over all processes."""
        if self.world == 1:
            return value.item()
        total = value.detach().double().clone()
        dist.all_reduce(total)
        return total.item() / self.world

    def gather(self, values: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        if self.world == 1:
            return [values]
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, values)
        return gathered

    def on_main(self, action: Callable[[], T]) -> T:
        """Return in every process what an action returns in the leading one. Raises: UserError in every process."""
        result: Any = None
        problem = ""
        if self.is_main:
            try:
                result = action()
            except UserError as error:
                problem = str(error)
        result, problem = self.gather((result, problem))[0]
        if problem:
            raise UserError(problem)
        return result

    def pad_batches(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Return a loader's batches; a process with fewer than others repeats an example with the label -1."""
        return loader if self.world == 1 else self._pad_batches(iter(loader))

    def _pad_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        latest = None
        while self.maximum((batch := next(batches, None)) is not None)[0]:
            if batch is None and latest is None:
                raise UserError("there are fewer test images than processes; start fewer processes")
            latest = batch if batch is not None else _repeat_first(*latest[:2])  # type: ignore[index]
            yield latest

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copy the buffers, such as running statistics, from rank 0 to all processes."""
        if self.world > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)


def _repeat_first(inputs: Any, labels: Tensor) -> tuple[Any, Tensor]:
    """Return the first example of a batch, a tensor or a dictionary of tensors, with a label that does not count."""
    first = {name: x[:1] for name, x in inputs.items()} if isinstance(inputs, dict) else inputs[:1]
    return first, torch.full_like(labels[:1], REPEATED)


ALONE = Runtime(torch.device("cpu"), amp=False)  # for work that stays on the device of its model


def open_runtime(device: str, amp: bool = False) -> Runtime:
    """Return the runtime for a device name (`auto`: a GPU if there is one), and join torchrun's other processes.

    Raises: UserError if the device is unknown or not available.
    """
    rank, world, local = torchrun_place()
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        # that of its rank
        target = torch.device(name, local) if name == "cuda" else torch.device(name)
        torch.ones(1, device=target).item()  # which the meta device refuses
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device {device!r} is not available ({first_line(error)}); try device=cpu"
        ) from None
    if target.type == "cuda":
        torch.cuda.set_device(target)
    if world > 1 and not dist.is_initialized():
        text = f"isomorph: process {rank} waits for the {world - 1} others of {world}; is each started, with torchrun?"
        reminder = threading.Timer(_PATIENCE, say, (text, sys.stderr))
        reminder.daemon = True
        reminder.start()
        try:
            dist.init_process_group("nccl" if target.type == "cuda" else "gloo")
        except (RuntimeError, ValueError) as error:  # torch's errors of a store are RuntimeErrors
            raise UserError(
                f"process {rank} of {world} found no others: {first_line(error)}"
            ) from None
        finally:
            reminder.cancel()
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    return Runtime(target, amp, rank, world)


def torchrun_place() -> tuple[int, int, int]:
    """Return rank, number of processes, and rank on its machine from torchrun. Raises: UserError for other values."""
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    given = [os.environ.get(name) or alone for name, alone in names.items()]
    if all(map(str.isdecimal, given)) and int(given[0]) < int(given[1]):
        return int(given[0]), int(given[1]), int(given[2])
    shown = " ".join(f"{name}={value}" for name, value in zip(names, given, strict=True))
    raise UserError(
        f"{shown} is not what torchrun sets; start all processes with torchrun --nproc-per-node N -m isomorph COMMAND, "
        "or unset WORLD_SIZE"
    )


def seed_generators(seed: int, devices: bool = True) -> None:
    """Seed the generators of Python, NumPy and torch; without `devices` only on the CPU, which is much faster."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if devices:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def derive_seed(purpose: str, *numbers: int) -> int:
    """Return a seed for a purpose and some numbers: NumPy's SeedSequence hash, 63 bits."""
    # the length, as SeedSequence ignores final zeros
    entropy = (zlib.crc32(purpose.encode()), len(numbers), *numbers)
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def to_device(values: Any, device: torch.device) -> Any:
    """Return a tensor, or the tensors in lists, tuples and dictionaries, on a device; all else unchanged."""

    def move(value: Any) -> Any:
        if hasattr(value, "to"):
            return value.to(device, non_blocking=True)
        if isinstance(value, dict):  # of a class that tree_map does not know
            return {name: to_device(item, device) for name, item in value.items()}
        return value

    return tree_map(move, values)


def seed_everything(purpose: str, seed: int, *position: int) -> None:
    """Seed all generators from a run's seed and a position in the run, so that a resumed run draws the same numbers."""
    seed_generators(derive_seed(purpose, seed, *position))
