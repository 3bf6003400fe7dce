"""The loss of a diffusion model, and the error of the noise that it predicts on test images, by time step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.distributed import Runtime, derive_seed
from isomorph.layers.eval_mode import eval_mode
from isomorph.tasks.diffusion.noise_schedule import NoiseSchedule
from isomorph.training.objectives.masked import PretrainingTask

INTERVALS = 5
"""Number of equal intervals of time steps by which errors are reported."""


class DenoisingTask(PretrainingTask):
    """Noise prediction: the sum over a batch and its pixels of (predicted - noise)^2 / 1000, at uniform time steps.

    The sum is that of the whole batch of `batch_size` images, whichever part of it a process or an accumulation step
    takes: the effect of gradient clipping depends on its size.

    Source: Ho et al. (2020) eq. 14, as a sum like in the code that TDRL names
    """

    def __init__(self, model: nn.Module, schedule: NoiseSchedule, batch_size: int, device: torch.device) -> None:
        super().__init__(model, device)
        self.schedule, self.batch_size = schedule, batch_size

    def forward(self, input: Tensor, target: Tensor | None = None) -> dict[str, Tensor]:
        t = torch.randint(self.schedule.time_steps, (len(input),), device=input.device)
        noise = torch.randn_like(input)
        predicted = self.trainable_module(self.schedule.add_noise(input, noise, t), t)
        return {"loss": squared_errors(predicted, noise).mean() * self.batch_size / 1000, "output": predicted}


def squared_errors(predicted: Tensor, noise: Tensor) -> Tensor:
    """Return the squared error of each image, summed over its pixels. Shape: (B, C, H, W), the same -> (B,)"""
    return (predicted.float() - noise).square().flatten(1).sum(1)


@torch.no_grad()
def denoising_errors(
    model: nn.Module, loader: Iterable[tuple[Tensor, Tensor]], schedule: NoiseSchedule, runtime: Runtime
) -> Tensor:
    """Return the sum of the images' mean squared errors and the number of images, by interval of time steps.

    The sums are those of all processes; images with the label -1 do not count. Time step and noise of an image depend
    on its index alone, so that all models are tested on the same inputs.

    Shape: -> (INTERVALS, 2), float64
    """
    sums, index = torch.zeros(INTERVALS, 2, dtype=torch.float64), runtime.rank
    with eval_mode(model):
        for images, labels in loader:
            images = images.to(runtime.device)
            t, noise = _draw(images.shape, range(index, index + len(images) * runtime.world, runtime.world), schedule)
            index += len(images) * runtime.world
            t, noise = t.to(images.device), noise.to(images)
            with runtime.autocast():
                predicted = model(schedule.add_noise(images, noise, t), t)
            errors = squared_errors(predicted, noise) / images[0].numel()
            counted = labels >= 0
            interval = (t.cpu() * INTERVALS // schedule.time_steps)[counted]
            sums[:, 0].index_add_(0, interval, errors.double().cpu()[counted])
            sums[:, 1] += torch.bincount(interval, minlength=INTERVALS)
    return torch.stack(runtime.gather(sums)).sum(0)


def _draw(shape: torch.Size, numbers: Iterable[int], schedule: NoiseSchedule) -> tuple[Tensor, Tensor]:
    """Return time step and noise of every image of a batch by its index. Shape: -> (B,), (B, C, H, W)"""
    steps, noises = [], []
    for number in numbers:
        generator = torch.Generator().manual_seed(derive_seed("denoising", number))
        steps.append(torch.randint(schedule.time_steps, (), generator=generator))
        noises.append(torch.randn(shape[1:], generator=generator))
    return torch.stack(steps), torch.stack(noises)


def mean_error(sums: Tensor) -> dict[str, Any]:
    """Return the mean error over all time steps, `denoising`, and the number of images."""
    total, images = sums.sum(0).tolist()
    return {"denoising": total / max(images, 1), "images": int(images)}


def errors_by_time(sums: Tensor, time_steps: int) -> list[dict[str, Any]]:
    """Return a row of the mean error for every interval of time steps that has images."""
    edges = [-(-i * time_steps // INTERVALS) for i in range(INTERVALS + 1)]
    named = zip(edges, edges[1:], sums.tolist(), strict=False)
    return [
        {"time steps": f"{first} to {end - 1}", "denoising": total / images, "images": int(images)}
        for first, end, (total, images) in named
        if images
    ]
