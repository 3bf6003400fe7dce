"""How often a model is right, and whether it knows."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.evaluation.prediction_counts import PredictionCounts
from isomorph.layers.eval_mode import eval_mode


@torch.no_grad()
def for_each_batch(model: nn.Module, loader: Iterable[Any], take: Callable[[Tensor, Any], None]) -> None:
    """Hands the model's logits to `take` batch by batch, with what the loader gives beside the images.

    In eval mode, in float32, on the model's device; every module gets its mode back.

    Raises: UserError when the loader gives no batch.
    """
    device, batches = next(model.parameters()).device, 0
    with eval_mode(model):
        for images, labels in loader:
            take(model(images.to(device, non_blocking=True)).float(), labels)
            batches += 1
    if not batches:
        raise UserError("there is nothing to evaluate: the loader gave no batch")


def count_predictions(model: nn.Module, loader: Iterable[Any]) -> PredictionCounts:
    """The counts behind `evaluate`; those of several processes add up.

    Raises: UserError when the loader gives no batch, or a label is outside the model's classes.
    """
    found: list[PredictionCounts] = []

    def take(logits: Tensor, labels: Tensor) -> None:
        if not found:
            found.append(PredictionCounts(logits.shape[1]))
        found[0].add(logits, labels)

    for_each_batch(model, loader, take)
    return found[0]


def evaluate(model: nn.Module, loader: Iterable[Any]) -> dict[str, float]:
    """Accuracy of a classifier: top1 and top5 (%), nll (nats), ece (%, 15 bins), images.

    Images labelled -1 do not count. Memory does not grow with the number of images.

    Raises: UserError when a label is outside the model's classes.
    """
    return count_predictions(model, loader).metrics()
