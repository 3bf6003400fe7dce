"""Accuracy and calibration of classifiers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.evaluation.prediction_counts import PredictionCounts
from isomorph.layers.eval_mode import eval_mode


@torch.no_grad()
def for_each_batch(model: nn.Module, loader: Iterable[Any], handle: Callable[[Tensor, Any], None]) -> None:
    """Call `handle(logits, labels)` for every batch; labels are as the loader yields them.

    The model runs in eval mode on its own device and in its own precision, and logits are float32; every module gets
    its mode back.
    """
    parameter = next(model.parameters())
    with eval_mode(model):
        for images, labels in loader:
            handle(model(images.to(parameter, non_blocking=True)).float(), labels)


def count_predictions(model: nn.Module, loader: Iterable[Any]) -> PredictionCounts:
    """Return the counts from which `evaluate` computes its metrics; those of several processes can be added.

    Raises: UserError when the loader yields no batch, or a label is outside the model's classes.
    """
    counts: list[PredictionCounts] = []

    def handle(logits: Tensor, labels: Tensor) -> None:
        if not counts:
            counts.append(PredictionCounts(logits.shape[1]))
        counts[0].add(logits, labels)

    for_each_batch(model, loader, handle)
    if not counts:
        raise UserError("there is nothing to evaluate: the loader yields no batch")
    return counts[0]


def evaluate(model: nn.Module, loader: Iterable[Any]) -> dict[str, float]:
    """Return the accuracy of a classifier: top1 and top5 (%), nll (nats), ece (%, 15 bins), images.

    `loader` yields images and labels. Images labelled -1 do not count. Memory does not grow with the number of images.

    Raises: UserError when the loader yields no batch, no image has a label, or a label is outside the model's classes.

    >>> model = timm.create_model("cifar_resnet20")
    >>> source = iso.data.open_source("digits", "test").subset(range(20))
    >>> loader = iso.data.eval_loader(source, timm.data.resolve_data_config(model=model))
    >>> sorted(iso.evaluate(model, loader))
    ['ece', 'images', 'nll', 'top1', 'top5']
    """
    return count_predictions(model, loader).metrics()
