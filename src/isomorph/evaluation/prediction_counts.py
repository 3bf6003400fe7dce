"""Counts of predictions, added up batch by batch, from which accuracy and calibration follow."""

from functools import reduce
from operator import add
from typing import TypeVar

import torch
from torch import Tensor

from isomorph.errors import UserError

_ECE_BINS = 15
_STEP = 2.0**-28
"""Losses and confidences are rounded to multiples of this, which is below the error of a log-softmax in float32. Their
sums are then exact in float64 (up to 2**25), so that they do not depend on the order of the images, or on which process
adds them."""


class PredictionCounts:
    """Counts of a classifier's predictions, from which its metrics follow; counts of several processes can be added.

    Their size depends on the number of classes only, not of images.

    ECE = sum over bins of |correct - confidence| / images, with bins ((m - 1) / 15, m / 15]

    Shape: total, correct, correct_top5 (num_classes,) by class of the label; bins (3, 15): images, summed confidence,
    correct images
    Source: Guo et al. (2017), eq. 3; differs: torchmetrics puts a confidence of exactly 1 into a bin of its own

    >>> from isomorph.evaluation import PredictionCounts
    >>> counts = PredictionCounts(num_classes=3)
    >>> counts.add(torch.eye(3), torch.tensor([0, 1, 1]))
    >>> round(counts.metrics()["top1"], 1)
    66.7
    """

    def __init__(self, num_classes: int) -> None:
        self.total = torch.zeros(num_classes, dtype=torch.int64)
        self.correct, self.correct_top5 = torch.zeros_like(self.total), torch.zeros_like(self.total)
        self.bins = torch.zeros(3, _ECE_BINS, dtype=torch.float64)
        self.nll = torch.zeros((), dtype=torch.float64)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch; images with label -1 do not count.

        Shape: logits (B, num_classes), labels (B,)
        Raises: UserError when a label is outside the model's classes.
        """
        _check_labels(labels, logits.shape[1])
        labelled = (labels >= 0).to(logits.device)
        logits, labels = logits[labelled].float(), labels.to(logits.device)[labelled]
        ranked = logits.topk(min(5, logits.shape[1])).indices.eq(labels[:, None])  # (B, 5)
        log_p = logits.log_softmax(-1)
        nll, confidence = -log_p.gather(1, labels[:, None])[:, 0], log_p.amax(-1).exp()
        top1, top5, *sums = torch.stack([ranked[:, 0].float(), ranked.any(1).float(), nll, confidence]).cpu().double()
        self._count(labels.cpu(), top1, top5, *((values / _STEP).round() * _STEP for values in sums))

    def _count(self, labels: Tensor, top1: Tensor, top5: Tensor, nll: Tensor, confidence: Tensor) -> None:
        """Add images by their label, 1 if the top-1 or the top-5 is correct, loss and confidence. Shape: all (B,)"""
        for total, values in (
            (self.total, torch.ones_like(top1)),
            (self.correct, top1),
            (self.correct_top5, top5),
        ):
            total.index_add_(0, labels, values.long())
        edges = torch.linspace(0, 1, _ECE_BINS + 1, dtype=torch.float64)
        index = (torch.bucketize(confidence, edges) - 1).clamp(0, _ECE_BINS - 1)
        self.bins.index_add_(1, index, torch.stack([torch.ones_like(confidence), confidence, top1]))
        self.nll += nll.sum()

    def __add__(self, other: "PredictionCounts") -> "PredictionCounts":
        both = PredictionCounts(len(self.total))
        for name in vars(both):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        return both

    def metrics(self) -> dict[str, float]:
        """Return top1 and top5 (%), nll (nats), ece (%), images. Raises: UserError when no image was counted."""
        images = int(self.total.sum())
        if not images:
            raise UserError("there is nothing to evaluate: no image has a label")
        _, confidence, correct = self.bins
        return {
            "top1": 100 * self.correct.sum().item() / images,
            "top5": 100 * self.correct_top5.sum().item() / images,
            "nll": self.nll.item() / images,
            "ece": 100 * (correct - confidence).abs().sum().item() / images,
            "images": images,
        }


class MultiLabelCounts:
    """Counts of predictions for images with any number of correct labels; images without labels do not count.

    Source: Beyer et al. (2020), ReaL accuracy: correct if the top-1 is among the image's labels
    """

    def __init__(self) -> None:
        self.images = self.correct = 0

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch. Shape: logits (B, num_classes), labels (B, K) padded with -1"""
        labels = labels.to(logits.device)
        labelled = (labels >= 0).any(1)
        correct = (labels == logits.argmax(1, keepdim=True)).any(1) & labelled
        counted = torch.stack([labelled.sum(), correct.sum()]).tolist()
        self.images, self.correct = self.images + counted[0], self.correct + counted[1]

    def __add__(self, other: "MultiLabelCounts") -> "MultiLabelCounts":
        both = MultiLabelCounts()
        both.images, both.correct = self.images + other.images, self.correct + other.correct
        return both

    def metrics(self) -> dict[str, float]:
        """Return top1 (%), images. Raises: UserError when no image was counted."""
        if not self.images:
            raise UserError("there is nothing to evaluate: no image has a label")
        return {"top1": 100 * self.correct / self.images, "images": self.images}


def _check_labels(labels: Tensor, num_classes: int) -> None:
    """Raise a UserError for labels beyond the model's classes."""
    if len(labels) and labels.max() >= num_classes:
        raise UserError(
            f"the data has class {int(labels.max())}, but the model has {num_classes} classes; "
            "set model.num_classes to the number of classes of the data"
        )


Counts = TypeVar("Counts", PredictionCounts, MultiLabelCounts)


def sum_counts(counts: list[Counts]) -> Counts:
    """Add up the counts of several processes."""
    return reduce(add, counts)
