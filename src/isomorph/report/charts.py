"""What a chart shows, apart from how it is drawn: the page draws it in the browser, papers through matplotlib."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, NamedTuple

Table = list[list[str]]
NUMBERS = 40
"""Points of a curve up to which its numbers are listed under it."""


class Line(NamedTuple):
    """A line, and the range around it where there is one."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


class Panel(NamedTuple):
    """One pair of axes with lines. `ordered` lines (blocks by depth) go from light to dark."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Line]
    ordered: bool = False


@dataclass(frozen=True)
class Dots:
    """One value per head and layer (gates, spans, nonlocality): layers across, a dot a head, a line through the means.

    A layer that a series does not have is left open. `limit` is the top of the axis where it has one.
    """

    title: str
    y_label: str
    series: Mapping[str, Mapping[str, Sequence[float]]]
    limit: float | None = None

    @property
    def layers(self) -> list[str]:
        """Names of the layers of all series, in their order."""
        return list(dict.fromkeys(layer for values in self.series.values() for layer in values))


@dataclass(frozen=True)
class Bars:
    """A group of bars for each name, a bar for each series: {series: {name: value}}."""

    title: str
    y_label: str
    series: Mapping[str, Mapping[str, float]]

    @property
    def groups(self) -> list[str]:
        """Names of the groups of all series, in their order."""
        return list(dict.fromkeys(name for values in self.series.values() for name in values))


@dataclass(frozen=True)
class Matrix:
    """Numbers in rows and columns, by colour from `low` to `high`; around a middle of 0 where low is negative."""

    title: str
    row_label: str
    column_label: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]] = field(repr=False)
    low: float = 0.0
    high: float = 1.0


class Paths(NamedTuple):
    """Ways in the plane around a query at (0, 0), in steps of the grid: a ring where each begins, a dot where it ends.

    {layer: a path for each head, of finite (row, column) places, empty for a head without any}; rows go down. Layers go
    from light to dark.
    """

    title: str
    series: Mapping[str, Sequence[Sequence[tuple[float, float]]]]

    @property
    def reach(self) -> float:
        """The largest row or column, either way; 1 at least."""
        return max(
            [1.0, *(abs(v) for heads in self.series.values() for path in heads for place in path for v in place)]
        )


class Scatter(NamedTuple):
    """Named points on a pair of axes, a colour for each series: {series: {name: (x, y)}}."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Mapping[str, tuple[float, float]]]


Chart = Panel | Dots | Bars | Matrix | Paths | Scatter


def is_number(value: Any) -> bool:
    """Whether a value of a log is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def json_number(value: float) -> float | None:
    """The number to six digits, or None where it is none: JSON has no NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def json_numbers(values: Sequence[float] | None) -> list[float | None] | None:
    """Several of them."""
    return None if values is None else [json_number(value) for value in values]


@singledispatch
def chart_json(chart: Any) -> dict[str, Any]:
    """The chart as the page's script takes it."""
    raise TypeError(f"{type(chart).__name__} is no chart")


@chart_json.register
def panel_json(chart: Panel) -> dict[str, Any]:
    series = [
        {"name": name, **{k: json_numbers(v) for k, v in line._asdict().items()}} for name, line in chart.lines.items()
    ]
    found = {"kind": "lines", "title": chart.title, "x": chart.x_label, "y": chart.y_label}
    return {**found, "ordered": chart.ordered, "series": series}


@chart_json.register
def dots_json(chart: Dots) -> dict[str, Any]:
    series = [
        {"name": name, "values": [json_numbers(values.get(layer)) for layer in chart.layers]}
        for name, values in chart.series.items()
    ]
    found = {"kind": "dots", "title": chart.title, "y": chart.y_label, "layers": chart.layers}
    return {**found, "limit": chart.limit, "series": series}


@chart_json.register
def bars_json(chart: Bars) -> dict[str, Any]:
    series = [
        {"name": name, "values": [json_number(values.get(group, math.nan)) for group in chart.groups]}
        for name, values in chart.series.items()
    ]
    return {"kind": "bars", "title": chart.title, "y": chart.y_label, "groups": chart.groups, "series": series}


@chart_json.register
def matrix_json(chart: Matrix) -> dict[str, Any]:
    labels = {"x": chart.column_label, "y": chart.row_label, "rows": list(chart.rows), "columns": list(chart.columns)}
    values = [json_numbers(row) for row in chart.values]
    return {"kind": "matrix", "title": chart.title, **labels, "values": values, "low": chart.low, "high": chart.high}


def format_number(value: float | None) -> str:
    """A number as tables show it."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"


@chart_json.register
def paths_json(chart: Paths) -> dict[str, Any]:
    series = [
        {"name": layer, "paths": [[json_numbers(place) for place in path] for path in heads]}
        for layer, heads in chart.series.items()
    ]
    return {"kind": "paths", "title": chart.title, "ordered": True, "reach": chart.reach, "series": series}


@chart_json.register
def scatter_json(chart: Scatter) -> dict[str, Any]:
    series = [
        {
            "name": name,
            "points": [{"name": point, "x": json_number(x), "y": json_number(y)} for point, (x, y) in points.items()],
        }
        for name, points in chart.series.items()
    ]
    return {"kind": "scatter", "title": chart.title, "x": chart.x_label, "y": chart.y_label, "series": series}


@singledispatch
def chart_table(chart: Any) -> Table:
    """The chart's numbers as a table, the first row its head; none where they are too many to be read."""
    raise TypeError(f"{type(chart).__name__} is no chart")


@chart_table.register
def panel_numbers(chart: Panel) -> Table:
    places = sorted({x for line in chart.lines.values() for x in line.x})
    if len(places) > NUMBERS:
        return []
    found = [dict(zip(line.x, line.y, strict=True)) for line in chart.lines.values()]
    return [
        [chart.x_label, *chart.lines],
        *([format_number(x), *(format_number(y.get(x)) for y in found)] for x in places),
    ]


@chart_table.register
def dots_numbers(chart: Dots) -> Table:
    rows = []
    for layer in chart.layers:
        cells = [", ".join(map(format_number, values.get(layer, ()))) or "-" for values in chart.series.values()]
        rows.append([layer, *cells])
    return [["layer", *chart.series], *rows]


@chart_table.register
def bars_numbers(chart: Bars) -> Table:
    rows = [[group, *(format_number(values.get(group)) for values in chart.series.values())] for group in chart.groups]
    return [["", *chart.series], *rows]


@chart_table.register
def matrix_numbers(chart: Matrix) -> Table:
    head = [f"{chart.row_label} \\ {chart.column_label}", *chart.columns]
    return [head, *([name, *map(format_number, row)] for name, row in zip(chart.rows, chart.values, strict=True))]


@chart_table.register
def paths_numbers(chart: Paths) -> Table:
    rows = [
        [f"{layer}, head {i + 1}", *(", ".join(map(format_number, path[end])) if path else "-" for end in (0, -1))]
        for layer, heads in chart.series.items()
        for i, path in enumerate(heads)
    ]
    return [["row, column", "first", "last"], *rows]


@chart_table.register
def scatter_numbers(chart: Scatter) -> Table:
    rows = [[name, *map(format_number, point)] for points in chart.series.values() for name, point in points.items()]
    return [["", chart.x_label, chart.y_label], *rows]
