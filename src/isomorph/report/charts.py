"""Charts as data: one class for each kind, independent of the browser and matplotlib, which draw them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, NamedTuple

Table = list[list[str]]
"""Rows of cells; the first row is the head."""
ROUNDING = 1e-6
"""Relative differences of float32 that are rounding."""
MAX_NAMED_CONSTANTS = 4
"""More series with different constant values are drawn."""
MAX_TABLE_POINTS = 40
"""Longer curves have no table of numbers under the chart."""


class Line(NamedTuple):
    """A line of a `Panel`: values `y` at `x`, and optionally the range `low` to `high` around it.

    >>> iso.report.Line(x=[1, 2, 3], y=[2.3, 1.1, 0.7]).y
    [2.3, 1.1, 0.7]
    """

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


class Panel(NamedTuple):
    """A chart of lines by name, on one pair of axes.

    `ordered` lines, such as blocks by depth, are coloured from light to dark. Lines that change by no more than
    `resolution` are constant: a page writes their value instead of a chart.

    >>> loss = {"run": iso.report.Line([1, 2, 3], [2.3, 1.1, 0.7])}
    >>> iso.report.Panel("Training loss", "epoch", "loss", loss).title
    'Training loss'
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Line]
    ordered: bool = False
    resolution: float = 0.0


@dataclass(frozen=True)
class Dots:
    """A chart of one value per head and layer, such as gates or spans: {series: {layer: a value for each head}}.

    Layers run along the x axis; each dot is a head, and a line joins the means of the layers. Layers that a series does
    not have are left empty. `limit` is the top of the y axis, by default that of the values. Values that differ by no
    more than `resolution` are equal: a page writes them instead of a chart.

    >>> gates = {name: values.tolist() for name, values in iso.gates(timm.create_model("t_cifar_resnet20")).items()}
    >>> iso.report.Dots("Gates", "sigma(gate)", {"T-CNN": gates}, limit=1.0).layers[0]
    'layer3.0.conv1'
    """

    title: str
    y_label: str
    series: Mapping[str, Mapping[str, Sequence[float]]]
    limit: float | None = None
    resolution: float = 0.0

    @property
    def layers(self) -> list[str]:
        """Names of the layers of all series, in order of appearance."""
        return list(dict.fromkeys(layer for values in self.series.values() for layer in values))


@dataclass(frozen=True)
class Bars:
    """A bar chart with one group per name and one bar per series: {series: {name: value}}.

    >>> top1 = {"CNN": {"fog": 71.0, "snow": 64.5}, "T-CNN": {"fog": 73.2, "snow": 66.0}}
    >>> iso.report.Bars("Robustness", "top-1 (%)", top1).groups
    ['fog', 'snow']
    """

    title: str
    y_label: str
    series: Mapping[str, Mapping[str, float]]

    @property
    def groups(self) -> list[str]:
        """Names of the groups of all series, in order of appearance."""
        return list(dict.fromkeys(name for values in self.series.values() for name in values))


@dataclass(frozen=True)
class Matrix:
    """A heat map of numbers in rows and columns, coloured from `low` to `high`.

    With a negative `low` the colours diverge from the middle of the range.

    >>> values = [[1.0, 0.6], [0.6, 1.0]]
    >>> iso.report.Matrix("CKA", "layers of a", "layers of b", ["0", "1"], ["0", "1"], values).high
    1.0
    """

    title: str
    row_label: str
    column_label: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]] = field(repr=False)
    low: float = 0.0
    high: float = 1.0


class Paths(NamedTuple):
    """A chart of paths around a query at (0, 0), in grid steps: {layer: a path for each head}.

    A path is a sequence of finite (row, column) positions, empty for a head without any; rows grow downwards. A ring
    marks its first position, a dot its last. Layers are coloured from light to dark.

    >>> iso.report.Paths("Centres", {"blocks.0.attn": [[(0.0, 1.0), (0.5, 2.0)]]}).reach
    2.0
    """

    title: str
    series: Mapping[str, Sequence[Sequence[tuple[float, float]]]]

    @property
    def reach(self) -> float:
        """The largest distance from the query along rows or columns, at least 1."""
        paths = (path for heads in self.series.values() for path in heads)
        return max([1.0, *(abs(value) for path in paths for position in path for value in position)])


class Scatter(NamedTuple):
    """A chart of named points, coloured by series: {series: {name: (x, y)}}.

    >>> points = {"cifar10": {"resnet20": (0.041, 92.6), "resnet32": (0.069, 93.5)}}
    >>> iso.report.Scatter("Accuracy and cost", "GMACs per image", "top-1 (%)", points).title
    'Accuracy and cost'
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Mapping[str, tuple[float, float]]]


Chart = Panel | Dots | Bars | Matrix | Paths | Scatter


def is_number(value: Any) -> bool:
    """True if a value of a log is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def json_number(value: float) -> float | None:
    """Return the number to six digits, None where it is not finite: JSON has no NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def json_numbers(values: Sequence[float] | None) -> list[float | None] | None:
    """Return several numbers as `json_number` does; None for None."""
    return None if values is None else [json_number(value) for value in values]


@singledispatch
def chart_json(chart: Any) -> dict[str, Any]:
    """Return the chart as the dictionary that charts.js draws."""
    raise TypeError(f"{type(chart).__name__} is not a chart")


@chart_json.register
def _panel_json(chart: Panel) -> dict[str, Any]:
    series = [
        {"name": name, **{key: json_numbers(values) for key, values in line._asdict().items()}}
        for name, line in chart.lines.items()
    ]
    labels = {"kind": "lines", "title": chart.title, "x": chart.x_label, "y": chart.y_label}
    return {**labels, "ordered": chart.ordered, "series": series}


@chart_json.register
def _dots_json(chart: Dots) -> dict[str, Any]:
    series = [
        {"name": name, "values": [json_numbers(values.get(layer)) for layer in chart.layers]}
        for name, values in chart.series.items()
    ]
    labels = {"kind": "dots", "title": chart.title, "y": chart.y_label, "layers": chart.layers}
    return {**labels, "limit": chart.limit, "series": series}


@chart_json.register
def _bars_json(chart: Bars) -> dict[str, Any]:
    series = [
        {"name": name, "values": [json_number(values.get(group, math.nan)) for group in chart.groups]}
        for name, values in chart.series.items()
    ]
    return {"kind": "bars", "title": chart.title, "y": chart.y_label, "groups": chart.groups, "series": series}


@chart_json.register
def _matrix_json(chart: Matrix) -> dict[str, Any]:
    labels = {"x": chart.column_label, "y": chart.row_label, "rows": list(chart.rows), "columns": list(chart.columns)}
    values = [json_numbers(row) for row in chart.values]
    return {"kind": "matrix", "title": chart.title, **labels, "values": values, "low": chart.low, "high": chart.high}


@chart_json.register
def _paths_json(chart: Paths) -> dict[str, Any]:
    series = [
        {"name": layer, "paths": [[json_numbers(position) for position in path] for path in heads]}
        for layer, heads in chart.series.items()
    ]
    return {"kind": "paths", "title": chart.title, "ordered": True, "reach": chart.reach, "series": series}


@chart_json.register
def _scatter_json(chart: Scatter) -> dict[str, Any]:
    series = [
        {
            "name": name,
            "points": [{"name": point, "x": json_number(x), "y": json_number(y)} for point, (x, y) in points.items()],
        }
        for name, points in chart.series.items()
    ]
    return {"kind": "scatter", "title": chart.title, "x": chart.x_label, "y": chart.y_label, "series": series}


def format_number(value: float | None) -> str:
    """Return the number to four digits, a dash for None and for what is not finite."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _common_value(values: Iterable[float | None], resolution: float) -> float | None:
    """Return the value that all finite values have, within the resolution or rounding; None if they differ."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    low, high = min(known), max(known)
    if high - low > max(resolution, ROUNDING * max(abs(low), abs(high))):
        return None
    middle = (low + high) / 2
    return round(middle / resolution) * resolution + 0.0 if resolution else middle  # + 0.0: not -0


def _constant_sentence(title: str, values: Mapping[str, float | None], where: str) -> str:
    """Return a sentence with the constant value of each series; empty if any has none, or too many differ."""
    found = {name: format_number(value) for name, value in values.items() if value is not None}
    if not found or len(found) < len(values):
        return ""
    if len(set(found.values())) == 1:
        return f"{title}: {next(iter(found.values()))} {where}."
    if len(found) > MAX_NAMED_CONSTANTS:
        return ""
    return f"{title}: {', '.join(f'{value} for {name}' for name, value in found.items())}, {where}."


@singledispatch
def constant_text(chart: Any) -> str:
    """Return a sentence with the values of a chart in which nothing changes; empty for a chart worth drawing."""
    return ""


@constant_text.register
def _dots_constant(chart: Dots) -> str:
    series = {
        name: _common_value((v for heads in layers.values() for v in heads), chart.resolution)
        for name, layers in chart.series.items()
    }
    return _constant_sentence(chart.title, series, "in every head of every layer")


@constant_text.register
def _panel_constant(chart: Panel) -> str:
    series = {
        name: _common_value([*line.y, *(line.low or ()), *(line.high or ())], chart.resolution)
        for name, line in chart.lines.items()
    }
    return _constant_sentence(chart.title, series, f"at every {chart.x_label}")


@constant_text.register
def _matrix_constant(chart: Matrix) -> str:
    value = _common_value((value for row in chart.values for value in row), 0.0)
    return _constant_sentence(chart.title, {chart.title: value}, "in every cell")


@singledispatch
def chart_table(chart: Any) -> Table:
    """Return the chart's numbers as a table; an empty one for curves of more than `MAX_TABLE_POINTS` points."""
    raise TypeError(f"{type(chart).__name__} is not a chart")


@chart_table.register
def _panel_table(chart: Panel) -> Table:
    xs = sorted({x for line in chart.lines.values() for x in line.x})
    if len(xs) > MAX_TABLE_POINTS:
        return []
    lines = [dict(zip(line.x, line.y, strict=True)) for line in chart.lines.values()]
    rows = [[format_number(x), *(format_number(line.get(x)) for line in lines)] for x in xs]
    return [[chart.x_label, *chart.lines], *rows]


@chart_table.register
def _dots_table(chart: Dots) -> Table:
    rows = []
    for layer in chart.layers:
        cells = [", ".join(map(format_number, values.get(layer, ()))) or "-" for values in chart.series.values()]
        rows.append([layer, *cells])
    return [["layer", *chart.series], *rows]


@chart_table.register
def _bars_table(chart: Bars) -> Table:
    rows = [[group, *(format_number(values.get(group)) for values in chart.series.values())] for group in chart.groups]
    return [["", *chart.series], *rows]


@chart_table.register
def _matrix_table(chart: Matrix) -> Table:
    head = [f"{chart.row_label} \\ {chart.column_label}", *chart.columns]
    return [head, *([name, *map(format_number, row)] for name, row in zip(chart.rows, chart.values, strict=True))]


@chart_table.register
def _paths_table(chart: Paths) -> Table:
    rows = [
        [f"{layer}, head {i + 1}", *(", ".join(map(format_number, path[end])) if path else "-" for end in (0, -1))]
        for layer, heads in chart.series.items()
        for i, path in enumerate(heads)
    ]
    return [["row, column", "first", "last"], *rows]


@chart_table.register
def _scatter_table(chart: Scatter) -> Table:
    rows = [[name, *map(format_number, point)] for points in chart.series.values() for name, point in points.items()]
    return [["", chart.x_label, chart.y_label], *rows]
