"""Build the objective of a run from its recipe: the loss, the test metrics and the score."""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import torch
from timm.task import TrainingTask
from torch import nn

from isomorph.distributed import Runtime
from isomorph.evaluation.accuracy import count_predictions
from isomorph.evaluation.prediction_counts import sum_counts
from isomorph.models.masked_autoencoder import MaskedAutoencoder
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
from isomorph.training.task import Measure, Objective


def build_objective(recipe: Recipe, model: nn.Module, device: torch.device) -> Objective:
    """Return the objective of a recipe: classification, distillation, token labels or masked pre-training."""
    if recipe.mask:
        return _pretraining_objective(build_pretraining(recipe.mask, model, device))
    return Objective(_build_task(recipe, model, device), _measure_classes, lambda metrics: metrics["top1"])


def _build_task(recipe: Recipe, model: nn.Module, device: torch.device) -> TrainingTask:
    """Return the task of a run with labels."""
    if recipe.token_labels:
        return build_token_labelling(model, recipe.token_labels, recipe.augment, device, recipe.map_similarity)
    if recipe.distill is None:
        return build_classification(model, recipe.augment, recipe.loss, device, recipe.map_similarity)
    teacher = open_teacher(recipe.distill)
    check_teacher(teacher, model)
    return build_distillation(model, teacher, recipe.distill, recipe.augment, recipe.loss, device)


def _pretraining_objective(task: TrainingTask) -> Objective:
    """Return the objective of a pre-training task; its result is the encoder."""

    def autoencoder(module: nn.Module) -> MaskedAutoencoder:
        return module.student if isinstance(module, AlignedStudent) else module  # type: ignore[return-value]

    def measure_reconstruction(module: nn.Module, loader: Iterable[Any], runtime: Runtime) -> dict[str, float]:
        positions = _local_positions(runtime)
        metrics = evaluate_reconstruction(autoencoder(module), runtime.pad_batches(loader), positions=positions)
        return _mean_over_processes(metrics, runtime)

    def measure_alignment(module: nn.Module, loader: Iterable[Any], runtime: Runtime) -> dict[str, float]:
        positions = _local_positions(runtime)
        metrics = evaluate_alignment(module, task, runtime.pad_batches(loader), positions=positions)  # type: ignore[arg-type]
        return _mean_over_processes(metrics, runtime)

    has_teacher = isinstance(task, GenericDistillationTask)
    name = "alignment" if has_teacher else "reconstruction"
    measure: Measure = measure_alignment if has_teacher else measure_reconstruction
    return Objective(
        task, measure, lambda metrics: -metrics[name], lambda module: autoencoder(module).encoder, autoencoder
    )


def _local_positions(runtime: Runtime) -> Iterator[int]:
    """Return the positions in the data of this process's test images: rank, rank + world, rank + 2 world ..."""
    return count(runtime.rank, runtime.world)


def _mean_over_processes(metrics: dict[str, float], runtime: Runtime) -> dict[str, float]:
    """Return the metrics averaged over the images of all processes."""
    parts = runtime.gather(metrics)
    images = sum(part["images"] for part in parts)
    means = {name: sum(part[name] * part["images"] for part in parts) / images for name in metrics if name != "images"}
    return {**means, "images": images}


def _measure_classes(model: nn.Module, loader: Iterable[Any], runtime: Runtime) -> dict[str, float]:
    """Return accuracy and calibration over the images of all processes."""
    return sum_counts(runtime.gather(count_predictions(model, runtime.pad_batches(loader)))).metrics()
