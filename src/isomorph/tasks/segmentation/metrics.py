"""Metrics of segmentation from the counts of every true and predicted class, which add up over images and processes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isomorph.tasks.segmentation.pairs import IGNORE


class Confusion:
    """The number of pixels of each true class (rows) that were predicted as each class (columns).

    Shape: counts (K, K) int64
    """

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)

    def add(self, truth: Tensor, predicted: Tensor) -> None:
        """Count the pixels of a mask; those of class IGNORE do not count. Shape: (*), the same"""
        K, valid = len(self.counts), truth != IGNORE
        pairs = truth[valid] * K + predicted[valid]
        self.counts += torch.bincount(pairs.cpu(), minlength=K * K).view(K, K)

    def ious(self) -> Tensor:
        """Return the intersection over union of each class; NaN for one that is neither true nor predicted.

        Shape: -> (K,)
        """
        hits = self.counts.diagonal().double()
        return hits / (self.counts.sum(0) + self.counts.sum(1) - self.counts.diagonal())

    def recalls(self) -> Tensor:
        """Return the share of each class's pixels that were found; NaN for a class without pixels. Shape: -> (K,)"""
        return self.counts.diagonal().double() / self.counts.sum(1)

    def metrics(self) -> dict[str, float]:
        """Return miou, mean_accuracy and pixel_accuracy in percent; means over the classes that occur."""
        values = {
            "miou": self.ious().nanmean(),
            "mean_accuracy": self.recalls().nanmean(),
            "pixel_accuracy": self.counts.diagonal().sum() / self.counts.sum(),
        }
        return {name: 100 * float(value) for name, value in values.items()}

    def rows(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the IoU, the accuracy and the share of the pixels of each class, in percent; None where undefined."""
        shares = self.counts.sum(1).double() / max(1, int(self.counts.sum()))
        columns = {"iou": self.ious(), "accuracy": self.recalls(), "share": shares}
        percent = {name: [None if v != v else 100 * v for v in values.tolist()] for name, values in columns.items()}
        return [{"class": name, **{key: percent[key][i] for key in percent}} for i, name in enumerate(names)]
