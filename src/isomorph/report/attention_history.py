"""What attention of kept models is like along their training: a line a layer, by epoch."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isomorph.analysis import attention_entropy, nonlocality
from isomorph.report.charts import Line, Panel, Table, format_number


class AttentionMeasure(NamedTuple):
    """A number for each head of each attention layer: (model, loader) -> {layer: (heads,)}."""

    title: str
    unit: str
    of: Callable[..., dict[str, Tensor]]


MEASURES = {
    "nonlocality": AttentionMeasure("Nonlocality", "steps of the grid", nonlocality),
    "entropy": AttentionMeasure("Attention entropy", "nats", attention_entropy),
}
"""What `isomorph compare --along` knows."""


class MeasureHistory(NamedTuple):
    """A measure along a run. Shape: moments (T,), values {layer: (T, heads)}"""

    moments: Tensor
    values: dict[str, Tensor]


MeasureHistories = Mapping[str, Mapping[str, MeasureHistory]]
"""{measure: {run: Course}}"""


def head_range_line(moments: Tensor, heads: Tensor) -> Line:
    """Mean and range of a layer's heads at the epochs at which any has a value. Shape: (T,), (T, heads)"""
    known = heads.isfinite()
    there = known.any(1)
    heads, known = heads[there].double(), known[there]
    low, high = (heads.where(known, -sign * torch.inf) for sign in (-1, 1))
    mean = heads.where(known, 0).sum(1) / known.sum(1)
    return Line(*(part.tolist() for part in (moments[there], mean, low.amin(1), high.amax(1))))


def history_panels(courses: MeasureHistories) -> list[Panel]:
    """A chart for each measure and run, a line for each layer: the mean over its heads, and their range."""
    return [
        Panel(
            f"{MEASURES[key].title} along training: {run}",
            "epoch",
            MEASURES[key].unit,
            {layer: head_range_line(course.moments, heads) for layer, heads in course.values.items()},
            ordered=True,
        )
        for key, runs in courses.items()
        for run, course in runs.items()
    ]


def history_tables(courses: MeasureHistories) -> list[Table]:
    """A table for each measure and run: layers down, epochs across, means over heads."""
    tables = []
    for key, runs in courses.items():
        for run, course in runs.items():
            head = [f"{run}: {MEASURES[key].title.lower()} ({MEASURES[key].unit})"]
            epochs = [f"epoch {epoch:g}" for epoch in course.moments.tolist()]
            rows = [[layer, *map(format_number, heads.nanmean(1).tolist())] for layer, heads in course.values.items()]
            tables.append([[*head, *epochs], *rows])
    return tables


def histories_json(courses: MeasureHistories) -> dict[str, Any]:
    """The same for machines: {measure: {run: {epochs, layers: {layer: [[a value for each head] for each epoch]}}}}."""

    def plain(course: MeasureHistory) -> dict[str, Any]:
        layers = {
            layer: [[value if value == value else None for value in row] for row in heads.tolist()]
            for layer, heads in course.values.items()
        }
        return {"epochs": course.moments.tolist(), "layers": layers}

    return {key: {run: plain(course) for run, course in runs.items()} for key, runs in courses.items()}
