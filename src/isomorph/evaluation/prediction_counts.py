"""Metrics counted batch by batch: what is kept does not grow with the number of images."""

from functools import reduce

import torch
from torch import Tensor

from isomorph.errors import UserError

_ECE_BINS = 15


class PredictionCounts:
    """Counts of a classifier's answers, from which its metrics follow; those of several processes add up.

    ECE = sum over bins of |correct - confidence| / images, with bins ((m - 1) / 15, m / 15]

    Shape: seen, right (num_classes,) by class of the label; bins (3, 15): images, summed confidence, right ones
    Source: Guo et al. (2017), eq. 3; torchmetrics gives a confidence of exactly 1 a bin of its own
    """

    def __init__(self, num_classes: int) -> None:
        self.seen = torch.zeros(num_classes, dtype=torch.int64)
        self.right, self.near = torch.zeros_like(self.seen), torch.zeros_like(self.seen)
        self.bins = torch.zeros(3, _ECE_BINS, dtype=torch.float64)
        self.nll = torch.zeros((), dtype=torch.float64)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Takes a batch; images with label -1 do not count.

        Shape: logits (B, num_classes), labels (B,)
        Raises: UserError when a label is none of the model's classes.
        """
        _check_labels(labels, logits.shape[1])
        real = (labels >= 0).to(logits.device)
        logits, labels = logits[real].float(), labels.to(logits.device)[real]
        ranked = logits.topk(min(5, logits.shape[1])).indices.eq(labels[:, None])  # (B, 5)
        log_p = logits.log_softmax(-1)
        nll, confidence = -log_p.gather(1, labels[:, None])[:, 0], log_p.amax(-1).exp()
        facts = torch.stack([ranked[:, 0].float(), ranked.any(1).float(), nll, confidence]).cpu().double()
        self.count(labels.cpu(), *facts)

    def count(self, labels: Tensor, right: Tensor, near: Tensor, nll: Tensor, confidence: Tensor) -> None:
        """Takes facts of single images: whether the top-1 and the top-5 are right, loss, confidence. Shape: (B,)"""
        for total, facts in ((self.seen, torch.ones_like(right)), (self.right, right), (self.near, near)):
            total.index_add_(0, labels, facts.long())
        edges = torch.linspace(0, 1, _ECE_BINS + 1, dtype=torch.float64)
        place = (torch.bucketize(confidence, edges) - 1).clamp(0, _ECE_BINS - 1)
        self.bins.index_add_(1, place, torch.stack([torch.ones_like(confidence), confidence, right]))
        self.nll += nll.sum()

    def __add__(self, other: "PredictionCounts") -> "PredictionCounts":
        both = PredictionCounts(len(self.seen))
        for name in vars(both):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        return both

    def metrics(self) -> dict[str, float]:
        """top1 and top5 (%), nll (nats), ece (%), images. Raises: UserError when no image was counted."""
        images = int(self.seen.sum())
        if not images:
            raise UserError("there is nothing to evaluate: no image has a label")
        _, confidence, right = self.bins
        return {
            "top1": 100 * self.right.sum().item() / images,
            "top5": 100 * self.near.sum().item() / images,
            "nll": self.nll.item() / images,
            "ece": 100 * (right - confidence).abs().sum().item() / images,
            "images": images,
        }


class MultiLabelCounts:
    """Counts of answers to images that have several right labels, or none: then they do not count.

    Source: Beyer et al. (2020), ReaL accuracy: right if the top-1 is among the image's labels
    """

    def __init__(self) -> None:
        self.images = self.right = 0

    def add(self, logits: Tensor, answers: Tensor) -> None:
        """Takes a batch. Shape: logits (B, num_classes), answers (B, K) filled up with -1"""
        answers = answers.to(logits.device)
        labelled = (answers >= 0).any(1)
        right = (answers == logits.argmax(1, keepdim=True)).any(1) & labelled
        counted = torch.stack([labelled.sum(), right.sum()]).tolist()
        self.images, self.right = self.images + counted[0], self.right + counted[1]

    def metrics(self) -> dict[str, float]:
        """top1 (%), images. Raises: UserError when no image was counted."""
        if not self.images:
            raise UserError("there is nothing to evaluate: no image has a label")
        return {"top1": 100 * self.right / self.images, "images": self.images}


def _check_labels(labels: Tensor, num_classes: int) -> None:
    """Raises: UserError for labels beyond the model's classes."""
    if len(labels) and labels.max() >= num_classes:
        raise UserError(
            f"the data has class {int(labels.max())}, but the model knows {num_classes} classes; "
            "give it the right number (model.num_classes)"
        )


def sum_counts(tallies: list[PredictionCounts]) -> PredictionCounts:
    """One tally of several."""
    return reduce(PredictionCounts.__add__, tallies)
