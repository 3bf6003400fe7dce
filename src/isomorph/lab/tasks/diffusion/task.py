"""Denoising diffusion as a task of the training loop: images of any data source, and a network that predicts noise.

Its test metric is the error of the predicted noise on test images, by time step.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torchvision import transforms

from isomorph.lab.data.formats.registry import SOURCES
from isomorph.lab.data.loaders import (
    ImageConfig,
    eval_transform,
    loader_of_share,
    train_loader,
    transformed,
)
from isomorph.lab.data.sampler import TrainSampler
from isomorph.lab.data.sources import Source, spaced_images, with_changes
from isomorph.lab.distributed import Runtime, derive_seed, torchrun_place
from isomorph.lab.evaluation.model_data import open_split
from isomorph.lab.tasks.diffusion.sampling import (
    NoiseSchedule,
    check_denoiser_size,
    noise_schedule,
    require_denoiser,
)
from isomorph.lab.training.build import build_model, build_test_loader, open_sources
from isomorph.lab.training.dry_run.synthetic import SyntheticData, synthetic_data
from isomorph.lab.training.objectives.masked import LossModule
from isomorph.lab.training.recipe.fields import AugmentPart, OpenFraction, Part
from isomorph.lab.training.recipe.recipe import Recipe
from isomorph.lab.training.task import EvaluationOptions, Losses, Objective, Task
from isomorph.layers.modes import eval_mode, require_finite
from isomorph.terminal_tables import Metrics, Row, Rows

INTERVALS = 5


class DiffusionPart(Part):
    """Options of the task diffusion."""

    beta_start: OpenFraction = 1e-4
    """Variance of the noise that the first time step adds."""
    beta_end: OpenFraction = 0.02
    """Variance of the noise that the last time step adds; those between rise linearly."""

    @model_validator(mode="after")
    def check_fields(self) -> "DiffusionPart":
        if self.beta_start > self.beta_end:
            raise ValueError(
                f"beta_start {self.beta_start:g} must be at most beta_end, {self.beta_end:g}"
            )
        return self


class DenoisingLoss(LossModule):
    """Noise prediction: the sum over a batch and its pixels of (predicted - noise)^2 / 1000, at uniform time steps.

    The losses of the `parts` of a batch (processes times accumulation steps) are averaged, and the average is the sum
    over the whole batch: the effect of gradient clipping depends on its size.

    Source: Ho et al. (2020) eq. 14, as a sum like in the code that TDRL names
    """

    def __init__(
        self, model: nn.Module, schedule: NoiseSchedule, parts: int, device: torch.device
    ) -> None:
        super().__init__(model, device)
        self.schedule = schedule
        self.parts = parts

    def forward(self, input: Tensor, target: Tensor | None = None) -> Losses:
        t = torch.randint(self.schedule.time_steps, (len(input),), device=input.device)
        noise = torch.randn_like(input)
        predicted = self.trainable_module(self.schedule.add_noise(input, noise, t), t)
        loss = squared_errors(predicted, noise).sum() * self.parts / 1000
        return {"loss": loss, "output": predicted}


def squared_errors(predicted: Tensor, noise: Tensor) -> Tensor:
    """Return the squared error of each image, summed over its pixels. Shape: (B, C, H, W), the same -> (B,)"""
    return (predicted.float() - noise).square().flatten(1).sum(1)


@torch.no_grad()
def denoising_errors(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    schedule: NoiseSchedule,
    runtime: Runtime,
) -> Tensor:
    """Return the sum of the images' mean squared errors and the number of images, by interval of time steps.

    The sums are those of all processes; images with the label -1 do not count. Time step and noise of an image depend
    on its index alone, so that all models are tested on the same inputs.

    Shape: -> (INTERVALS, 2), float64
    """
    sums = torch.zeros(INTERVALS, 2, dtype=torch.float64)
    index = runtime.rank
    with eval_mode(model):
        for images, labels in loader:
            images = images.to(runtime.device)
            end = index + len(images) * runtime.world
            t, noise = _draw(images.shape, range(index, end, runtime.world), schedule)
            index = end
            t = t.to(images.device)
            noise = noise.to(images)
            with runtime.autocast():
                predicted = model(schedule.add_noise(images, noise, t), t)
            require_finite(predicted)
            errors = squared_errors(predicted, noise) / images[0].numel()
            counted = labels >= 0
            interval = t.cpu() * INTERVALS // schedule.time_steps
            interval = interval[counted]
            sums[:, 0].index_add_(0, interval, errors.double().cpu()[counted])
            sums[:, 1] += torch.bincount(interval, minlength=INTERVALS)
    return torch.stack(runtime.gather(sums)).sum(0)


def _draw(
    shape: torch.Size, numbers: Iterable[int], schedule: NoiseSchedule
) -> tuple[Tensor, Tensor]:
    """Return time step and noise of every image of a batch by its index. Shape: -> (B,), (B, C, H, W)"""
    steps = []
    noises = []
    for number in numbers:
        generator = torch.Generator().manual_seed(derive_seed("denoising", number))
        steps.append(torch.randint(schedule.time_steps, (), generator=generator))
        noises.append(torch.randn(shape[1:], generator=generator))
    return torch.stack(steps), torch.stack(noises)


def mean_error(sums: Tensor) -> Metrics:
    total, images = sums.sum(0).tolist()
    return {"denoising": total / max(images, 1), "images": int(images)}


def errors_by_time(sums: Tensor, time_steps: int) -> Iterator[Row]:
    for interval, (total, images) in enumerate(sums.tolist()):
        if images:
            first = -(-interval * time_steps // INTERVALS)
            end = -(-(interval + 1) * time_steps // INTERVALS)
            row = {
                "time steps": f"{first} to {end - 1}",
                "denoising": total / images,
                "images": int(images),
            }
            yield row


class Diffusion(Task):
    """Training of a network that predicts the noise in images at a time step, such as ddpm_unet."""

    fields = DiffusionPart
    sources = tuple(SOURCES)
    unused = (
        *(f"augment.{name}" for name in AugmentPart.model_fields if name != "hflip"),
        "loss",
        "distill",
        "token_labels",
        "map_similarity",
        "mask",
        "model.num_classes",
        "monitor_every",
        "data.test_crop",
        "data.crop_pct",
    )
    printed = {"denoising": ".5f"}
    test_loader: Any = staticmethod(build_test_loader)

    def open_data(self, recipe: Recipe) -> tuple[Any, Any]:
        train, test = open_sources(recipe)
        return with_changes(train, classes=()), with_changes(test, classes=())

    def build_model(self, recipe: Recipe, train: Source, recast_now: bool) -> nn.Module:
        return build_model(recipe.model, 0, recipe.drop_path, recast_now)

    def data_config(self, recipe: Recipe, model: nn.Module) -> ImageConfig:
        """Return the size of images, by default the model's own; images have values from -1 to 1."""
        config = super().data_config(recipe, model)
        half = (0.5,) * config["input_size"][0]
        return config | dict(crop_pct=1.0, crop_mode="center", mean=half, std=half)

    def check_model(self, recipe: Recipe, model: nn.Module, config: ImageConfig) -> None:
        require_denoiser(model, recipe.model.name or str(recipe.model.weights))
        check_denoiser_size(model, config["input_size"])

    def train_loader(
        self, recipe: Recipe, config: ImageConfig, train: Any, sampler: TrainSampler
    ) -> Any:
        flip = transforms.RandomHorizontalFlip(recipe.augment.hflip)
        transform = transforms.Compose([flip, eval_transform(config)])
        return train_loader(
            transformed(train, transform), sampler, recipe.data.workers, recipe.data.unreadable
        )

    def objective(self, recipe: Recipe, model: nn.Module, device: torch.device) -> Objective:
        time_steps = int(model.time_steps)  # type: ignore[arg-type]
        schedule = NoiseSchedule(time_steps, self.options.beta_start, self.options.beta_end)

        def measure(trained: nn.Module, loader: Iterable[Any], runtime: Runtime) -> Metrics:
            sums = denoising_errors(trained, runtime.pad_batches(loader), schedule, runtime)
            return mean_error(sums)

        _, processes, _ = torchrun_place()
        loss = DenoisingLoss(model, schedule, recipe.scale.accumulate * processes, device)
        return Objective(loss, measure, lambda metrics: -metrics["denoising"])

    def synthetic_data(self, recipe: Recipe) -> SyntheticData:
        return synthetic_data(recipe, labelled=False)

    def evaluate(self, model: nn.Module, options: EvaluationOptions, runtime: Runtime) -> Rows:
        """Return the mean error of the predicted noise on test images, and a row of it for each interval of times."""
        config = dict(model.pretrained_cfg)  # type: ignore[arg-type]
        if options.size:
            config["input_size"] = (config["input_size"][0], *options.size)
            check_denoiser_size(model, config["input_size"])
        source = open_split(model, "test", options.data, options.root)
        source = spaced_images(with_changes(source, classes=()), options.max_images)
        images = transformed(source, eval_transform(config))
        loader = loader_of_share(images, options.batch_size, options.workers, runtime)
        schedule = noise_schedule(model)
        sums = denoising_errors(model, runtime.pad_batches(loader), schedule, runtime)
        return [mean_error(sums), *errors_by_time(sums, schedule.time_steps)]
