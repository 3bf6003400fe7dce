"""Test sets, each run through the model once however many suites look at its images."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isomorph.data.sources import Source
from isomorph.errors import UserError
from isomorph.evaluation.accuracy import for_each_batch
from isomorph.evaluation.prediction_counts import MultiLabelCounts, PredictionCounts


@dataclass(frozen=True)
class Scoring:
    """How a suite judges the images of a source.

    `answers` are labels, or several for each image, filled up with -1; `kept` are the model's classes that take part,
    in the order of `classes`, None for all; `outputs` is how many the model must have, None where that is not known.

    Shape: answers (n,) or (n, K)
    """

    name: str
    answers: np.ndarray
    classes: Sequence[str]
    kept: np.ndarray | None = None
    outputs: int | None = None

    def empty_tally(self) -> PredictionCounts | MultiLabelCounts:
        return MultiLabelCounts() if self.answers.ndim > 1 else PredictionCounts(len(self.classes))

    def reduced(self, logits: Tensor) -> Tensor:
        """The logits of the classes that take part. Shape: (B, outputs) -> (B, len(classes))"""
        return logits if self.kept is None else logits[:, torch.as_tensor(self.kept, device=logits.device)]


@dataclass(frozen=True)
class TestSet:
    """The images of one or several suites, and how each judges them."""

    __test__ = False  # no class of tests, whatever pytest makes of its name
    source: Source
    views: Sequence[Scoring]

    @property
    def title(self) -> str:
        return "+".join(view.name for view in self.views)

    def numbered(self) -> Source:
        """The images, each with its place in the source for a label."""
        source = copy.copy(self.source)
        source.labels = np.arange(len(source))
        return source


def tally_predictions(model: nn.Module, loader: Iterable[Any], views: Sequence[Scoring]) -> list[PredictionCounts | MultiLabelCounts]:
    """What every view counts, in one pass over batches of images and their places in the source.

    Raises: UserError when the loader gives no batch, or the model another number of classes than a view is for.
    """
    tallies = [view.empty_tally() for view in views]
    answers = [torch.as_tensor(view.answers) for view in views]

    def take(logits: Tensor, places: Tensor) -> None:
        for view, right, tally in zip(views, answers, tallies, strict=True):
            check_num_classes(logits.shape[1], view.outputs)
            tally.add(view.reduced(logits), right[places])

    for_each_batch(model, loader, take)
    return tallies


def whole(source: Source) -> TestSet:
    """All images of a source, judged by its own labels."""
    return TestSet(source, [Scoring("", source.labels, source.classes)])


def check_num_classes(known: int | None, expected: int | None) -> None:
    """Raises: UserError for another number of classes than ImageNet-1k's; where one is not known, all is well."""
    if known is not None and expected is not None and known != expected:
        known_as = {1001: " (with a background class)"}.get(known, " (ImageNet-12k or -21k)" if known > 10_000 else "")
        raise UserError(
            f"the model knows {known} classes{known_as}, these suites are for the {expected} of ImageNet-1k; take a "
            "model with that head, like those of timm whose names end in in1k"
        )


BatchProgress = Callable[[Iterable[Any], str, int], Iterable[Any]]
"""Passes batches on and shows how many of so many are through, under a title."""


def no_progress(batches: Iterable[Any], title: str, total: int) -> Iterable[Any]:
    return batches
