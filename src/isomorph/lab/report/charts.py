"""Charts as data: one class for each kind, independent of the browser, which draws them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

from isomorph.terminal_tables import Table

# What the browser reads of a chart, or of a part of it.
Drawing = dict[str, Any]
# Coordinates of named points: {series: {name: (x, y)}}.
Points = dict[str, dict[str, tuple[float, float]]]
# Relative differences of float32 that are rounding.
ROUNDING = 1e-6
# More series with different constant values are drawn.
MAX_NAMED_CONSTANTS = 4
# Longer curves have no table of numbers under the chart.
MAX_TABLE_POINTS = 40
# Distance between the dots of two series in one layer; layers are 1 apart.
SERIES_SHIFT = 0.22


@dataclass(frozen=True)
class Chart(ABC):
    """A chart, as three forms of its numbers: a drawing, a table, and a sentence where there is nothing to draw.

    A drawing is of one of three kinds: `plane` has lines and points of each series by their coordinates, `bars` a value
    of each series for each group, `matrix` rows of values. `stops` are the positions in a plane of the table's rows, on
    which the cursor of a page rests.
    """

    title: str

    @abstractmethod
    def parts(self) -> Drawing:
        """Return the parts of the drawing, for JSON, without title and table."""

    @abstractmethod
    def table(self) -> Table:
        """Return the chart's numbers as text; an empty table for curves of more than `MAX_TABLE_POINTS` points."""

    def drawing(self) -> Drawing:
        """Return what the page's script draws, as a dictionary for JSON."""
        return {"title": self.title, "table": self.table(), **self.parts()}

    def constant_text(self) -> str:
        """Return a sentence with the values of a chart in which nothing changes; empty for a chart worth drawing."""
        return ""


class Line(NamedTuple):
    """A line of a `Panel`: values `y` at `x`, and optionally the range `low` to `high` around it.

    >>> iso.report.Line(x=[1, 2, 3], y=[2.3, 1.1, 0.7]).y
    [2.3, 1.1, 0.7]
    """

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None

    def values(self) -> list[float]:
        return [*self.y, *(self.low or ()), *(self.high or ())]


@dataclass(frozen=True)
class Panel(Chart):
    """A chart of lines by name, on one pair of axes.

    `ordered` lines, such as blocks by depth, are coloured from light to dark. Lines that change by no more than
    `resolution` are constant: a page writes their value instead of a chart.

    >>> loss = {"run": iso.report.Line([1, 2, 3], [2.3, 1.1, 0.7])}
    >>> iso.report.Panel("Training loss", "epoch", "loss", loss).title
    'Training loss'
    """

    x_label: str
    y_label: str
    lines: Mapping[str, Line]
    ordered: bool = False
    resolution: float = 0.0

    def parts(self) -> Drawing:
        xs = [x for line in self.lines.values() for x in line.x]
        ys = [y for line in self.lines.values() for y in line.values()]
        series = []
        for name, line in self.lines.items():
            columns = [line.x, line.y]
            if line.low is not None and line.high is not None:
                columns += [line.low, line.high]
            series.append(_series(name, [zip(*columns, strict=True)]))
        x = _axis(self.x_label, xs)
        x["whole"] = all(float(value).is_integer() for value in xs)
        return {
            "kind": "plane",
            "x": x,
            "y": _axis(self.y_label, ys),
            "series": series,
            "ordered": self.ordered,
        }

    def table(self) -> Table:
        lines = [dict(zip(line.x, line.y, strict=True)) for line in self.lines.values()]
        xs = sorted(set(chain.from_iterable(lines)))
        if len(xs) > MAX_TABLE_POINTS:
            return []
        table = [[self.x_label, *self.lines]]
        for x in xs:
            values = [line.get(x) for line in lines]
            table.append([format_number(x), *map(format_number, values)])
        return table

    def constant_text(self) -> str:
        values = {name: line.values() for name, line in self.lines.items()}
        return _constant_sentence(self.title, values, f"at every {self.x_label}", self.resolution)


@dataclass(frozen=True)
class Dots(Chart):
    """A chart of a value of each head in each layer, such as gates or spans: {series: {layer: a value for each head}}.

    Layers run along the x axis; a line joins their means. `limit` is the top of the y axis, by default that of the
    values. Values that differ by no more than `resolution` are equal: a page writes them instead of a chart. `each`
    names what has a value, by default a head.

    >>> gates = {name: values.tolist() for name, values in iso.gates(timm.create_model("t_cifar_resnet20")).items()}
    >>> iso.report.Dots("Gates", "sigma(gate)", {"T-CNN": gates}, limit=1.0).layers[0]
    'layer3.0.conv1'
    """

    y_label: str
    series: Mapping[str, Mapping[str, Sequence[float]]]
    limit: float | None = None
    resolution: float = 0.0
    each: str = "head"

    @property
    def layers(self) -> list[str]:
        return _names(self.series)

    def parts(self) -> Drawing:
        numbers = {layer: number for number, layer in enumerate(self.layers)}
        middle = (len(self.series) - 1) / 2
        series = []
        heights = [0.0]
        for k, (name, layers) in enumerate(self.series.items()):
            means = []
            dots = []
            for layer, heads in layers.items():
                x = numbers[layer] + SERIES_SHIFT * (k - middle)
                dots += [(x, value, layer) for value in heads]
                known = list(filter(math.isfinite, heads))
                if known:
                    means.append((x, fmean(known)))
                heights += heads
            series.append(_series(name, [sorted(means)], dots))
        if self.limit is not None:
            heights.append(self.limit)
        return {
            "kind": "plane",
            "x": {"label": "layer", "range": [-0.5, len(numbers) - 0.5], "names": list(numbers)},
            "y": _axis(self.y_label, heights),
            "series": series,
            "stops": [(number, None) for number in numbers.values()],
            "each": self.each,
        }

    def table(self) -> Table:

        def text(heads: Sequence[float] | None) -> str:
            if not heads:
                return "-"
            return ", ".join(map(format_number, heads))

        return series_table("layer", self.series, text)

    def constant_text(self) -> str:
        values = {
            name: list(chain.from_iterable(layers.values())) for name, layers in self.series.items()
        }
        where = f"in every {self.each} of every layer"
        if not all(map(math.isfinite, chain.from_iterable(values.values()))):
            where = f"in every {self.each} that has a value"
        return _constant_sentence(self.title, values, where, self.resolution)


@dataclass(frozen=True)
class Bars(Chart):
    """A bar chart with one group per name and one bar per series: {series: {name: value}}.

    >>> top1 = {"CNN": {"fog": 71.0, "snow": 64.5}, "T-CNN": {"fog": 73.2, "snow": 66.0}}
    >>> iso.report.Bars("Robustness", "top-1 (%)", top1).groups
    ['fog', 'snow']
    """

    y_label: str
    series: Mapping[str, Mapping[str, float]]

    @property
    def groups(self) -> list[str]:
        return _names(self.series)

    def parts(self) -> Drawing:
        groups = self.groups
        series = []
        heights = [0.0]
        for name, value_of in self.series.items():
            values = [value_of.get(group, math.nan) for group in groups]
            series.append({"name": name, "values": json_numbers(values)})
            heights += values
        axis = _axis(self.y_label, heights)
        return {"kind": "bars", "axis": axis, "groups": groups, "series": series}

    def table(self) -> Table:
        return series_table("", self.series)


@dataclass(frozen=True)
class Matrix(Chart):
    """A heat map coloured from `low` to `high`; with a negative `low` the colours diverge from the middle.

    >>> values = [[1.0, 0.6], [0.6, 1.0]]
    >>> iso.report.Matrix("CKA", "layers of a", "layers of b", ["0", "1"], ["0", "1"], values).high
    1.0
    """

    row_label: str
    column_label: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]] = field(repr=False)
    low: float = 0.0
    high: float = 1.0

    def parts(self) -> Drawing:
        return {
            "kind": "matrix",
            "rows": list(self.rows),
            "columns": list(self.columns),
            "x": self.column_label,
            "y": self.row_label,
            "values": list(map(json_numbers, self.values)),
            "low": self.low,
            "high": self.high,
        }

    def table(self) -> Table:
        table = [[f"{self.row_label} \\ {self.column_label}", *self.columns]]
        for name, values in zip(self.rows, self.values, strict=True):
            table.append([name, *map(format_number, values)])
        return table

    def constant_text(self) -> str:
        values = chain.from_iterable(self.values)
        return _constant_sentence(self.title, {self.title: values}, "in every cell", 0.0)


@dataclass(frozen=True)
class Paths(Chart):
    """A chart of paths around a query at (0, 0), in grid steps: {layer: a path for each head}.

    A path is a sequence of finite (row, column) positions, empty for a head without any; rows grow downwards. A ring
    marks its first position, a dot its last. Layers are coloured from light to dark.

    >>> iso.report.Paths("Centres", {"blocks.0.attn": [[(0.0, 1.0), (0.5, 2.0)]]}).reach
    2.0
    """

    series: Mapping[str, Sequence[Sequence[tuple[float, float]]]]

    @property
    def reach(self) -> float:
        """The largest distance from the query along rows or columns, at least 1."""
        reach = 1.0
        for paths in self.series.values():
            for row, column in chain.from_iterable(paths):
                reach = max(reach, abs(row), abs(column))
        return reach

    def parts(self) -> Drawing:
        series = []
        stops = []
        for layer, paths in self.series.items():
            lines = []
            ends = []
            for path in paths:
                line = [(column, row) for row, column in path]
                lines.append(line)
                stops.append(line[-1] if line else None)
                if line:
                    ends.append((*line[-1], layer))
            series.append(_series(layer, lines, ends))
        limits = [-1.08 * self.reach, 1.08 * self.reach]
        return {
            "kind": "plane",
            "x": _axis("column, grid steps", limits),
            "y": _axis("row", limits),
            "series": series,
            "stops": stops,
            "ordered": True,
            "square": True,
        }

    def table(self) -> Table:
        table = [["row, column", "first", "last"]]
        for layer, paths in self.series.items():
            for head, path in enumerate(paths, 1):
                first = last = "-"
                if path:
                    first = ", ".join(map(format_number, path[0]))
                    last = ", ".join(map(format_number, path[-1]))
                table.append([f"{layer}, head {head}", first, last])
        return table


@dataclass(frozen=True)
class Scatter(Chart):
    """A chart of named points, coloured by series: {series: {name: (x, y)}}.

    >>> points = {"cifar10": {"resnet20": (0.041, 92.6), "resnet32": (0.069, 93.5)}}
    >>> iso.report.Scatter("Accuracy and cost", "GMACs per image", "top-1 (%)", points).title
    'Accuracy and cost'
    """

    x_label: str
    y_label: str
    series: Points

    def parts(self) -> Drawing:
        series = []
        stops: list[tuple[float, float]] = []
        for name, points in self.series.items():
            labelled = [(x, y, label) for label, (x, y) in points.items()]
            series.append(_series(name, [], labelled))
            stops += points.values()
        return {
            "kind": "plane",
            "x": _axis(self.x_label, [0, *(1.05 * x for x, _ in stops)]),
            "y": _axis(self.y_label, [y for _, y in stops]),
            "series": series,
            "stops": stops,
            "labelled": True,
        }

    def table(self) -> Table:
        table = [["", self.x_label, self.y_label]]
        for series, points in self.series.items():
            for name, point in points.items():
                label = f"{name}, {series}" if len(self.series) > 1 else name
                table.append([label, *map(format_number, point)])
        return table


def format_number(value: float | None) -> str:
    """Return the number to four digits, a dash for None and for what is not finite."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.4g}"


def json_numbers(values: Iterable[float]) -> list[float | None]:
    """Return numbers to six digits, None where one is not finite: JSON has no NaN."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _names(series: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(series.values())))


def series_table(
    corner: str, series: Mapping[str, Mapping[str, Any]], text: Callable[[Any], str] = format_number
) -> Table:
    """Return a table with a row for each name and a column for each series; `text` gets None for what one lacks."""
    table = [[corner, *series]]
    for name in _names(series):
        values = [column.get(name) for column in series.values()]
        table.append([name, *map(text, values)])
    return table


def _series(name: str, lines: Iterable[Iterable[Any]], points: Iterable[Any] = ()) -> Drawing:
    """Return a series: lines of (x, y) or (x, y, low, high), and named points (x, y, name)."""
    numbers = [[json_numbers(point) for point in line] for line in lines]
    return {
        "name": name,
        "lines": numbers,
        "points": [[*json_numbers((x, y)), label] for x, y, label in points],
    }


def _axis(label: str, values: Iterable[float]) -> Drawing:
    known = list(filter(math.isfinite, values)) or [0.0, 1.0]
    low = min(known)
    high = max(known)
    if high - low <= ROUNDING * max(abs(low), abs(high)):
        margin = abs(low) / 10 or 0.5
        low = low - margin
        high = high + margin
    return {"label": label, "range": [low, high]}


def _constant_sentence(
    title: str, series: Mapping[str, Iterable[float]], where: str, resolution: float
) -> str:
    """Return a sentence with each series' constant value; empty if one varies beyond the resolution, or many differ."""
    constants = {}
    for name, values in series.items():
        known = list(filter(math.isfinite, values))
        if not known:
            return ""
        low = min(known)
        high = max(known)
        if high - low > max(resolution, ROUNDING * max(abs(low), abs(high))):
            return ""
        middle = (low + high) / 2
        if resolution:
            middle = round(middle / resolution) * resolution + 0.0  # not -0
        constants[name] = format_number(middle)
    if not constants:
        return ""
    if len(set(constants.values())) == 1:
        return f"{title}: {next(iter(constants.values()))} {where}."
    if len(constants) > MAX_NAMED_CONSTANTS:
        return ""
    texts = [f"{value} for {name}" for name, value in constants.items()]
    return f"{title}: {', '.join(texts)}, {where}."
