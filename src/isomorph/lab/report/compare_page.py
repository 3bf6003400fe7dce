"""The sections of the page of `isomorph compare`: the logs and checkpoints of runs, side by side."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isomorph.analysis import GatingHistory
from isomorph.json_values import JsonObject, flatten, is_number
from isomorph.lab.report import guides
from isomorph.lab.report.charts import (
    Chart,
    Line,
    Panel,
    Paths,
    Points,
    Scatter,
    format_number,
)
from isomorph.lab.report.html import Details, Section
from isomorph.lab.report.page_models import MEASURES
from isomorph.lab.report.run_files import AccuracyPoint, RunLog
from isomorph.terminal_tables import (
    METRIC_FORMATS,
    Row,
    Rows,
    Table,
    chance_difference,
    count_of,
    interval_text,
)


class MeasureHistory(NamedTuple):
    """A measure at the epochs of a run. Shape: epochs (T,), values {layer: (T, heads)}"""

    epochs: Tensor
    values: dict[str, Tensor]


# {measure: {run: MeasureHistory}}
MeasureHistories = Mapping[str, Mapping[str, MeasureHistory]]


def head_range_line(epochs: Tensor, heads: Tensor) -> Line:
    """Return the mean and range of a layer's heads, at the epochs at which any is finite. Shape: (T,), (T, heads)"""
    known = heads.isfinite()
    measured = known.any(1)
    heads = heads[measured].double()
    known = known[measured]
    mean = heads.where(known, 0).sum(1) / known.sum(1)
    low = heads.where(known, torch.inf).amin(1)
    high = heads.where(known, -torch.inf).amax(1)
    return Line(epochs[measured].tolist(), mean.tolist(), low.tolist(), high.tolist())


def _along_panel(title: str, unit: str, epochs: Tensor, layers: Mapping[str, Tensor]) -> Panel:
    lines = {layer: head_range_line(epochs, heads) for layer, heads in layers.items()}
    return Panel(title, "epoch", unit, lines, ordered=True, resolution=1e-3)


def history_tables(histories: MeasureHistories) -> Iterator[Table]:
    """Yield a table for each measure and run: layers down, epochs across, means over heads."""
    for key, runs in histories.items():
        measure = MEASURES[key]
        for run, history in runs.items():
            title = f"{run}: {measure.title.lower()} ({measure.unit})"
            epochs = [f"epoch {epoch:g}" for epoch in history.epochs.tolist()]
            table = [[title, *epochs]]
            for layer, heads in history.values.items():
                means = heads.nanmean(1).tolist()
                table.append([layer, *map(format_number, means)])
            yield table


def histories_json(histories: MeasureHistories) -> JsonObject:
    """Return {measure: {run: {epochs, layers: {layer: a list of heads for each epoch}}}}, NaN where unknown."""
    plain: JsonObject = {}
    for measure, runs in histories.items():
        plain[measure] = {}
        for run, history in runs.items():
            layers = {layer: heads.tolist() for layer, heads in history.values.items()}
            plain[measure][run] = {"epochs": history.epochs.tolist(), "layers": layers}
    return plain


# Longer curves are drawn as means over as many equal parts.
MAX_CURVE_POINTS = 600


# Title, log, key of the y axis, unit.
CURVES = (
    ("Training loss by step", "steps", "loss", "loss"),
    ("Loss by epoch", "epochs", "loss", "loss"),
    ("Top-1", "epochs", "top1", "%"),
    ("Top-1 on training images, as augmented", "epochs", "train_top1", "%"),
    ("NLL on the test set", "epochs", "nll", "nats"),
    ("Reconstruction", "epochs", "reconstruction", "MSE"),
    ("Alignment with the teacher", "epochs", "alignment", "smooth L1"),
    ("Learning rate", "steps", "lr", "rate"),
    ("Images per second", "steps", "images_per_second", "images / s"),
    ("Largest attention logit, maximum over layers", "monitor", "max_logit", "max logit"),
    ("Largest attention weight, maximum over layers", "monitor", "max_attention", "max attention"),
    ("Attention entropy, mean over layers", "monitor", "entropy", "entropy"),
    (
        "Similarity of the branches of pyramids (CKA), mean over layers",
        "monitor",
        "branch_similarity",
        "similarity",
    ),
)


def curve(rows: Rows, x: str, y: str) -> Line | None:
    """Return `y` by `x` where finite, thinned to means; of values by layer the largest of a maximum, else the mean."""

    points = []
    for row in rows:
        position = _logged_number(row, x)
        value = _logged_number(row, y)
        if is_number(position) and is_number(value):
            points.append((float(position), float(value)))
    points.sort()
    if not points:
        return None
    if len(points) > MAX_CURVE_POINTS:
        cuts = [round(i * len(points) / MAX_CURVE_POINTS) for i in range(MAX_CURVE_POINTS + 1)]
        parts = [points[first:last] for first, last in pairwise(cuts)]
        points = [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]
    xs, ys = zip(*points, strict=True)
    return Line(list(xs), list(ys))


def _logged_number(row: Row, key: str) -> Any:
    value = row.get(key)
    if not isinstance(value, Mapping):
        return value
    known = list(filter(is_number, value.values()))
    if not known:
        return None
    if key.startswith("max_"):
        return max(known)
    return fmean(known)


def _learning_curves(logs: Sequence[RunLog]) -> list[Chart]:
    charts: list[Chart] = []
    for title, rows, key, unit in CURVES:
        x = "epoch" if rows == "epochs" else "step"
        lines = {}
        for log in logs:
            line = curve(getattr(log, rows), x, key)
            if line:
                lines[log.name] = line
        if any(len(line.x) > 1 for line in lines.values()):
            charts.append(Panel(title, x, unit, lines))
    return charts


def runs_finding(best: Mapping[str, float | None], images: int | None = None) -> str:
    """Return the best top-1 of the runs, its interval on a number of images, and its lead, or that several reach it."""
    known = [(round(value, 2), name) for name, value in best.items() if value is not None]
    if not known:
        return "No run has measured its top-1."
    known.sort(reverse=True)
    missing = ""
    if len(known) < len(best):
        missing = f" {count_of(len(best) - len(known), 'run')} without a top-1."
    (value, name), *others = known
    ties = sum(other == value for other, _ in known)
    reached = f"{value:.2f} %"
    if images:
        reached += f" (95% interval {interval_text(value, images)})"
    if not others:
        return f"{name} reaches a top-1 of {reached} in its best epoch on the test images.{missing}"
    if ties > 1:
        return f"{ties} of {len(known)} runs reach the best top-1, {reached}.{missing}"
    second, other = others[0]
    lead = f"{reached}, {value - second:.2f} points above {other}"
    if images and value - second < chance_difference((value + second) / 2, images):
        lead += f" (less than chance may do with {images:,} images)"
    return f"{name} reaches the best top-1, {lead}, each in its best epoch on the test images.{missing}"


def _results_table(logs: Sequence[RunLog]) -> Table:
    measured: set[str] = set()
    for log in logs:
        for row in log.epochs:
            measured.update(key for key, value in row.items() if is_number(value))
    keys = [key for key in METRIC_FORMATS if key in measured and key != "images"]
    labels = [METRIC_FORMATS[key][0] for key in keys]
    head = ["", "recipe", "model", "epochs", "best top-1 (%, 95% interval)", *labels, "seconds"]
    return [head, *(_result_row(log, keys) for log in logs)]


def _result_row(log: RunLog, keys: Sequence[str]) -> list[str]:
    recipe = str(log.recipe.get("name", "-"))
    trained = sum(row.get("epoch") != 0 for row in log.epochs)
    epochs = str(trained)
    if not log.recipe.get("iterations"):
        epochs = f"{trained} of {log.recipe.get('epochs', '?')}"
    last: dict[str, float] = {}
    seconds = 0.0
    for row in log.epochs:
        if row.get("epoch") != 0:
            last |= {key: row[key] for key in keys if is_number(row.get(key))}
        if is_number(row.get("seconds")):
            seconds += row["seconds"]
    cells = [METRIC_FORMATS[key][1](last[key]) if key in last else "-" for key in keys]
    return [log.name, recipe, _model_text(log), epochs, _best_text(log), *cells, f"{seconds:,.0f}"]


def _model_text(log: RunLog) -> str:
    model = log.recipe.get("model")
    if not isinstance(model, Mapping):
        return str(model or "-")
    name = str(model.get("name") or model.get("weights") or "-")
    recast = model.get("recast") or {}
    if recast.get("rule"):
        return f"{name}, {recast['rule']}"
    return name


def _best_text(log: RunLog) -> str:
    if log.best_top1 is None:
        return "-"
    if not log.test_images:
        return f"{log.best_top1:.2f}"
    return f"{log.best_top1:.2f} ({interval_text(log.best_top1, log.test_images)})"


def flatten_recipe(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a recipe by dotted name, as JSON text."""
    return {name: json.dumps(value) for name, value in flatten(values).items()}


def centre_paths(centres: Tensor) -> list[list[tuple[float, float]]]:
    """Return the centres of each head at the epochs at which they are finite. Shape: (T, heads, 2)"""
    paths = []
    for head in centres.transpose(0, 1):
        known = head[head.isfinite().all(1)]
        paths.append([(row, column) for row, column in known.tolist()])
    return paths


def _gating_section(gating: Mapping[str, GatingHistory]) -> Iterator[Section]:
    charts = list[Chart]()
    texts = ["At the epochs that were logged; centres from the first (ring) to the last (dot)."]
    has_curves = False
    for run, history in gating.items():
        when = "at the end"
        if len(history.epochs) > 1:
            has_curves = True
            when = "along training"
            epochs = history.epochs
            charts.append(
                _along_panel(f"Gates {when}: {run}", "sigma(gate)", epochs, history.gates)
            )
            charts.append(
                _along_panel(f"Spans {when}: {run}", "1 / locality", epochs, history.spans)
            )
        paths = {name: centre_paths(centres) for name, centres in history.centres.items()}
        charts.append(Paths(f"Centres {when}: {run}", paths))
        lost = 0
        for name, spans in history.spans.items():
            without = spans[-1].isnan() & ~history.gates[name][-1].isnan()
            lost += int(without.sum())
        if lost:
            texts.append(
                f"{run}: heads without a centre at the end (locality not positive), and so "
                f"without a span: {lost}."
            )
    title = "Gates, spans and centres along training" if has_curves else "Centres of attention"
    guide = f"{guides.CENTRES} {guides.RANGE}" if has_curves else guides.CENTRES
    if charts:
        yield Section(title, " ".join(texts), charts=charts, guide=guide)


def _history_section(histories: MeasureHistories, images: str) -> Iterator[Section]:
    charts = []
    for key, runs in histories.items():
        measure = MEASURES[key]
        for run, history in runs.items():
            title = f"{measure.title} along training: {run}"
            charts.append(_along_panel(title, measure.unit, history.epochs, history.values))
    if not charts:
        return
    text = f"At the epochs saved by keep_every in the recipe, on {images}."
    guide = f"{guides.RANGE} {guides.DISTANCE}"
    yield Section("Attention along training", text, charts=charts, guide=guide)


def _accuracy_section(points: Sequence[AccuracyPoint]) -> Iterator[Section]:
    if not points:
        return
    test_sets = _test_sets([(point.data, point.images) for point in points])
    points = [point._replace(data=name) for point, name in zip(points, test_sets, strict=True)]
    by_macs: Points = {}
    by_parameters: Points = {}
    for point in points:
        by_macs.setdefault(point.data, {})[point.name] = (point.macs / 1e9, point.top1)
        by_parameters.setdefault(point.data, {})[point.name] = (point.parameters / 1e6, point.top1)
    charts: list[Chart] = []
    if len(points) > 1:
        charts = [
            Scatter("Top-1 against MACs", "GMACs per image", "top-1 (%)", by_macs),
            Scatter("Top-1 against parameters", "parameters (M)", "top-1 (%)", by_parameters),
        ]
    table = [["", "test set", "top-1 (%)", "GMACs per image", "parameters (M)"]]
    for point in sorted(points, key=lambda point: point.macs):
        macs = format_number(point.macs / 1e9)
        parameters = format_number(point.parameters / 1e6)
        table.append([point.name, point.data, f"{point.top1:.2f}", macs, parameters])
    yield Section("Accuracy and cost", table=table, charts=charts, guide=guides.ACCURACY_COST)


def _test_sets(measured: Sequence[tuple[str, int | None]]) -> list[str]:
    """Return the names of test sets, with the number of images where those of one name differ."""
    counts: dict[str, set[int]] = {}
    for name, images in measured:
        counts.setdefault(name, set())
        if images:
            counts[name].add(images)
    names = []
    for name, images in measured:
        if len(counts[name]) > 1:
            name += f" ({images:,} images)" if images else " (unknown images)"
        names.append(name)
    return names


def _recipe_section(logs: Sequence[RunLog]) -> Iterator[Section]:
    logs = [log for log in logs if log.recipe]
    if len(logs) < 2:
        return
    recipes = [flatten_recipe(log.recipe) for log in logs]
    rows = []
    for name in dict.fromkeys(chain.from_iterable(recipes)):
        values = {recipe.get(name, "null") for recipe in recipes}
        if len(values) > 1:
            rows.append([name, *(recipe.get(name, "-") for recipe in recipes)])
    if not rows:
        yield Section("Recipe differences", finding="The recipes are equal in every field.")
        return
    finding = f"The recipes differ in {count_of(len(rows), 'field')}."
    table = [["field", *(log.name for log in logs)], *rows]
    yield Section("Recipe differences", table=table, finding=finding, guide=guides.RECIPES)


def _results_section(logs: Sequence[RunLog]) -> Section:
    problems: list[str] = []
    for log in logs:
        problems += [f"{log.name}: {problem}." for problem in log.problems]
    details = None
    if problems:
        details = Details("What is missing or damaged", list(dict.fromkeys(problems)))
    best = {log.name: log.best_top1 for log in logs}
    measured = [log for log in logs if log.best_top1 is not None]
    counts = {log.test_images for log in measured}
    images = counts.pop() if len(counts) == 1 else None
    known = [(log.test_set, log.test_images) for log in measured if log.test_set is not None]
    test_sets = dict.fromkeys(_test_sets(known))
    if len(test_sets) > 1:
        names = ", ".join(test_sets)
        finding = f"The runs have different test sets ({names}): their top-1 cannot be compared."
    else:
        finding = runs_finding(best, images)
    return Section(
        "Final results",
        table=_results_table(logs),
        details=details,
        finding=finding,
        guide=guides.RESULTS,
    )


def compare_sections(
    logs: Sequence[RunLog],
    gating: Mapping[str, GatingHistory] | None = None,
    histories: MeasureHistories | None = None,
    images: str = "",
    points: Sequence[AccuracyPoint] = (),
) -> list[Section]:
    """Return the sections of the compare page for some runs.

    `gating` are those of `iso.training.gating_history` by run; `histories` attention measures along training, on images
    that `images` names in words; `points` models by accuracy and cost.

    >>> from pathlib import Path
    >>> for run, lr in (("a", 0.1), ("b", 0.2)):
    ...     Path(run).mkdir()
    ...     _ = Path(run, "recipe.json").write_text('{"optim": {"lr": %g}}' % lr)
    >>> sections = iso.report.compare_sections(iso.report.read_run_logs([Path("a"), Path("b")]))
    >>> sections[-1].title, sections[-1].table
    ('Recipe differences', [['field', 'a', 'b'], ['optim.lr', '0.1', '0.2']])
    """
    sections = []
    if logs:
        sections.append(_results_section(logs))
    sections += _accuracy_section(points)
    charts = _learning_curves(logs)
    if charts:
        text = ""
        if any(max(len(log.steps), len(log.monitor)) > MAX_CURVE_POINTS for log in logs):
            text = f"Logs of more than {MAX_CURVE_POINTS} lines are drawn as means over {MAX_CURVE_POINTS} equal parts."
        sections.append(Section("Learning curves", text, charts=charts, guide=guides.CURVES))
    sections += _gating_section(gating or {})
    sections += _history_section(histories or {}, images)
    sections += _recipe_section(logs)
    return sections
