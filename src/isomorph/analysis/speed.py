"""Speed of models in images per second; models are timed in turns, so that all see the same load of the machine."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.modes import eval_mode, first_float
from isomorph.models.input_sizes import inputs_like
from isomorph.models.masked_autoencoder import MaskedAutoencoder
from isomorph.operations import copy_module, tensors_in
from isomorph.surgery.calls import Inputs, call_model

# What is timed: an inference pass; a training step (forward, backward, AdamW); or one of masked
# pre-training, with the student's decoder of TDRL (4 blocks of 128 channels), 75% of the patches
# hidden, and MAE's loss, without a teacher.
Step = Literal["inference", "train", "pretrain"]


class Speed(NamedTuple):
    """Images per second: median and quartiles over passes, and the number of passes.

    >>> from isomorph.analysis.speed import Speed
    >>> Speed(median=100.0, low=90.0, high=110.0, runs=5).median
    100.0
    """

    median: float
    low: float
    high: float
    runs: int


@contextmanager
def restored_afterwards(model: nn.Module) -> Iterator[None]:
    """Restore modes, buffers and gradients of a model after the block, which begins in eval mode."""
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    gradients = [parameter.grad for parameter in model.parameters()]
    try:
        with eval_mode(model):
            model.zero_grad(set_to_none=True)
            yield
    finally:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for name, tensor in model.named_buffers():
            tensor.detach().copy_(buffers[name])


class _Pretraining(nn.Module):
    """The loss of masked pre-training of a ViT, as a module of images."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder = MaskedAutoencoder(encoder, 4, 128, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.autoencoder.loss(images)


def stepped_module(model: nn.Module, step: Step) -> nn.Module:
    """Return what a step trains: a copy of the model, or its masked pre-training; the model itself for inference.

    Raises: UserError for pre-training of a model that is not a ViT.
    """
    if step == "inference":
        return model
    return _Pretraining(copy_module(model)) if step == "pretrain" else copy_module(model)


def propagate_back(output: Any) -> None:
    """Propagate gradients of the sum of a model's first output, at the cost of a loss's."""
    tensors_in(output)[0].float().sum().backward()


def _training_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs) -> None:
    optimizer.zero_grad()
    model.train()
    with torch.enable_grad():
        propagate_back(call_model(model, inputs))
    optimizer.step()


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    wait = partial(torch.accelerator.synchronize, device) if device.type != "cpu" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


@torch.no_grad()
def measure_speeds(
    models: Mapping[str, nn.Module],
    input_sizes: Mapping[str, tuple[int, ...]] | tuple[int, ...],
    batch_size: int = 32,
    seconds: float = 2.0,
    least: int = 5,
    training: bool = False,
) -> dict[str, Speed]:
    """Measure the images per second of each model, in rounds of one pass per model, after a warm-up.

    Passes are of inference in eval mode or, with `training`, steps of AdamW at a rate of 0, which changes no weight.
    Rounds continue for `seconds` per model, and there are at least `least`. Every module gets mode and buffers back.

    Shape: input_sizes is (channels, height, width), or one per model

    Raises: UserError when a batch has no image, there is no model, or the time is negative or not finite.

    >>> from isomorph.analysis.speed import measure_speeds
    >>> model = timm.create_model("cifar_resnet20")
    >>> speeds = measure_speeds({"a": model, "b": model}, (3, 32, 32), batch_size=1, seconds=0)
    >>> list(speeds), speeds["a"].runs
    (['a', 'b'], 5)
    """
    if not 0 <= seconds < math.inf:
        raise UserError(f"{seconds:g} seconds cannot be timed; give 0 or more")
    if batch_size < 1 or not models:
        raise UserError(
            f"cannot time {len(models)} models with batches of {batch_size}; give at least 1 of each",
        )
    sizes = input_sizes if isinstance(input_sizes, Mapping) else dict.fromkeys(models, input_sizes)
    times: dict[str, list[float]] = {name: [] for name in models}
    with ExitStack() as stack:
        passes = {}
        for name, model in models.items():
            stack.enter_context(restored_afterwards(model))
            inputs = inputs_like(model, batch_size, sizes[name])
            work: Callable[[], object] = partial(call_model, model, inputs)
            if training:
                trained = [p for p in model.parameters() if p.requires_grad]
                if not trained:
                    raise UserError(
                        f"{name or 'the model'} has no parameter that is trained, so a step of training cannot be "
                        "timed; call model.requires_grad_(True)"
                    )
                work = partial(_training_step, model, torch.optim.AdamW(trained, lr=0.0), inputs)
            passes[name] = partial(_seconds, work, first_float(model).device)
            if passes[name]() <= seconds:  # a warm-up: one pass of a slow model
                passes[name]()
        rounds = 0
        end = time.perf_counter() + seconds * len(models)
        while rounds < least or time.perf_counter() < end:
            for name in models:
                times[name].append(passes[name]())
            rounds += 1
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    speeds = {}
    for name, seconds_of_passes in times.items():
        rates = batch_size / torch.tensor(seconds_of_passes, dtype=torch.float64)
        low, median, high = torch.quantile(rates, quartiles).tolist()
        speeds[name] = Speed(median, low, high, rounds)
    return speeds


def throughput(
    model: nn.Module,
    input_size: tuple[int, ...],
    batch_size: int = 32,
    seconds: float = 2.0,
) -> float:
    """Return the images per second in eval mode: the median over the passes begun within `seconds`, after a warm-up.

    Shape: input_size is (channels, height, width)

    >>> from isomorph.analysis.speed import throughput
    >>> throughput(timm.create_model("cifar_resnet20"), (3, 32, 32), batch_size=1, seconds=0) > 0
    True
    """
    return measure_speeds({"": model}, input_size, batch_size, seconds, least=1)[""].median
