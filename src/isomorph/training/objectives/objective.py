"""From a recipe to what its run minimises, and how the result is judged."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from timm.task import TrainingTask
from torch import nn

from isomorph.distributed import Runtime
from isomorph.evaluation.accuracy import count_predictions
from isomorph.evaluation.prediction_counts import sum_counts
from isomorph.models.masked import MaskedAutoencoder
from isomorph.training.objectives.masked import (
    AlignedStudent,
    GenericDistillationTask,
    build_pretraining,
    evaluate_alignment,
    evaluate_reconstruction,
)
from isomorph.training.objectives.supervised import (
    build_classification,
    build_distillation,
    check_teacher,
    open_teacher,
)
from isomorph.training.objectives.token_labels import build_token_labelling
from isomorph.training.recipe.recipe import Recipe

Measure = Callable[[nn.Module, Iterable[Any], Runtime], dict[str, float]]


def same(module: nn.Module) -> nn.Module:
    return module


@dataclass(frozen=True)
class Objective:
    """What a run minimises, how the trained module is measured (by all processes together), and what is judged.

    `result` takes what is to be kept out of the trained module; `autoencoder` says that all of it is kept beside.
    """

    task: TrainingTask
    measure: Measure
    score: Callable[[dict[str, float]], float]
    result: Callable[[nn.Module], nn.Module] = same
    autoencoder: Callable[[nn.Module], MaskedAutoencoder] | None = None


def build_objective(recipe: Recipe, model: nn.Module, device: torch.device) -> Objective:
    """Labels; labels and a teacher; labels of every patch; hidden patches, with and without a teacher."""
    if recipe.mask:
        return _pretraining_objective(build_pretraining(recipe.mask, model, device))
    return Objective(_build_task(recipe, model, device), _measure_classes, lambda found: found["top1"])


def _build_task(recipe: Recipe, model: nn.Module, device: torch.device) -> TrainingTask:
    """What a run with labels minimises."""
    if recipe.token_labels:
        return build_token_labelling(model, recipe.token_labels, recipe.augment, device, recipe.map_similarity)
    if recipe.distill is None:
        return build_classification(model, recipe.augment, recipe.loss, device, recipe.map_similarity)
    teacher = open_teacher(recipe.distill)
    check_teacher(teacher, model)
    return build_distillation(model, teacher, recipe.distill, recipe.augment, recipe.loss, device)


def _pretraining_objective(task: TrainingTask) -> Objective:
    """Pre-training keeps the encoder, and the whole autoencoder beside it."""

    def whole(module: nn.Module) -> MaskedAutoencoder:
        return module.student if isinstance(module, AlignedStudent) else module  # type: ignore[return-value]

    def painted(module: nn.Module, loader: Iterable[Any], runtime: Runtime) -> dict[str, float]:
        return _mean_over_processes(
            evaluate_reconstruction(whole(module), runtime.evened(loader), places=_local_positions(runtime)), runtime
        )

    def described(module: nn.Module, loader: Iterable[Any], runtime: Runtime) -> dict[str, float]:
        return _mean_over_processes(
            evaluate_alignment(module, task, runtime.evened(loader), places=_local_positions(runtime)), runtime
        )  # type: ignore[arg-type]

    guided = isinstance(task, GenericDistillationTask)
    name = "alignment" if guided else "reconstruction"
    measure: Measure = described if guided else painted
    return Objective(task, measure, lambda found: -found[name], lambda module: whole(module).encoder, whole)


def _local_positions(runtime: Runtime) -> Iterator[int]:
    """Places in the data of this process's test images, which are dealt in turn."""
    return count(runtime.rank, runtime.world)


def _mean_over_processes(found: dict[str, float], runtime: Runtime) -> dict[str, float]:
    """Means over the images of all processes."""
    parts = runtime.gathered(found)
    images = sum(part["images"] for part in parts)
    means = {name: sum(part[name] * part["images"] for part in parts) / images for name in found if name != "images"}
    return {**means, "images": images}


def _measure_classes(model: nn.Module, loader: Iterable[Any], runtime: Runtime) -> dict[str, float]:
    """Accuracy and calibration over the images of all processes."""
    return sum_counts(runtime.gathered(count_predictions(model, runtime.evened(loader)))).metrics()
