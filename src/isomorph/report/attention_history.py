"""Charts and tables of attention along training: a line for each layer, by epoch."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isomorph.analysis import attention_entropy, nonlocality
from isomorph.report.charts import Line, Panel, Table, format_number


class AttentionMeasure(NamedTuple):
    """A number for each head of each attention layer: `of(model, loader)` returns {layer: (heads,)}."""

    title: str
    unit: str
    of: Callable[..., dict[str, Tensor]]


MEASURES = {
    "nonlocality": AttentionMeasure("Nonlocality", "grid steps", nonlocality),
    "entropy": AttentionMeasure("Attention entropy", "nats", attention_entropy),
}
"""Values of `isomorph compare --along`."""


class MeasureHistory(NamedTuple):
    """A measure at the epochs of a run. Shape: epochs (T,), values {layer: (T, heads)}"""

    epochs: Tensor
    values: dict[str, Tensor]


MeasureHistories = Mapping[str, Mapping[str, MeasureHistory]]
"""{measure: {run: MeasureHistory}}"""


def head_range_line(epochs: Tensor, heads: Tensor) -> Line:
    """Return the mean and range of a layer's heads, at the epochs at which any is finite. Shape: (T,), (T, heads)"""
    known = heads.isfinite()
    measured = known.any(1)
    heads, known = heads[measured].double(), known[measured]
    low, high = (heads.where(known, -sign * torch.inf) for sign in (-1, 1))
    mean = heads.where(known, 0).sum(1) / known.sum(1)
    return Line(*(values.tolist() for values in (epochs[measured], mean, low.amin(1), high.amax(1))))


def history_panels(histories: MeasureHistories) -> list[Panel]:
    """Return a chart for each measure and run: a line for each layer, the mean over its heads, with their range."""
    return [
        Panel(
            f"{MEASURES[key].title} along training: {run}",
            "epoch",
            MEASURES[key].unit,
            {layer: head_range_line(history.epochs, heads) for layer, heads in history.values.items()},
            ordered=True,
            resolution=1e-3,
        )
        for key, runs in histories.items()
        for run, history in runs.items()
    ]


def history_tables(histories: MeasureHistories) -> list[Table]:
    """Return a table for each measure and run: layers down, epochs across, means over heads."""
    tables = []
    for key, runs in histories.items():
        for run, history in runs.items():
            head = [f"{run}: {MEASURES[key].title.lower()} ({MEASURES[key].unit})"]
            epochs = [f"epoch {epoch:g}" for epoch in history.epochs.tolist()]
            rows = [[layer, *map(format_number, heads.nanmean(1).tolist())] for layer, heads in history.values.items()]
            tables.append([[*head, *epochs], *rows])
    return tables


def histories_json(histories: MeasureHistories) -> dict[str, Any]:
    """Return {measure: {run: {epochs, layers: {layer: a list of heads for each epoch}}}}, None for NaN."""
    return {key: {run: _history_json(history) for run, history in runs.items()} for key, runs in histories.items()}


def _history_json(history: MeasureHistory) -> dict[str, Any]:
    layers = {
        layer: [[None if value != value else value for value in row] for row in heads.tolist()]
        for layer, heads in history.values.items()
    }
    return {"epochs": history.epochs.tolist(), "layers": layers}
