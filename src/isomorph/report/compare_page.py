"""The sections of the page of `isomorph compare`: the logs and checkpoints of runs, side by side."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from isomorph.analysis import GatingHistory
from isomorph.errors import UserError
from isomorph.report import guides
from isomorph.report.accuracy_cost import AccuracyPoint, accuracy_charts, points_table
from isomorph.report.attention_history import MeasureHistories, head_range_line, history_panels
from isomorph.report.charts import Chart, Line, Panel, Paths, Table, is_number
from isomorph.report.findings import accuracy_cost_finding, count_noun, gates_moved, runs_finding
from isomorph.report.html import Details, Section
from isomorph.terminal_tables import METRIC_FORMATS

MAX_CURVE_POINTS = 600
"""Longer curves are drawn as means over as many equal parts."""

LogRows = list[dict[str, Any]]


@dataclass(frozen=True)
class RunLog:
    """The recipe and logs of a run, and a line for each file that is missing or damaged."""

    name: str
    recipe: Mapping[str, Any]
    epochs: LogRows = field(repr=False)
    steps: LogRows = field(repr=False)
    monitor: LogRows = field(repr=False)
    problems: list[str] = field(default_factory=list)


def _read_jsonl(path: Path) -> tuple[LogRows, str]:
    """Return the readable rows of a log, and a sentence on what is missing or damaged, empty for nothing."""
    if not path.is_file():
        return [], f"no {path.name}"
    rows: LogRows = []
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        return [], f"{path.name} cannot be read ({error.strerror})"
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        rows += [row] if isinstance(row, dict) else []
    damaged = len(lines) - len(rows)
    return rows, f"{damaged} of {len(lines)} lines of {path.name} cannot be read" if damaged else ""


def _read_run(folder: Path) -> RunLog:
    if not folder.is_dir():
        what = "it is a file" if folder.exists() else "it does not exist"
        raise UserError(f"{folder} is not the folder of a run: {what}")
    (epochs, a), (steps, b), (monitor, c) = (
        _read_jsonl(folder / f"{name}.jsonl") for name in ("log", "steps", "monitor")
    )
    recipe: Any = {}
    problems = [a, b, c if monitor else ""]
    try:
        recipe = json.loads((folder / "recipe.json").read_text())
    except FileNotFoundError:
        problems.append("no recipe.json")
    except (OSError, ValueError, RecursionError):
        problems.append("recipe.json cannot be read")
    recipe = recipe if isinstance(recipe, dict) else {}
    if not (epochs or steps or recipe):
        raise UserError(
            f"{folder} is not the folder of a run: it has no readable log.jsonl, steps.jsonl or recipe.json"
        )
    return RunLog(folder.name or str(folder), recipe, epochs, steps, monitor, [line for line in problems if line])


def read_run_logs(folders: Sequence[Path]) -> list[RunLog]:
    """Read the recipes and logs of runs, finished or not; runs of the same name are named by their whole path.

    >>> from pathlib import Path
    >>> Path("run").mkdir()
    >>> _ = Path("run/log.jsonl").write_text('{"epoch": 1, "loss": 2.3, "top1": 12.5}')
    >>> iso.report.read_run_logs([Path("run")])[0].epochs
    [{'epoch': 1, 'loss': 2.3, 'top1': 12.5}]

    Raises: UserError for a path that is not the folder of a run, or is given twice.
    """
    logs = [_read_run(folder.resolve() if folder.name in ("", "..") else folder) for folder in folders]
    names = [log.name for log in logs]
    unique = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]
    if len(set(unique)) < len(unique):
        raise UserError("a run is given twice; give each folder once")
    return [replace(log, name=name) for name, log in zip(unique, logs, strict=True)]


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
    ("Rotation of pyramid weights per step (radians), mean over layers", "angle", fmean),
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


def _recipe_group(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a group of fields of a recipe, empty where there is none."""
    group = values.get(name)
    return group if isinstance(group, Mapping) else {}


def best_top1(log: RunLog) -> float | None:
    """Return the highest top-1 of a run, None where none was measured."""
    return max((row["top1"] for row in log.epochs if is_number(row.get("top1"))), default=None)


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
        epochs = f"{len(log.epochs)} of {log.recipe.get('epochs', '?')}"
        model = _recipe_group(log.recipe, "model")
        rule = _recipe_group(model, "recast").get("rule")
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
    """Return charts of gates, spans and centres along each run, a line or colour for each layer.

    A run with one saved model has a chart of its centres only.
    """
    charts: list[Chart] = []
    for run, history in gating.items():
        moving = len(history.epochs) > 1
        for title, unit, values in (("Gates", "sigma(gate)", history.gates), ("Spans", "1 / locality", history.spans)):
            lines = {layer: head_range_line(history.epochs, heads) for layer, heads in values.items()}
            panel = Panel(f"{title} along training: {run}", "epoch", unit, lines, ordered=True, resolution=1e-3)
            charts += [panel] * moving
        title = f"Centres {'along training' if moving else 'at the end'}: {run}"
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
    if any(len(history.epochs) > 1 for history in gating.values()):
        text = "At the epochs saved by keep_every in the recipe; centres from the first (ring) to the last (dot)."
        guide = f"{guides.CENTRES} {guides.RANGE}"
    else:
        text = (
            "These runs saved only their last model; with keep_every in the recipe, gates, spans and centres are drawn "
            "along training."
        )
        guide = guides.CENTRES
    centreless = [f"{run}: {lost}" for run, history in gating.items() if (lost := _centreless_text(history))]
    title, finding = "Gates, spans and centres along training", gates_moved(gating)
    return [Section(title, " ".join([text, *centreless]), charts=charts, finding=finding, guide=guide)]


def _history_section(histories: MeasureHistories, images: str) -> list[Section]:
    """Return the section of attention measures along training; none without any."""
    charts = history_panels(histories)
    text = f"At the epochs saved by keep_every in the recipe, on {images}."
    guide = f"{guides.RANGE} {guides.MEASURES}"
    return [Section("Attention along training", text, charts=charts, guide=guide)] if charts else []


def _accuracy_section(points: Sequence[AccuracyPoint]) -> list[Section]:
    """Return the section of accuracy against cost; none for fewer than two models."""
    charts = accuracy_charts(points)
    finding = accuracy_cost_finding(points)
    section = Section("Accuracy and cost", table=points_table(points), finding=finding, guide=guides.ACCURACY_COST)
    return [replace(section, charts=charts)] if charts else []


def _recipe_section(logs: Sequence[RunLog]) -> list[Section]:
    """Return the section of differing recipe fields; none for a single run."""
    if len(logs) < 2:
        return []
    differences = _recipe_differences(logs)
    if len(differences) == 1:
        return [Section("Recipe differences", finding="The recipes are equal in every field.")]
    finding = f"The recipes differ in {count_noun(len(differences) - 1, 'field')}."
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
