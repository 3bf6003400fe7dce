"""Where a run computes, in which precision, from which seed."""

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from isomorph.errors import UserError


@dataclass(frozen=True)
class Runtime:
    """A device and the precision of the forward pass on it."""

    device: torch.device
    amp: bool

    def autocast(self) -> AbstractContextManager[object]:
        """bfloat16 where it is safe, or nothing."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.amp else nullcontext()


def open_runtime(device: str, amp: bool = False) -> Runtime:
    """The runtime for a device name; `auto` takes a GPU when there is one.

    Raises: UserError when the device is unknown or not there.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device!r} cannot be used ({str(error).splitlines()[0]}); try device=cpu") from None
    return Runtime(torch.device(name), amp)


def seed_everything(seed: int, epoch: int = 0) -> None:
    """Seeds every generator from run and epoch alone: a resumed run draws what it would have drawn."""
    torch.manual_seed(1_000_003 * seed + epoch)
    np.random.seed((1_000_003 * seed + epoch) % 2**32)
    random.seed(1_000_003 * seed + epoch)
