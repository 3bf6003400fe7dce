"""Accuracy and calibration of classifiers, from counts that are added up batch by batch."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.lab.data.sources import with_changes
from isomorph.lab.evaluation.classes import class_logits
from isomorph.layers.modes import eval_mode, first_float
from isomorph.surgery.calls import dtype_name
from isomorph.terminal_tables import Metrics

_ECE_BINS = 15
# Losses and confidences are rounded to multiples of this, so their float64 sums are exact up to 2**25 in any order.
_STEP = 2.0**-28


class PredictionCounts:
    """Counts of a classifier's predictions, from which its metrics follow; counts of several processes can be added.

    Their size depends on the number of classes only, not of images.

    ECE = sum over bins of |correct - confidence| / images, with bins ((m - 1) / 15, m / 15]

    Shape: total, correct, correct_top5 (num_classes,) by class of the label; bins (3, 15): images, summed confidence,
    correct images
    Source: Guo et al. (2017), eq. 3; differs: torchmetrics keeps the confidence of every image, and puts one of exactly
    1 into a bin of its own

    >>> from isomorph.lab.evaluation import PredictionCounts
    >>> counts = PredictionCounts(num_classes=3)
    >>> counts.add(torch.eye(3), torch.tensor([0, 1, 1]))
    >>> round(counts.metrics()["top1"], 1)
    66.7
    """

    def __init__(self, num_classes: int) -> None:
        self.total = torch.zeros(num_classes, dtype=torch.int64)
        self.correct = torch.zeros_like(self.total)
        self.correct_top5 = torch.zeros_like(self.total)
        self.bins = torch.zeros(3, _ECE_BINS, dtype=torch.float64)
        self.nll = torch.zeros((), dtype=torch.float64)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch; negative labels do not count. Shape: (B, num_classes), (B,). Raises: UserError for too large."""
        classes = logits.shape[1]
        labels = labels.long()
        if len(labels) and labels.max() >= classes:
            raise UserError(
                f"the data has class {int(labels.max())}, but the model has {classes} classes; "
                "set model.num_classes to the number of classes of the data"
            )
        labelled = (labels >= 0).to(logits.device)
        logits = logits[labelled].float()
        labels = labels.to(logits.device)[labelled]
        ranked = logits.topk(min(5, classes)).indices.eq(labels[:, None])  # (B, 5)
        log_p = logits.log_softmax(-1)
        nll = -log_p.gather(1, labels[:, None])[:, 0]
        confidence = log_p.amax(-1).exp()
        columns = [ranked[:, 0].float(), ranked.any(1).float(), nll, confidence]
        top1, top5, nll, confidence = torch.stack(columns).cpu().double()  # one transfer for all
        nll = (nll / _STEP).round() * _STEP
        confidence = (confidence / _STEP).round() * _STEP

        seen = labels.cpu()
        self.total += seen.bincount(minlength=len(self.total))
        self.correct.index_add_(0, seen, top1.long())
        self.correct_top5.index_add_(0, seen, top5.long())
        edges = torch.linspace(0, 1, _ECE_BINS + 1, dtype=torch.float64)
        index = (torch.bucketize(confidence, edges) - 1).clamp(0, _ECE_BINS - 1)
        self.bins.index_add_(1, index, torch.stack([torch.ones_like(confidence), confidence, top1]))
        self.nll += nll.sum()

    def metrics(self) -> Metrics:
        """Return top1, top5 of more than five classes (%), nll (nats), ece (%), images.

        Raises: UserError when no image was counted.
        """
        images = _require_images(int(self.total.sum()))
        metrics = {"top1": 100 * self.correct.sum().item() / images}
        if len(self.total) > 5:
            metrics["top5"] = 100 * self.correct_top5.sum().item() / images
        metrics["nll"] = self.nll.item() / images
        _, confidence, correct = self.bins
        gap = (correct - confidence).abs().sum()
        metrics["ece"] = 100 * gap.item() / images
        metrics["images"] = images
        return metrics


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
        self.images = self.images + int(labelled.sum())
        self.correct = self.correct + int(correct.sum())

    def metrics(self) -> Metrics:
        """Return top1 (%), images. Raises: UserError when no image was counted."""
        return {"top1": 100 * self.correct / _require_images(self.images), "images": self.images}


def _require_images(images: int) -> int:
    if not images:
        raise UserError("there is nothing to evaluate: no image has a label")
    return images


Counts = TypeVar("Counts", PredictionCounts, MultiLabelCounts)


def sum_counts(counts: list[Counts]) -> Counts:
    """Add up the counts of several processes."""
    sums = {name: sum(getattr(own, name) for own in counts) for name in vars(counts[0])}
    return with_changes(counts[0], **sums)


@torch.no_grad()
def for_each_batch(
    model: nn.Module, loader: Iterable[Any], handle: Callable[[Tensor, Any], None]
) -> None:
    """Call `handle(logits, labels)` for every batch, in eval mode, which is then undone. Raises: as `class_logits`."""
    like = first_float(model)
    with eval_mode(model):
        for batch in loader:
            images, labels = _check_batch(batch)
            outputs = model(images.to(like, non_blocking=True))
            handle(class_logits(outputs), labels)


def _check_batch(batch: Any) -> tuple[Tensor, Tensor]:
    given = f"a {type(batch).__name__}"
    if (
        isinstance(batch, tuple | list)
        and len(batch) == 2
        and all(isinstance(part, Tensor) for part in batch)
    ):
        images, labels = batch
        if labels.ndim == 1 and not labels.is_floating_point():
            return images, labels
        given = f"{dtype_name(labels)} labels of shape {tuple(labels.shape)}"
    raise UserError(
        f"a batch of the loader must be (images, labels) with one class number for each image, not {given}; give a "
        "DataLoader of a data set that yields such pairs"
    )


def count_predictions(model: nn.Module, loader: Iterable[Any]) -> PredictionCounts:
    """Count the predictions for `evaluate`. Raises: UserError without a batch, or for labels outside the classes."""
    counts: list[PredictionCounts] = []

    def handle(logits: Tensor, labels: Tensor) -> None:
        if not counts:
            counts.append(PredictionCounts(logits.shape[1]))
        counts[0].add(logits, labels)

    for_each_batch(model, loader, handle)
    if not counts:
        raise UserError("there is nothing to evaluate: the loader yields no batch")
    return counts[0]


def evaluate(model: nn.Module, loader: Iterable[Any]) -> Metrics:
    """Return the accuracy of a classifier: top1 and top5 (%), nll (nats), ece (%, 15 bins), images.

    `loader` yields images and labels; images labelled -1 do not count.

    Raises: UserError when the loader yields no batch, no image has a label, a label is outside the model's classes, or
    the outputs are not logits; NotFinite for NaN or infinite ones.

    >>> model = timm.create_model("cifar_resnet20")
    >>> source = iso.data.open_source("digits", "test").subset(range(20))
    >>> loader = iso.data.eval_loader(source, timm.data.resolve_data_config(model=model))
    >>> sorted(iso.evaluate(model, loader))
    ['ece', 'images', 'nll', 'top1', 'top5']
    """
    return count_predictions(model, loader).metrics()
