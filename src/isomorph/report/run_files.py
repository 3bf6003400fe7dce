"""Runs and evaluated models, read from the files that `isomorph train` and `isomorph evaluate --json` write."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from isomorph.errors import UserError
from isomorph.report.charts import is_number
from isomorph.report.page_models import short_name

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


def best_top1(log: RunLog) -> float | None:
    """Return the highest top-1 of a run after an epoch, None where none was measured."""
    return max(
        (row["top1"] for row in log.epochs if row.get("epoch") != 0 and is_number(row.get("top1"))), default=None
    )


class AccuracyPoint(NamedTuple):
    """A measured model: its name, the test set, top-1 in percent, MACs per image, number of parameters."""

    name: str
    data: str
    top1: float
    macs: int
    parameters: int


def read_points(files: Sequence[Path]) -> list[AccuracyPoint]:
    """Read results of `isomorph evaluate --json`; models of the same name get the file's name in parentheses.

    Raises: UserError for a file that is not such a result, or lacks the model's cost.
    """
    points = [_read_point(path) for path in files]
    names = [point.name for point in points]
    return [
        point if names.count(point.name) == 1 else point._replace(name=f"{point.name} ({path.stem})")
        for point, path in zip(points, files, strict=True)
    ]


def _read_point(path: Path) -> AccuracyPoint:
    try:
        result = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; write it with isomorph evaluate MODEL --json > {path}") from None
    except (OSError, ValueError):
        result = None
    if not isinstance(result, dict) or not isinstance(result.get("model"), str) or not is_number(result.get("top1")):
        raise UserError(
            f"{path} is not a result of isomorph evaluate --json; "
            "--evaluated takes results of one model at one size on one test set"
        )
    missing = [key for key in ("macs", "parameters") if not is_number(result.get(key))]
    if missing:
        raise UserError(f"{path} has no {' and no '.join(missing)}; evaluate {result['model']} without --no-cost")
    name = short_name(result["model"]) + " (random weights)" * (result.get("weights") == "random")
    return AccuracyPoint(
        name, str(result.get("data", "test set")), result["top1"], result["macs"], result["parameters"]
    )
