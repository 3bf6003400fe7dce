"""Charts of accuracy against cost: a point for each model, by MACs and by parameters (CoAtNet Fig. 2 and 3)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from isomorph.errors import UserError
from isomorph.report.charts import Chart, Scatter, Table, format_number, is_number
from isomorph.report.page_models import short_name


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


def points_table(points: Sequence[AccuracyPoint]) -> Table:
    """Return a table with a row for each model, the cheapest first."""
    rows = [
        [p.name, p.data, f"{p.top1:.2f}", format_number(p.macs / 1e9), format_number(p.parameters / 1e6)]
        for p in sorted(points, key=lambda point: point.macs)
    ]
    return [["", "test set", "top-1 (%)", "GMACs per image", "parameters (M)"], *rows]


def points_json(points: Sequence[AccuracyPoint]) -> list[dict[str, Any]]:
    """Return the points as dictionaries, for `--json`."""
    return [point._asdict() for point in points]


def accuracy_charts(points: Sequence[AccuracyPoint]) -> list[Chart]:
    """Return charts of top-1 against MACs and parameters, coloured by test set; none for fewer than two models."""
    if len(points) < 2:
        return []
    charts: list[Chart] = []
    for title, label, cost, scale in (
        ("MACs", "GMACs per image", "macs", 1e9),
        ("parameters", "parameters (M)", "parameters", 1e6),
    ):
        series = {
            data: {p.name: (getattr(p, cost) / scale, p.top1) for p in points if p.data == data}
            for data in dict.fromkeys(p.data for p in points)
        }
        charts.append(Scatter(f"Top-1 against {title}", label, "top-1 (%)", series))
    return charts
