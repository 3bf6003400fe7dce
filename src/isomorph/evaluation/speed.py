"""How fast models are: images a second in rounds that take turns, so that none has the quiet minute to itself."""

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.eval_mode import eval_mode

_WARM_UP_PASSES = 2


class Speed(NamedTuple):
    """Images a second: median and quartiles over runs, and how many runs there were."""

    median: float
    low: float
    high: float
    runs: int


def _synchronize(device: torch.device) -> None:
    """Waits for the device, where it works on its own."""
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).synchronize()


def _time_pass(model: nn.Module, batch: Tensor) -> float:
    """Seconds of one inference pass."""
    _synchronize(batch.device)
    start = time.perf_counter()
    model(batch)
    _synchronize(batch.device)
    return time.perf_counter() - start


@torch.no_grad()
def measure_speeds(
    models: Mapping[str, nn.Module],
    input_sizes: Mapping[str, tuple[int, ...]] | tuple[int, ...],
    batch_size: int = 32,
    seconds: float = 2.0,
    least: int = 5,
) -> dict[str, Speed]:
    """Images a second of each model in eval mode, in turns: one pass of each, round after round, after a warm-up.

    Rounds go on for `seconds` a model, `least` rounds at least. Weights and mode are as before afterwards.

    Raises: UserError when a batch has no image, there is no model, or the time is negative or not finite.
    """
    if not 0 <= seconds < math.inf:
        raise UserError(f"{seconds:g} seconds cannot be timed; give 0 or more")
    if batch_size < 1 or not models:
        raise UserError(f"nothing to time: {len(models)} models, batches of {batch_size}")
    sizes = input_sizes if isinstance(input_sizes, Mapping) else dict.fromkeys(models, input_sizes)
    taken: dict[str, list[float]] = {name: [] for name in models}
    with ExitStack() as stack:
        batches = {}
        for name, model in models.items():
            stack.enter_context(eval_mode(model))
            parameter = next(model.parameters())
            batches[name] = torch.randn(batch_size, *sizes[name], device=parameter.device, dtype=parameter.dtype)
            for _ in range(_WARM_UP_PASSES):
                _time_pass(model, batches[name])
        rounds = 0
        end = time.perf_counter() + seconds * len(models)
        while rounds < least or time.perf_counter() < end:
            for name, model in models.items():
                taken[name].append(_time_pass(model, batches[name]))
            rounds += 1
    return {
        name: _median_and_quartiles(batch_size / torch.tensor(times, dtype=torch.float64))
        for name, times in taken.items()
    }


def _median_and_quartiles(rates: Tensor) -> Speed:
    """Median and quartiles. Shape: (runs,)"""
    low, median, high = torch.quantile(rates, torch.tensor([0.25, 0.5, 0.75], dtype=rates.dtype)).tolist()
    return Speed(median, low, high, len(rates))


def throughput(model: nn.Module, input_size: tuple[int, ...], batch_size: int = 32, seconds: float = 2.0) -> float:
    """Images a second in eval mode: the median over runs of at least `seconds` in all, after a warm-up."""
    return measure_speeds({"": model}, input_size, batch_size, seconds)[""].median
