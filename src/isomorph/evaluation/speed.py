"""Speed of models in images per second; models are timed in turns, so that all see the same load of the machine."""

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import nn

from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import inputs_like
from isomorph.layers.eval_mode import eval_mode
from isomorph.surgery.model_inputs import Inputs, run_model


class Speed(NamedTuple):
    """Images per second: median and quartiles over passes, and the number of passes.

    >>> from isomorph.evaluation import Speed
    >>> Speed(median=100.0, low=90.0, high=110.0, runs=5).median
    100.0
    """

    median: float
    low: float
    high: float
    runs: int


def _synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _time_pass(model: nn.Module, batch: Inputs) -> float:
    """Return the seconds of one inference pass."""
    device = next(model.parameters()).device
    _synchronize(device)
    start = time.perf_counter()
    run_model(model, batch)
    _synchronize(device)
    return time.perf_counter() - start


@torch.no_grad()
def measure_speeds(
    models: Mapping[str, nn.Module],
    input_sizes: Mapping[str, tuple[int, ...]] | tuple[int, ...],
    batch_size: int = 32,
    seconds: float = 2.0,
    least: int = 5,
) -> dict[str, Speed]:
    """Measure the images per second of each model in eval mode, in rounds of one pass per model, after a warm-up.

    Rounds continue for `seconds` per model, and there are at least `least`. Every module gets its mode back.

    Shape: input_sizes is (channels, height, width), or one per model

    Raises: UserError when a batch has no image, there is no model, or the time is negative or not finite.

    >>> from isomorph.evaluation import measure_speeds
    >>> model = timm.create_model("cifar_resnet20")
    >>> speeds = measure_speeds({"a": model, "b": model}, (3, 32, 32), batch_size=1, seconds=0)
    >>> list(speeds), speeds["a"].runs
    (['a', 'b'], 5)
    """
    if not 0 <= seconds < math.inf:
        raise UserError(f"{seconds:g} seconds cannot be timed; give 0 or more")
    if batch_size < 1 or not models:
        raise UserError(f"cannot time {len(models)} models with batches of {batch_size}; give at least 1 of each")
    sizes = input_sizes if isinstance(input_sizes, Mapping) else dict.fromkeys(models, input_sizes)
    times: dict[str, list[float]] = {name: [] for name in models}
    with ExitStack() as stack:
        batches = {}
        for name, model in models.items():
            stack.enter_context(eval_mode(model))
            batches[name] = inputs_like(model, batch_size, sizes[name], next(model.parameters()).device)
            if _time_pass(model, batches[name]) <= seconds:  # a warm-up: one pass of a slow model
                _time_pass(model, batches[name])
        rounds = 0
        end = time.perf_counter() + seconds * len(models)
        while rounds < least or time.perf_counter() < end:
            for name, model in models.items():
                times[name].append(_time_pass(model, batches[name]))
            rounds += 1
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    speeds = {}
    for name, own in times.items():
        rates = batch_size / torch.tensor(own, dtype=torch.float64)
        low, median, high = torch.quantile(rates, quartiles).tolist()
        speeds[name] = Speed(median, low, high, rounds)
    return speeds


def throughput(model: nn.Module, input_size: tuple[int, ...], batch_size: int = 32, seconds: float = 2.0) -> float:
    """Return the images per second in eval mode: the median over the passes begun within `seconds`, after a warm-up.

    Shape: input_size is (channels, height, width)

    >>> from isomorph.evaluation import throughput
    >>> throughput(timm.create_model("cifar_resnet20"), (3, 32, 32), batch_size=1, seconds=0) > 0
    True
    """
    return measure_speeds({"": model}, input_size, batch_size, seconds, least=1)[""].median
