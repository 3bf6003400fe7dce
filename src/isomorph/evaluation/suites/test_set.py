"""Test sets, and counting predictions for all suites that share the same images in one pass."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isomorph.data.sources import Source, spaced_indices
from isomorph.distributed import ALONE, Runtime
from isomorph.errors import UserError
from isomorph.evaluation.accuracy import MultiLabelCounts, PredictionCounts, for_each_batch, sum_counts


@dataclass(frozen=True)
class Scoring:
    """How a suite scores a model's predictions on the images of a source.

    `labels` holds a class index per image, or several per image padded with -1. `class_indices` are the model's classes
    that the suite uses, in the order of `classes`; None for all. `num_classes` is the number of classes that the model
    must have; None for any.

    Shape: labels (n,) or (n, K)
    """

    name: str
    labels: np.ndarray
    classes: Sequence[str]
    class_indices: np.ndarray | None = None
    num_classes: int | None = None

    def empty_counts(self) -> PredictionCounts | MultiLabelCounts:
        """Return counts of no predictions, of the kind that fits the labels."""
        return MultiLabelCounts() if self.labels.ndim > 1 else PredictionCounts(len(self.classes))

    def select_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of the suite's classes. Shape: (B, num_classes) -> (B, len(classes))"""
        if self.class_indices is None:
            return logits
        return logits[:, torch.as_tensor(self.class_indices, device=logits.device)]


@dataclass(frozen=True)
class TestSet:
    """The images of one or several suites, with the scoring of each suite."""

    __test__ = False  # pytest would collect a class of this name
    source: Source
    scorings: Sequence[Scoring]

    @classmethod
    def from_source(cls, source: Source) -> "TestSet":
        """Return all images of a source, scored by the source's own labels."""
        return cls(source, [Scoring("", source.labels, source.classes)])

    def spaced(self, count: int) -> "TestSet":
        """Return `count` images, as `spaced_indices`, with their scorings. Raises: UserError for a count below 1."""
        indices = spaced_indices(self.source.labels, count)
        return TestSet(self.source.subset(indices), [replace(s, labels=s.labels[indices]) for s in self.scorings])

    @property
    def title(self) -> str:
        """Names of the suites, joined by "+"."""
        return "+".join(scoring.name for scoring in self.scorings)

    def with_index_labels(self) -> Source:
        """Return the images with their index in the source as label."""
        source = copy.copy(self.source)
        source.labels = np.arange(len(source))
        return source


def score_predictions(
    model: nn.Module, loader: Iterable[Any], scorings: Sequence[Scoring], runtime: Runtime = ALONE
) -> list[PredictionCounts | MultiLabelCounts]:
    """Count the predictions of a model for every scoring, in one pass over batches of images and their indices.

    The loader has this process's share of the batches; the counts are those of all processes.

    Raises: UserError when the model has not the number of classes of a scoring.
    """
    counts = [scoring.empty_counts() for scoring in scorings]
    labels = [torch.as_tensor(scoring.labels) for scoring in scorings]

    def add_batch(logits: Tensor, indices: Tensor) -> None:
        for scoring, own_labels, own_counts in zip(scorings, labels, counts, strict=True):
            check_num_classes(logits.shape[1], scoring.num_classes)
            own_counts.add(scoring.select_logits(logits), own_labels[indices])

    for_each_batch(model, loader, add_batch)
    return [sum_counts(list(parts)) for parts in zip(*runtime.gather(counts), strict=True)]


def check_num_classes(num_classes: int | None, expected: int | None) -> None:
    """Raise UserError if a model has not the expected number of classes; None stands for unknown and passes."""
    if num_classes is not None and expected is not None and num_classes != expected:
        larger = " (ImageNet-12k or -21k)" if num_classes > 10_000 else ""
        kind = " (with a background class)" if num_classes == 1001 else larger
        raise UserError(
            f"the model has {num_classes} classes{kind}, these suites are for the {expected} of ImageNet-1k; use a "
            "model with that head, such as timm's models whose names end in in1k"
        )


BatchProgress = Callable[[Iterable[Any], str, int], Iterable[Any]]
"""Iterates over batches and shows progress: (batches, title, number of batches) -> batches."""


def no_progress(batches: Iterable[Any], title: str, total: int) -> Iterable[Any]:
    """Return the batches unchanged: a BatchProgress that shows nothing."""
    return batches
