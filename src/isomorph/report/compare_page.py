"""`isomorph compare` as a page: what runs left in their folders, side by side."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from isomorph.analysis import Trajectory
from isomorph.errors import UserError
from isomorph.report.accuracy_cost import AccuracyPoint, accuracy_charts, points_table
from isomorph.report.attention_history import MeasureHistories, head_range_line, history_panels
from isomorph.report.charts import Chart, Line, Panel, Paths, Table, is_number
from isomorph.report.html import Details, Section
from isomorph.report.terminal_tables import METRIC_FORMATS

MAX_CURVE_POINTS = 600
"""Points of a curve that are drawn; of longer logs, means over as many equal parts."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class RunLog:
    """What a run left: recipe, rows of its logs, and a line for each thing that is missing or cut short."""

    name: str
    recipe: Mapping[str, Any]
    epochs: Rows = field(repr=False)
    steps: Rows = field(repr=False)
    monitor: Rows = field(repr=False)
    problems: list[str] = field(default_factory=list)


def read_rows(path: Path) -> tuple[Rows, str]:
    """The rows of a log that are whole, and a line where it is missing or some are not."""
    if not path.is_file():
        return [], f"no {path.name}"
    rows: Rows = []
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
    lost = len(lines) - len(rows)
    return rows, f"{lost} of {len(lines)} lines of {path.name} cannot be read" if lost else ""


def _read_run(folder: Path) -> RunLog:
    """Reads a run's folder, however far the run came. Raises: UserError when it is no folder of a run."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder of a run")
    (epochs, a), (steps, b), (monitor, c) = (
        read_rows(folder / f"{name}.jsonl") for name in ("log", "steps", "monitor")
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
        raise UserError(f"{folder} is no folder of a run: it has no log.jsonl, steps.jsonl or recipe.json to read")
    return RunLog(
        folder.name or str(folder), recipe, epochs, steps, monitor, [problem for problem in problems if problem]
    )


def read_run_logs(folders: Sequence[Path]) -> list[RunLog]:
    """Reads several; names that are alike become whole paths. Raises: UserError as `_read_run` does."""
    logs = [_read_run(folder.resolve() if folder.name in ("", "..") else folder) for folder in folders]
    names = [log.name for log in logs]
    whole = [log.name if names.count(log.name) == 1 else str(folder) for log, folder in zip(logs, folders, strict=True)]
    if len(set(whole)) < len(whole):
        raise UserError("a run is named twice; give each once")
    return [
        RunLog(name, *(getattr(log, key) for key in ("recipe", "epochs", "steps", "monitor", "problems")))
        for name, log in zip(whole, logs, strict=True)
    ]


def curve(rows: Rows, x: str, y: str) -> Line | None:
    """The values of `y` along `x` where both are finite numbers, thinned to means; None without any."""
    points = sorted((float(row[x]), float(row[y])) for row in rows if is_number(row.get(x)) and is_number(row.get(y)))
    if len(points) > MAX_CURVE_POINTS:
        cuts = [round(i * len(points) / MAX_CURVE_POINTS) for i in range(MAX_CURVE_POINTS + 1)]
        parts = [points[a:b] for a, b in pairwise(cuts)]
        points = [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]
    return Line(*map(list, zip(*points, strict=True))) if points else None


def peaks(log: RunLog, key: str, pick: Any) -> Rows:
    """What the attention monitor saw, one number a step: `pick` (max, mean) over layers."""
    rows = []
    for row in log.monitor:
        values = [v for v in row[key].values() if is_number(v)] if isinstance(row.get(key), dict) else []
        rows += [{"step": row.get("step"), key: pick(values)}] if values else []
    return rows


CURVES = (
    ("Training loss by step", "steps", "step", "loss", "loss"),
    ("Loss by epoch", "epochs", "epoch", "loss", "loss"),
    ("Top-1", "epochs", "epoch", "top1", "%"),
    ("NLL on the test set", "epochs", "epoch", "nll", "nats"),
    ("Reconstruction", "epochs", "epoch", "reconstruction", "MSE"),
    ("Alignment with the teacher", "epochs", "epoch", "alignment", "smooth L1"),
    ("Learning rate", "steps", "step", "lr", "rate"),
    ("Images a second", "steps", "step", "images_per_second", "images / s"),
)
"""Title, log, what is along the axis, what is up it, unit."""


def _run_charts(logs: Sequence[RunLog]) -> list[Chart]:
    """The curves that the logs hold, one line a run."""
    wanted = [
        (title, x, unit, {log.name: curve(getattr(log, rows), x, y) for log in logs})
        for title, rows, x, y, unit in CURVES
    ]
    for title, key, pick in (
        ("Largest attention logit, worst layer", "max_logit", max),
        ("Largest attention, worst layer", "max_attention", max),
        ("Attention entropy, mean over layers", "entropy", fmean),
    ):
        wanted.append(
            (
                title,
                "step",
                key.replace("_", " "),
                {log.name: curve(peaks(log, key, pick), "step", key) for log in logs},
            )
        )
    charts: list[Chart] = []
    for title, x, unit, lines in wanted:
        found = {name: line for name, line in lines.items() if line}
        moves = any(len(line.x) > 1 for line in found.values())  # one epoch is a row of the table
        charts += [Panel(title, x, unit, found)] if moves else []
    return charts


def _group_of(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A group of fields of a recipe, empty where there is none."""
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def best_top1(log: RunLog) -> float | None:
    """The highest top-1 of a run; None where none was measured."""
    return max((row["top1"] for row in log.epochs if is_number(row.get("top1"))), default=None)


def _final_table(logs: Sequence[RunLog]) -> Table:
    """Recipe and model, epochs done, best top-1, and what the last evaluated epoch measured."""
    keys = [
        k for k in METRIC_FORMATS if k != "images" and any(is_number(row.get(k)) for log in logs for row in log.epochs)
    ]
    rows = []
    for log in logs:
        last = {k: row[k] for row in log.epochs for k in keys if is_number(row.get(k))}
        top = best_top1(log)
        seconds = sum(row["seconds"] for row in log.epochs if is_number(row.get("seconds")))
        done = f"{len(log.epochs)} of {log.recipe.get('epochs', '?')}"
        model = _group_of(log.recipe, "model")
        rule = _group_of(model, "recast").get("rule")
        made = [str(log.recipe.get("name", "-")), str(model.get("name", "-")) + f", {rule}" * bool(rule)]
        cells = [METRIC_FORMATS[k][1](last[k]) if k in last else "-" for k in keys]
        rows.append([log.name, *made, done, "-" if top is None else f"{top:.2f}", *cells, f"{seconds:,.0f}"])
    return [
        ["", "recipe", "model", "epochs", "best top-1 (%)", *(METRIC_FORMATS[k][0] for k in keys), "seconds"],
        *rows,
    ]


def flatten_recipe(values: Any, name: str = "") -> dict[str, str]:
    """The fields of a recipe by dotted name, as text."""
    if isinstance(values, Mapping) and values:
        return {
            k: v
            for key, value in values.items()
            for k, v in flatten_recipe(value, f"{name}.{key}" if name else str(key)).items()
        }
    return {name: json.dumps(values)}


def _recipe_table(logs: Sequence[RunLog]) -> Table:
    """The fields in which the recipes differ, a row a field; only its head where none do. Not there is null."""
    recipes = [flatten_recipe(log.recipe) if log.recipe else {} for log in logs]
    names = list(dict.fromkeys(name for recipe in recipes for name in recipe))
    rows = [
        [name, *(recipe.get(name, "-") for recipe in recipes)]
        for name in names
        if len({r.get(name, "null") for r in recipes}) > 1
    ]
    return [["field", *(log.name for log in logs)], *rows]


def _dial_panels(dials: Mapping[str, Trajectory]) -> list[Chart]:
    """Gates, spans and centres along the epochs that runs kept: charts of each run, a line or colour a layer.

    Of a run that kept no model but its last, the centres alone.
    """
    charts: list[Chart] = []
    for run, found in dials.items():
        along = len(found.moments) > 1
        for title, unit, values in (("Gates", "sigma(gate)", found.gates), ("Spans", "1 / locality", found.spans)):
            lines = {layer: head_range_line(found.moments, heads) for layer, heads in values.items()}
            charts += [Panel(f"{title} along training: {run}", "epoch", unit, lines, ordered=True)] * along
        title = f"Centres {'along training' if along else 'at the end'}: {run}"
        charts.append(Paths(title, {name: centre_paths(centres) for name, centres in found.centres.items()}))
    return charts


def centre_paths(centres: Tensor) -> list[list[tuple[float, float]]]:
    """Where each head went, at the epochs at which it was there and had a centre. Shape: (T, heads, 2)"""
    heads = (head[head.isfinite().all(1)].tolist() for head in centres.transpose(0, 1))
    return [[(row, column) for row, column in path] for path in heads]


def centreless(found: Trajectory) -> str:
    """A sentence on the heads that have no centre at the end; nothing where all have one."""
    lost = sum(int((spans[-1].isnan() & ~found.gates[name][-1].isnan()).sum()) for name, spans in found.spans.items())
    return f"{lost} heads have lost their centre by the end (locality not positive): they have no span." if lost else ""


def _course_sections(courses: MeasureHistories, drawn: str) -> list[Section]:
    """Charts of what was followed along training, on which images."""
    text = f"At the epochs that keep_every in the recipe kept, on {drawn}. A line is a layer, the mean over its heads; "
    charts = history_panels(courses)
    return [Section("Attention along training", f"{text}the range is theirs.", charts=charts)] if charts else []


def _point_sections(points: Sequence[AccuracyPoint]) -> list[Section]:
    """Accuracy against cost, where there are models to compare."""
    text = (
        "Best top-1 of a run, or what isomorph evaluate measured; MACs of one image (1 MAC = 2 FLOPs), attention "
        "included. Only models of the same test set can be compared."
    )
    charts = accuracy_charts(points)
    return [Section("Accuracy and cost", text, points_table(points), charts=charts)] if charts else []


def compare_sections(
    logs: Sequence[RunLog],
    dials: Mapping[str, Trajectory] | None = None,
    courses: MeasureHistories | None = None,
    drawn: str = "",
    points: Sequence[AccuracyPoint] = (),
) -> list[Section]:
    """All sections of the page of some runs; `dials` are those of the runs that kept models with gated layers.

    `courses` are other measures along training, on the images that `drawn` says in words; `points` are models by their
    accuracy and cost.
    """
    dials = dials or {}
    problems = list(dict.fromkeys(f"{log.name}: {problem}." for log in logs for problem in log.problems))
    fold = Details("What is missing or could not be read", problems) if problems else None
    longest = max((len(log.steps) for log in logs), default=0)
    thinned = (
        f"Of logs with more than {POINTS} lines, means over {POINTS} equal parts are drawn."
        if longest > MAX_CURVE_POINTS
        else ""
    )
    sections = [Section("At the end", "", _final_table(logs), fold=fold)] if logs else []
    sections += _point_sections(points)
    if charts := _run_charts(logs):
        sections.append(Section("Learning curves", thinned, charts=charts))
    if charts := _dial_panels(dials):
        moving = any(len(found.moments) > 1 for found in dials.values())
        text = (
            "At the epochs that keep_every in the recipe kept. A line is a layer, the mean over its heads; the range "
            "is theirs. Centres are where each head looks from the query, the cross: from the ring to the dot."
            if moving
            else "Where each head looks from the query, the cross. These runs kept no model but their last; with "
            "keep_every in the recipe gates, spans and centres are drawn along the training."
        )
        lost = [f"{run}: {said}" for run, found in dials.items() if (said := centreless(found))]
        sections.append(Section("Gates, spans and centres along training", " ".join([text, *lost]), charts=charts))
    sections += _course_sections(courses or {}, drawn)
    differing = _recipe_table(logs)
    if len(logs) > 1 and len(differing) > 1:
        sections.append(Section("Where the recipes differ", "Every other field is the same.", differing))
    elif len(logs) > 1:
        sections.append(Section("Where the recipes differ", "They do not: the recipes are the same, field by field."))
    return sections
