"""Accuracy against what it costs: a point for each model, by MACs and by parameters (CoAtNet Fig. 2 and 3)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from isomorph.errors import UserError
from isomorph.report.charts import Chart, Scatter, Table, format_number, is_number
from isomorph.report.page_models import short_name


class AccuracyPoint(NamedTuple):
    """A model that has been measured: its name, the test set, top-1 in percent, MACs of an image, parameters."""

    name: str
    data: str
    top1: float
    macs: int
    parameters: int


def read_points(files: Sequence[Path]) -> list[AccuracyPoint]:
    """The models of some results of `isomorph evaluate --json`; those of one name are told apart by their files.

    Raises: UserError for a file that is not one, or was measured without its cost.
    """
    points = [_read_point(path) for path in files]
    names = [point.name for point in points]
    return [
        point if names.count(point.name) == 1 else point._replace(name=f"{point.name} ({path.stem})")
        for point, path in zip(points, files, strict=True)
    ]


def _read_point(path: Path) -> AccuracyPoint:
    """One of them."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; write it with isomorph evaluate MODEL --json > {path}") from None
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("model"), str) or not is_number(found.get("top1")):
        raise UserError(f"{path} is not what isomorph evaluate --json prints of a model at one size on one test set")
    missing = [key for key in ("macs", "parameters") if not is_number(found.get(key))]
    if missing:
        raise UserError(f"{path} has no {' and no '.join(missing)}; evaluate {found['model']} without --no-cost")
    name = short_name(found["model"]) + " (random weights)" * (found.get("weights") == "random")
    return AccuracyPoint(name, str(found.get("data", "test set")), found["top1"], found["macs"], found["parameters"])


def points_table(points: Sequence[AccuracyPoint]) -> Table:
    """Head and a row for each model, the cheapest first."""
    rows = [
        [p.name, p.data, f"{p.top1:.2f}", format_number(p.macs / 1e9), format_number(p.parameters / 1e6)]
        for p in sorted(points, key=lambda point: point.macs)
    ]
    return [["", "test set", "top-1 (%)", "GMACs an image", "parameters (M)"], *rows]


def points_json(points: Sequence[AccuracyPoint]) -> list[dict[str, Any]]:
    """The same for machines."""
    return [point._asdict() for point in points]


def accuracy_charts(points: Sequence[AccuracyPoint]) -> list[Chart]:
    """Top-1 against MACs and against parameters, a colour for each test set; nothing of fewer than two models."""
    if len(points) < 2:
        return []
    charts: list[Chart] = []
    for title, label, unit in (("MACs", "GMACs an image", "macs"), ("parameters", "parameters (M)", "parameters")):
        scale = 1e9 if unit == "macs" else 1e6
        series = {
            data: {p.name: (getattr(p, unit) / scale, p.top1) for p in points if p.data == data}
            for data in dict.fromkeys(p.data for p in points)
        }
        charts.append(Scatter(f"Top-1 against {title}", label, "top-1 (%)", series))
    return charts
