"""Runs and evaluated models, read from the files that `isomorph train` and `isomorph evaluate --json` write."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from isomorph.errors import UserError
from isomorph.json_values import (
    JsonObject,
    is_number,
    parse_log_row,
    parse_object,
    read_object,
)
from isomorph.lab.report.page_models import short_name
from isomorph.terminal_tables import RANDOM_WEIGHTS, Rows

# Data sources that name no data set.
_FORMATS = ("imagefolder", "tar", "webdataset", "huggingface", "huggingface-stream", "text")


@dataclass(frozen=True)
class RunLog:
    """The recipe and logs of a run, and a line for each file that is missing or damaged."""

    name: str
    folder: Path
    recipe: JsonObject
    epochs: Rows = field(repr=False)
    steps: Rows = field(repr=False)
    monitor: Rows = field(repr=False)
    problems: list[str] = field(default_factory=list)

    @property
    def test_set(self) -> str | None:
        """The name of the data set, with the number of classes if only some are used; None if no recipe names it."""
        data = self.recipe.get("data")
        if not isinstance(data, Mapping) or data.get("source") is None:
            return None
        name = str(data["source"])
        if data.get("root") and name in _FORMATS:
            name = Path(str(data["root"])).name or name
        if data.get("classes"):
            name += f" ({data['classes']} classes)"
        return name

    @property
    def best_top1(self) -> float | None:
        """The highest top-1 after an epoch, None where none was measured."""
        measured = []
        for row in self.epochs:
            if row.get("epoch") != 0 and is_number(row.get("top1")):
                measured.append(row["top1"])
        return max(measured, default=None)

    @property
    def test_images(self) -> int | None:
        """The number of images of the last test, None where it was not logged."""
        for row in reversed(self.epochs):
            if is_number(row.get("images")) and row["images"] > 0:
                return int(row["images"])
        return None


def _read_jsonl(path: Path, problems: list[str]) -> Rows:
    try:
        lines = list(filter(str.strip, path.read_text(errors="replace").split("\n")))
    except FileNotFoundError:
        problems.append(f"no {path.name}")
        return []
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror}")
        return []
    rows = [row for row in map(parse_log_row, lines) if row is not None]
    if len(rows) < len(lines):
        problems.append(
            f"{len(lines) - len(rows)} of {len(lines)} lines of {path.name} cannot be read"
        )
    return rows


def _read_run(folder: Path) -> RunLog:
    if not folder.is_dir():
        what = (
            "it is a file (isomorph analyze compares models)"
            if folder.exists()
            else "it does not exist"
        )
        raise UserError(f"{folder} is not the folder of a run: {what}")
    problems = list[str]()
    epochs = _read_jsonl(folder / "log.jsonl", problems)
    steps = _read_jsonl(folder / "steps.jsonl", problems)
    monitor = []
    if (folder / "monitor.jsonl").exists():
        monitor = _read_jsonl(folder / "monitor.jsonl", problems)
    recipe = _read_recipe(folder / "recipe.json", problems)
    if not (epochs or steps or recipe):
        raise UserError(
            f"{folder} is not a run's folder: it has no readable log.jsonl, steps.jsonl or recipe.json"
        )
    return RunLog(folder.name or str(folder), folder, recipe, epochs, steps, monitor, problems)


def _read_recipe(path: Path, problems: list[str]) -> JsonObject:
    if not path.is_file():
        problems.append(f"no {path.name}")
        return {}
    recipe = read_object(path)
    if recipe is None:
        problems.append(f"{path.name} cannot be read")
        return {}
    return recipe


def read_run_logs(folders: Sequence[Path]) -> list[RunLog]:
    """Read the recipes and logs of runs, finished or not; runs of the same name are named by their whole path.

    >>> from pathlib import Path
    >>> Path("run").mkdir()
    >>> _ = Path("run/log.jsonl").write_text('{"epoch": 1, "loss": 2.3, "top1": 12.5}')
    >>> iso.report.read_run_logs([Path("run")])[0].epochs
    [{'epoch': 1, 'loss': 2.3, 'top1': 12.5}]

    Raises: UserError for a path that is not the folder of a run, or is given twice.
    """
    logs = []
    for folder in folders:
        if folder.name in ("", ".."):
            logs.append(_read_run(folder.resolve()))
        else:
            logs.append(_read_run(folder))
    names = [log.name for log in logs]
    renamed = []
    for log in logs:
        name = log.name if names.count(log.name) == 1 else str(log.folder)
        renamed.append(replace(log, name=name))
    if len({log.name for log in renamed}) < len(renamed):
        raise UserError("a run is given twice; give each folder once")
    return renamed


class AccuracyPoint(NamedTuple):
    """A measured model: its name, the test set and its images, top-1 in percent, MACs per image, parameters."""

    name: str
    data: str
    top1: float
    macs: int
    parameters: int
    images: int | None = None


def read_points(files: Sequence[Path]) -> list[AccuracyPoint]:
    """Read results of `isomorph evaluate --json`; models of the same name get the file in parentheses.

    Raises: UserError for a file that is not such a result, or lacks the model's cost.
    """
    points = [_read_point(path) for path in files]
    names = Counter(point.name for point in points)
    files_of = Counter((point.name, path.stem) for point, path in zip(points, files, strict=True))
    unique = []
    for point, path in zip(points, files, strict=True):
        if files_of[point.name, path.stem] > 1:
            point = point._replace(name=f"{point.name} ({path})")
        elif names[point.name] > 1:
            point = point._replace(name=f"{point.name} ({path.stem})")
        unique.append(point)
    return unique


def _read_point(path: Path) -> AccuracyPoint:
    try:
        result = parse_object(path.read_text(errors="replace")) or {}
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; write it with isomorph evaluate MODEL --json > "
            f"{path}"
        ) from None
    if not isinstance(result.get("model"), str) or not is_number(result.get("top1")):
        raise UserError(
            f"{path} is not what isomorph evaluate --json prints of one model at one size on one test set"
        )
    missing = [key for key in ("macs", "parameters") if not is_number(result.get(key))]
    if missing:
        raise UserError(
            f"{path} has no {' and no '.join(missing)}, which are not counted of an exported model, or with "
            "--no-cost; write it with isomorph evaluate CHECKPOINT --json"
        )
    name = short_name(result["model"])
    if result.get("weights") == "random":
        name += RANDOM_WEIGHTS
    data = str(result.get("data", "test set"))
    return AccuracyPoint(
        name,
        Path(data).name,
        result["top1"],
        result["macs"],
        result["parameters"],
        result.get("images"),
    )
