"""The sections of the page of `isomorph compare`: the logs and checkpoints of runs, side by side."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isomorph.analysis import GatingHistory
from isomorph.report import guides
from isomorph.report.charts import Chart, Line, Panel, Paths, Scatter, Table, format_number, is_number
from isomorph.report.findings import accuracy_cost_finding, gates_moved, runs_finding
from isomorph.report.html import Details, Section
from isomorph.report.page_models import MEASURES
from isomorph.report.run_files import AccuracyPoint, LogRows, RunLog, best_top1
from isomorph.terminal_tables import METRIC_FORMATS, count_of


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


def _along_panel(title: str, unit: str, epochs: Tensor, layers: Mapping[str, Tensor]) -> Panel:
    """Return a chart of a number of each head along training: a line for each layer, with the range of its heads."""
    lines = {layer: head_range_line(epochs, heads) for layer, heads in layers.items()}
    return Panel(title, "epoch", unit, lines, ordered=True, resolution=1e-3)


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
    return {
        key: {
            run: {
                "epochs": history.epochs.tolist(),
                "layers": {
                    layer: [[None if value != value else value for value in row] for row in heads.tolist()]
                    for layer, heads in history.values.items()
                },
            }
            for run, history in runs.items()
        }
        for key, runs in histories.items()
    }


MAX_CURVE_POINTS = 600
"""Longer curves are drawn as means over as many equal parts."""


def curve(rows: LogRows, x: str, y: str) -> Line | None:
    """Return the values of `y` by `x` where both are finite numbers, thinned to means; None without any."""
    points = sorted((float(row[x]), float(row[y])) for row in rows if is_number(row.get(x)) and is_number(row.get(y)))
    if len(points) > MAX_CURVE_POINTS:
        cuts = [round(i * len(points) / MAX_CURVE_POINTS) for i in range(MAX_CURVE_POINTS + 1)]
        parts = [points[a:b] for a, b in pairwise(cuts)]
        points = [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]
    return Line(*map(list, zip(*points, strict=True))) if points else None


def _monitor_rows(log: RunLog, key: str, reduce: Any) -> LogRows:
    """Return a measure of the monitor by step, reduced over layers (max or mean)."""
    rows = []
    for row in log.monitor:
        values = [v for v in row[key].values() if is_number(v)] if isinstance(row.get(key), dict) else []
        rows += [{"step": row.get("step"), key: reduce(values)}] if values else []
    return rows


CURVES = (
    ("Training loss by step", "steps", "step", "loss", "loss"),
    ("Loss by epoch", "epochs", "epoch", "loss", "loss"),
    ("Top-1", "epochs", "epoch", "top1", "%"),
    ("Top-1 on training images, as augmented", "epochs", "epoch", "train_top1", "%"),
    ("NLL on the test set", "epochs", "epoch", "nll", "nats"),
    ("Reconstruction", "epochs", "epoch", "reconstruction", "MSE"),
    ("Alignment with the teacher", "epochs", "epoch", "alignment", "smooth L1"),
    ("Learning rate", "steps", "step", "lr", "rate"),
    ("Images per second", "steps", "step", "images_per_second", "images / s"),
)
"""Title, log, keys of the x and y axes, unit."""

MONITOR_CURVES = (
    ("Largest attention logit, maximum over layers", "max_logit", max),
    ("Largest attention weight, maximum over layers", "max_attention", max),
    ("Attention entropy, mean over layers", "entropy", fmean),
    ("Similarity of the branches of pyramids (CKA), mean over layers", "branch_similarity", fmean),
)
"""Title, key of the monitor's log, reduction over layers."""


def _learning_curves(logs: Sequence[RunLog]) -> list[Chart]:
    """Return a chart of each logged value, one line for each run; values logged only once are in the table."""
    curves = [
        (title, x, unit, {log.name: curve(getattr(log, rows), x, y) for log in logs})
        for title, rows, x, y, unit in CURVES
    ]
    for title, key, reduce in MONITOR_CURVES:
        lines = {log.name: curve(_monitor_rows(log, key, reduce), "step", key) for log in logs}
        curves.append((title, "step", key.replace("_", " "), lines))
    charts: list[Chart] = []
    for title, x, unit, lines in curves:
        drawn = {name: line for name, line in lines.items() if line}
        if any(len(line.x) > 1 for line in drawn.values()):
            charts.append(Panel(title, x, unit, drawn))
    return charts


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return a group of fields of a recipe, empty for anything else: the file may be damaged."""
    return value if isinstance(value, Mapping) else {}


def _results_table(logs: Sequence[RunLog]) -> Table:
    """Return a table of recipe, model, epochs, best top-1, and the last value of each metric."""
    keys = [
        key
        for key in METRIC_FORMATS
        if key != "images" and any(is_number(r.get(key)) for log in logs for r in log.epochs)
    ]
    rows = []
    for log in logs:
        last = {key: row[key] for row in log.epochs for key in keys if is_number(row.get(key))}
        top = best_top1(log)
        seconds = sum(row["seconds"] for row in log.epochs if is_number(row.get("seconds")))
        epochs = f"{sum(row.get('epoch') != 0 for row in log.epochs)} of {log.recipe.get('epochs', '?')}"
        model = _mapping(log.recipe.get("model"))
        rule = _mapping(model.get("recast")).get("rule")
        recipe = [str(log.recipe.get("name", "-")), str(model.get("name", "-")) + f", {rule}" * bool(rule)]
        cells = [METRIC_FORMATS[key][1](last[key]) if key in last else "-" for key in keys]
        rows.append([log.name, *recipe, epochs, "-" if top is None else f"{top:.2f}", *cells, f"{seconds:,.0f}"])
    labels = [METRIC_FORMATS[key][0] for key in keys]
    return [["", "recipe", "model", "epochs", "best top-1 (%)", *labels, "seconds"], *rows]


def flatten_recipe(values: Any, name: str = "") -> dict[str, str]:
    """Return the fields of a recipe by dotted name, as JSON text."""
    if isinstance(values, Mapping) and values:
        return {
            dotted: text
            for key, value in values.items()
            for dotted, text in flatten_recipe(value, f"{name}.{key}" if name else str(key)).items()
        }
    return {name: json.dumps(values)}


def _recipe_differences(logs: Sequence[RunLog]) -> Table:
    """Return a table with a row for each field in which the recipes differ; a missing field is equal to null."""
    recipes = [flatten_recipe(log.recipe) if log.recipe else {} for log in logs]
    names = list(dict.fromkeys(name for recipe in recipes for name in recipe))
    rows = [
        [name, *(recipe.get(name, "-") for recipe in recipes)]
        for name in names
        if len({recipe.get(name, "null") for recipe in recipes}) > 1
    ]
    return [["field", *(log.name for log in logs)], *rows]


def _gating_charts(gating: Mapping[str, GatingHistory]) -> list[Chart]:
    """Return charts of gates, spans and centres along each run; of a run with one saved model, its centres only."""
    charts: list[Chart] = []
    for run, history in gating.items():
        title = f"Centres at the end: {run}"
        if len(history.epochs) > 1:
            title = f"Centres along training: {run}"
            for what, unit, values in (
                ("Gates", "sigma(gate)", history.gates),
                ("Spans", "1 / locality", history.spans),
            ):
                charts.append(_along_panel(f"{what} along training: {run}", unit, history.epochs, values))
        charts.append(Paths(title, {name: centre_paths(centres) for name, centres in history.centres.items()}))
    return charts


def centre_paths(centres: Tensor) -> list[list[tuple[float, float]]]:
    """Return the centres of each head at the epochs at which they are finite. Shape: (T, heads, 2)"""
    heads = (head[head.isfinite().all(1)].tolist() for head in centres.transpose(0, 1))
    return [[(row, column) for row, column in path] for path in heads]


def _centreless_text(history: GatingHistory) -> str:
    """Return a sentence on the heads that have no centre at the end; empty where all have one."""
    count = sum(
        int((spans[-1].isnan() & ~history.gates[name][-1].isnan()).sum()) for name, spans in history.spans.items()
    )
    return (
        f"heads without a centre at the end (locality not positive), and so without a span: {count}." if count else ""
    )


def _gating_section(gating: Mapping[str, GatingHistory]) -> list[Section]:
    """Return the section of gates, spans and centres; none for runs without gated layers."""
    charts = _gating_charts(gating)
    if not charts:
        return []
    text = "Before training and after every epoch; centres from the first (ring) to the last (dot)."
    guide = f"{guides.CENTRES} {guides.RANGE}"
    centreless = [f"{run}: {lost}" for run, history in gating.items() if (lost := _centreless_text(history))]
    title, finding = "Gates, spans and centres along training", gates_moved(gating)
    return [Section(title, " ".join([text, *centreless]), charts=charts, finding=finding, guide=guide)]


def _history_section(histories: MeasureHistories, images: str) -> list[Section]:
    """Return the section of attention measures along training, a chart for each measure and run; none without any."""
    charts = [
        _along_panel(f"{MEASURES[key].title} along training: {run}", MEASURES[key].unit, history.epochs, history.values)
        for key, runs in histories.items()
        for run, history in runs.items()
    ]
    text = f"At the epochs saved by keep_every in the recipe, on {images}."
    guide = f"{guides.RANGE} {guides.MEASURES}"
    return [Section("Attention along training", text, charts=charts, guide=guide)] if charts else []


def _accuracy_section(points: Sequence[AccuracyPoint]) -> list[Section]:
    """Return the section of top-1 against MACs and parameters, coloured by test set; none for fewer than two models."""
    if len(points) < 2:
        return []
    costs = {"MACs": ("GMACs per image", "macs", 1e9), "parameters": ("parameters (M)", "parameters", 1e6)}
    charts, data_sets = [], dict.fromkeys(p.data for p in points)
    for title, (label, cost, scale) in costs.items():
        series = {
            data: {p.name: (getattr(p, cost) / scale, p.top1) for p in points if p.data == data} for data in data_sets
        }
        charts.append(Scatter(f"Top-1 against {title}", label, "top-1 (%)", series))
    rows = [
        [p.name, p.data, f"{p.top1:.2f}", format_number(p.macs / 1e9), format_number(p.parameters / 1e6)]
        for p in sorted(points, key=lambda point: point.macs)
    ]
    table = [["", "test set", "top-1 (%)", *(label for label, _, _ in costs.values())], *rows]
    finding = accuracy_cost_finding(points)
    return [Section("Accuracy and cost", table=table, charts=charts, finding=finding, guide=guides.ACCURACY_COST)]


def _recipe_section(logs: Sequence[RunLog]) -> list[Section]:
    """Return the section of differing recipe fields; none for a single run."""
    if len(logs) < 2:
        return []
    differences = _recipe_differences(logs)
    if len(differences) == 1:
        return [Section("Recipe differences", finding="The recipes are equal in every field.")]
    finding = f"The recipes differ in {count_of(len(differences) - 1, 'field')}."
    return [Section("Recipe differences", table=differences, finding=finding, guide=guides.RECIPES)]


def compare_sections(
    logs: Sequence[RunLog],
    gating: Mapping[str, GatingHistory] | None = None,
    histories: MeasureHistories | None = None,
    images: str = "",
    points: Sequence[AccuracyPoint] = (),
) -> list[Section]:
    """Return the sections of the compare page for some runs.

    `gating` are gates, spans and centres along the runs with gated layers (`iso.training.gating_history`); `histories`
    are attention measures along training, on the images that `images` names in words; `points` are models by accuracy
    and cost.

    >>> from pathlib import Path
    >>> for run, lr in (("a", 0.1), ("b", 0.2)):
    ...     Path(run).mkdir()
    ...     _ = Path(run, "recipe.json").write_text('{"optim": {"lr": %g}}' % lr)
    >>> sections = iso.report.compare_sections(iso.report.read_run_logs([Path("a"), Path("b")]))
    >>> sections[-1].title, sections[-1].table
    ('Recipe differences', [['field', 'a', 'b'], ['optim.lr', '0.1', '0.2']])
    """
    problems = list(dict.fromkeys(f"{log.name}: {problem}." for log in logs for problem in log.problems))
    details = Details("Missing or damaged files", problems) if problems else None
    finding = runs_finding({log.name: best_top1(log) for log in logs})
    results = Section("Final results", table=_results_table(logs), details=details, finding=finding)
    sections = [replace(results, guide=guides.RESULTS)] if logs else []
    sections += _accuracy_section(points)
    if charts := _learning_curves(logs):
        thinned = any(len(log.steps) > MAX_CURVE_POINTS for log in logs)
        text = f"Logs of more than {MAX_CURVE_POINTS} lines are drawn as means over {MAX_CURVE_POINTS} equal parts."
        guide = guides.CURVES
        sections.append(Section("Learning curves", text if thinned else "", charts=charts, guide=guide))
    sections += _gating_section(gating or {})
    sections += _history_section(histories or {}, images)
    sections += _recipe_section(logs)
    return sections
