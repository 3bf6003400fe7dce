"""How often a model is right, and whether it knows."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.mode import eval_mode


@torch.no_grad()
def logits_and_labels(model: nn.Module, loader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """The model's logits on a loader, in eval mode and float32, on the CPU; every module gets its mode back.

    Shape: -> (n, num_classes), (n,)
    """
    device = next(model.parameters()).device
    logits, labels = [], []
    with eval_mode(model):
        for images, targets in loader:
            logits.append(model(images.to(device, non_blocking=True)).float().cpu())
            labels.append(targets)
    if not labels:
        raise UserError("there is nothing to evaluate: the loader gave no batch")
    return torch.cat(logits), torch.cat(labels)


def evaluate(model: nn.Module, loader: Iterable[Any]) -> dict[str, float]:
    """Accuracy of a classifier: top1 and top5 (%), nll (nats), ece (%, 15 bins), images.

    Raises: UserError when a label is outside the model's classes.
    """
    logits, labels = logits_and_labels(model, loader)
    if labels.max() >= logits.shape[1]:
        raise UserError(
            f"the data has class {int(labels.max())}, but the model knows {logits.shape[1]} classes; "
            "give it the right number (model.num_classes)"
        )
    return classification_metrics(logits, labels)


def classification_metrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Shape: logits (n, num_classes), labels (n,)"""
    from torchmetrics.functional.classification import multiclass_calibration_error

    ranked = logits.topk(min(5, logits.shape[1])).indices.eq(labels[:, None])  # (n, 5)
    ece = multiclass_calibration_error(logits.softmax(-1), labels, num_classes=logits.shape[1], n_bins=15)
    return {
        "top1": 100 * ranked[:, 0].float().mean().item(),
        "top5": 100 * ranked.any(1).float().mean().item(),
        "nll": F.cross_entropy(logits, labels).item(),
        "ece": 100 * ece.item(),
        "images": len(labels),
    }
