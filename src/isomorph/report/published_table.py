"""A published table or figure: what runs measured next to what the paper has, and charts of it."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from isomorph.errors import UserError
from isomorph.report.charts import Chart, Line, Panel, Scatter, is_number
from isomorph.report.run_files import RunLog
from isomorph.terminal_tables import METRIC_FORMATS, interval_text

_UNITS = {"top-1": "top1", "top-5": "top5", "mIoU": "miou", "box AP": "box_ap", "mask AP": "mask_ap", "FID": "fid"}
_AFTER = re.compile(r"(\d+(?:\.\d+)?) (top-1|top-5|mIoU)\b")
_BEFORE = re.compile(r"\b(box AP|mask AP|FID) (\d+(?:\.\d+)?)")
_TIME = re.compile(r"(\d+(?:\.\d+)?) times ")
Row = dict[str, Any]


def published_rows(table: str, recipes: Mapping[str, Mapping[str, Any]], logs: Sequence[RunLog]) -> list[Row]:
    """Return a row for each run of a published table (`ConViT Table 2`, `TDRL B.8`), and each recipe without a run.

    Keys: recipe, run, fraction of the data, expected (the recipe's text), and by metric expected_* and what the run's
    last evaluation measured, on how many images; train_top1, loss, epochs and hours of the run.

    Raises: UserError when no recipe is of this table.
    """
    paper, _, item = table.strip().partition(" ")

    def belongs(source: str) -> bool:
        return bool(re.match(rf"{re.escape(paper)} (.*\W)?{re.escape(item)}(?![\w.])", source, re.IGNORECASE))

    names = [name for name, recipe in recipes.items() if item and belongs(recipe.get("source", ""))]
    if not names:
        known = list(dict.fromkeys(recipe.get("source", "").partition(",")[0] for recipe in recipes.values()))
        close = difflib.get_close_matches(table, known, n=3) or ["ConViT Table 2"]
        raise UserError(f"no recipe is of {table!r}; give a paper and its table, for example {' or '.join(close)}")
    rows = []
    for name in names:
        runs = [log for log in logs if log.recipe.get("name") == name]
        rows += [_row(name, recipes[name], log) for log in runs] or [_row(name, recipes[name], None)]
    listed = {row["run"] for row in rows}
    more = [log for log in logs if log.name not in listed and belongs(str(log.recipe.get("source", "")))]
    return rows + [_row(str(log.recipe.get("name", "-")), log.recipe, log) for log in more]


def _row(name: str, recipe: Mapping[str, Any], log: RunLog | None) -> Row:
    text = str(recipe.get("expected", ""))
    found = {unit: number for number, unit in _AFTER.findall(text)} | dict(_BEFORE.findall(text))
    row: Row = {"recipe": name, "run": log.name if log else None, "expected": text}
    row["fraction"] = (recipe.get("data") or {}).get("fraction", 1.0)
    row |= {f"expected_{_UNITS[unit]}": float(number) for unit, number in found.items()}
    row |= {"expected_time": float(time[1])} if (time := _TIME.search(text)) else {}
    for epoch in [epoch for epoch in log.epochs if epoch.get("epoch")] if log else []:
        keys = (*METRIC_FORMATS, "train_top1", "loss")
        row |= {key: epoch[key] for key in keys if is_number(epoch.get(key))}
        row["epochs"] = epoch["epoch"]
        row["hours"] = row.get("hours", 0.0) + (epoch["seconds"] / 3600 if is_number(epoch.get("seconds")) else 0.0)
    return row


def published_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the rows as text: expected and measured metrics next to each other."""
    known = [key for key in METRIC_FORMATS if key != "images"]
    metrics = [key for key in known if any(f"expected_{key}" in row for row in rows)]
    metrics = metrics or [key for key in known if any(key in row for row in rows)][:1]
    columns = {"recipe": "recipe", "run": "run"}
    for key in metrics:
        columns |= {
            f"expected_{key}": f"{METRIC_FORMATS[key][0]}, expected",
            key: "measured" + " (95% interval)" * (key == "top1"),
        }
    columns |= {"expected_time": "time, expected (x)"} if any("expected_time" in row for row in rows) else {}
    columns |= {"train_top1": "training top-1 (%)", "loss": "loss", "epochs": "epochs", "hours": "hours"}
    body = [[_text(row, key) for key in columns] for row in rows]
    return [list(columns.values()), *body]


def _text(row: Row, key: str) -> str:
    value, images = row.get(key), row.get("images")
    text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{text} ({interval_text(value, int(images))})" if key == "top1" and value is not None and images else text


def published_charts(table: str, rows: Sequence[Row]) -> list[Chart]:
    """Return top-1 by the fraction of the data where it varies, else by time: a paper's are multiples of one run's."""
    if len({row["fraction"] for row in rows}) > 1:
        lines = {}
        for key, what in (("expected_top1", "expected"), ("top1", "measured")):
            points: dict[str, dict[float, list[float]]] = {}
            for row in (row for row in rows if key in row):
                series = points.setdefault(re.sub(r"_\d+pct$", "", row["recipe"]), {})
                series.setdefault(100 * row["fraction"], []).append(row[key])
            for name, by_fraction in points.items():
                xs = sorted(by_fraction)
                lines[f"{name}, {what}"] = Line(xs, [sum(by_fraction[x]) / len(by_fraction[x]) for x in xs])
        return [Panel(table, "images of each class (%)", "top-1 (%)", lines)] if lines else []
    published = {row["recipe"]: (row["expected_time"], row["expected_top1"]) for row in rows if "expected_time" in row}
    measured = {row["run"]: (row["hours"], row["top1"]) for row in rows if "top1" in row}
    drawn = (("hours of training", "measured", measured), ("time of training (x)", "expected", published))
    return [Scatter(f"{table}, {kind}", x, "top-1 (%)", {kind: points}) for x, kind, points in drawn if points]
