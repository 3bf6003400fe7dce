"""A published table or figure: what the paper has next to what runs measured, as text and as charts."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from isomorph.json_values import JsonObject, is_number
from isomorph.lab.report.charts import Chart, Line, Panel, Points, Scatter
from isomorph.lab.report.evaluations import SUITE_COLUMNS
from isomorph.lab.report.run_files import RunLog
from isomorph.terminal_tables import Row, Table, interval_text

# Titles of the columns of published tables, by their names in recipes/published/*.yaml.
COLUMNS: dict[str, str] = {
    "part": "part",
    "data": "data",
    "teacher": "teacher",
    "layout": "blocks",
    "ratio": "ratio",
    "kernel": "kernel",
    "shared": "shared blocks",
    "heads": "heads",
    "width": "width",
    "blocks": "blocks",
    "train_gating": "gates trained",
    "conv": "convolutional start",
    "train_gpsa": "GPSA trained",
    "use_gpsa": "GPSA used",
    "gpsa_layers": "GPSA layers",
    "locality": "locality",
    "peak_lr": "peak rate",
    "t1": "recast at (epoch)",
    "t2": "epochs after",
    "minutes": "time (mn)",
    "original_size": "original size",
    "original_time": "original time (x)",
    "original_top1": "original top-1 (%)",
    "train_size": "train size",
    "size": "size",
    "drop_path": "drop path",
    "pretraining_epochs": "pre-training epochs",
    "epochs": "epochs",
    "fraction": "images of each class (%)",
    "params": "parameters (M)",
    "params_pair": "parameters (M)",
    "gflops": "FLOPs (G)",
    "throughput": "images / s",
    "tpu_days": "TPUv3 core days",
    "memory_gib": "memory (G)",
    "hours": "time (hours)",
    "time": "time (x)",
    "epoch_seconds": "epoch (s)",
    "iteration_seconds": "iteration (s)",
    "converge_epochs": "converged (epoch)",
    "crop_ratio": "crop ratio",
    "top1": "top-1 (%)",
    "top5": "top-5 (%)",
    "gap1": "top-1 gap (%)",
    "gap5": "top-5 gap (%)",
    "real_top1": "ReaL top-1 (%)",
    "precision1": "precision@1 (%)",
    "score": "score (%)",
    "miou": "mean IoU (%)",
    "box_ap": "box AP (%)",
    "mask_ap": "mask AP (%)",
    "fid": "FID",
    "gain": "gain",
    "rfc_ratio": "RFC ratio",
    "rfc_top1": "top-1 with RFC (%)",
    "imagenet_c": "ImageNet-C (%)",
    "imagenet_a": "ImageNet-A (%)",
    "imagenet_r": "ImageNet-R (%)",
    "imagenet_s": "ImageNet-S (%)",
    "v2_f": "V2 frequency (%)",
    "v2_thr": "V2 threshold (%)",
    "v2_top": "V2 top (%)",
}

# Columns that a run measures, and the keys of its log that have the number, the first that is there.
MEASURED: dict[str, tuple[str, ...]] = {
    "top1": ("top1",),
    "top5": ("top5",),
    "precision1": ("top1",),
    "score": ("matthews", "spearman", "accuracy"),
    "miou": ("miou",),
    "box_ap": ("box_ap",),
    "mask_ap": ("mask_ap",),
    "epoch_seconds": ("seconds",),
}

# Columns of what a run or an evaluation measures, for which the paper's number never stands in.
_MEASURABLE = {*MEASURED, *SUITE_COLUMNS.values(), "rfc_top1"}


@dataclass(frozen=True)
class RunResult:
    """What a run measured: by column of its table, and how long it took."""

    run: str
    measured: Mapping[str, float]
    differs: str = ""
    """What of its recipe is not the published row's, in words; empty if it is the row's."""
    epochs: int = 0
    hours: float = 0.0
    images: int | None = None

    @classmethod
    def of(cls, log: RunLog, columns: Sequence[str], differs: str) -> "RunResult":
        """Return the last evaluation of a run, and the sums of its log."""
        seconds = []
        latest: Row = {}
        for row in log.epochs:
            if not row.get("epoch"):  # before training
                continue
            latest |= {key: value for key, value in row.items() if is_number(value)}
            if is_number(row.get("seconds")):
                seconds.append(row["seconds"])
        if seconds:
            latest["seconds"] = sum(seconds) / len(seconds)
        measured = {}
        for column in columns:
            for key in MEASURED.get(column, ()):
                if key in latest:
                    measured[column] = float(latest[key])
                    break
        return cls(
            run=log.name,
            measured=measured,
            differs=differs,
            epochs=int(latest.get("epoch", 0)),
            hours=sum(seconds) / 3600,
            images=log.test_images,
        )

    def as_dict(self) -> JsonObject:
        """Return the fields as plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class TableRow:
    """A row of a published table, the commands that make it, and what runs of it measured."""

    label: str
    values: Mapping[str, Any]
    """What is printed, by column; None for an empty cell."""
    recipe: str | None = None
    """The recipe whose run has the row's numbers; None for a quoted number or an evaluation."""
    before: str | None = None
    """The recipe whose model the run of `recipe` starts from."""
    evaluated: str | None = None
    """The recipe or model whose evaluations have the row's numbers."""
    sizes: tuple[int, ...] = ()
    """Sides of the images of those evaluations; empty for the model's own."""
    commands: Sequence[str] = ()
    """Commands that make the row, first to last; none for a quoted number."""
    runs: Sequence[RunResult] = field(default=())

    def as_dict(self) -> JsonObject:
        """Return the row as plain values, for JSON."""
        return {
            "row": self.label,
            "recipe": self.recipe,
            "expected": dict(self.values),
            "commands": list(self.commands),
            "runs": [result.as_dict() for result in self.runs],
        }


def published_table(columns: Sequence[str], rows: Sequence[TableRow]) -> Table:
    """Return the rows as text: the paper's columns, and where there are runs what they measured.

    A run that differs from its row has no number under "measured"; its numbers stand next to what differs.
    """
    printed: set[str] = set()
    measured: set[str] = set()
    results: list[RunResult] = []
    for row in rows:
        printed.update(column for column, value in row.values.items() if value is not None)
        results += row.runs
    for result in results:
        measured.update(result.measured)
    shown = [column for column in columns if column in printed]
    measurable = [column for column in columns if column in measured]
    head = ["row", *(COLUMNS[column] for column in shown)]
    if results:
        head += ["run", *(f"measured {COLUMNS[column]}" for column in measurable)]
        head += ["epochs", "hours", "differs from the row"]
    table = [head]
    for row in rows:
        cells = [row.label, *(_text(row.values.get(column)) for column in shown)]
        if not row.runs:
            unmeasured = ["-"] * (len(head) - len(cells))
            table.append(cells + unmeasured)
        for result in row.runs:
            table.append([*cells, *_result_cells(result, measurable)])
    return table


def _result_cells(result: RunResult, measurable: Sequence[str]) -> list[str]:
    numbers = [_measured_text(result, column) for column in measurable]
    note = result.differs
    if note:
        values = [
            f"{COLUMNS[column].removesuffix(' (%)')} {number}"
            for column, number in zip(measurable, numbers, strict=True)
            if number != "-"
        ]
        if values:
            note = f"{note}: {', '.join(values)}"
        numbers = ["-"] * len(numbers)
    hours = "-"
    if result.hours:
        hours = f"{result.hours:.2f}"
    return [result.run, *numbers, str(result.epochs or "-"), hours, note]


def _measured_text(result: RunResult, column: str) -> str:
    value = result.measured.get(column)
    if value is None:
        return "-"
    text = f"{value:.2f}"
    if column in ("top1", "precision1") and result.images:
        return f"{text} ({interval_text(value, result.images)})"
    return text


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return str(value)


def command_lines(rows: Sequence[TableRow]) -> Iterator[str]:
    """Yield a line for each row that can be made: its label and its commands."""
    for row in rows:
        if row.commands:
            yield f"{row.label}: {' && '.join(row.commands)}"


def published_charts(
    title: str, charts: Sequence[Mapping[str, str]], rows: Sequence[TableRow]
) -> list[Chart]:
    """Return the charts of a table, published and measured: lines of means over fractions of the images, else points.

    Runs that differ from their rows are left out. Where x is the time of training, measured runs have a chart of their
    own, by hours: a paper's times are multiples of one run's.
    """
    drawn: list[Chart] = []
    origins = {"published": "time of training (x)", "measured": "hours of training"}
    for chart in charts:
        x = chart["x"]
        y_label = COLUMNS[chart["y"]]
        named: Points = {}
        for origin, time_label in origins.items():
            points = _points(rows, chart, origin == "measured")
            if points and x == "time":
                drawn.append(Scatter(f"{title}, {origin}", time_label, y_label, points))
            for name, own in points.items():
                named[f"{name}, {origin}"] = own
        if x == "time" or not named:
            continue
        if x == "fraction":
            lines = {name: _mean_line(points.values()) for name, points in named.items()}
            drawn.append(Panel(title, COLUMNS[x], y_label, lines))
        else:
            drawn.append(Scatter(title, COLUMNS[x], y_label, named))
    return drawn


def _points(rows: Sequence[TableRow], chart: Mapping[str, str], measured: bool) -> Points:
    """Return {series: {name: (x, y)}} of the rows that have both; a label of several rows gets its x."""
    found: dict[str, list[tuple[str, float, float]]] = {}
    for row in rows:
        series = str(row.values.get(chart.get("by", ""), "rows"))
        for label, values in _values(row, chart["y"], measured):
            x = values.get(chart["x"])
            y = values.get(chart["y"])
            if is_number(x) and is_number(y):
                found.setdefault(series, []).append((label, float(x), float(y)))
    points: Points = {}
    for series, own in found.items():
        labels = Counter(label for label, _, _ in own)
        points[series] = {}
        for label, x, y in own:
            name = label
            if labels[label] > 1:
                name = f"{label} ({x:g})"
            points[series][name] = (x, y)
    return points


def _values(row: TableRow, y: str, measured: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield label and values by column of what the paper has for a row, or of its runs, whose `y` is measured."""
    if not measured:
        yield row.label, row.values
        return
    counted = [result for result in row.runs if not result.differs]
    known: dict[str, Any] = {}
    for column, value in row.values.items():
        if column not in _MEASURABLE:
            known[column] = value
    for result in counted:  # accuracy and robustness are in different files
        known |= result.measured
    for result in counted:
        if y in result.measured:
            yield result.run, {**known, **result.measured, "time": result.hours or None}


def _mean_line(points: Iterable[tuple[float, float]]) -> Line:
    """Return the line of the mean y at every x."""
    ys_at: dict[float, list[float]] = defaultdict(list)
    for x, y in points:
        ys_at[x].append(y)
    xs = sorted(ys_at)
    return Line(xs, [fmean(ys_at[x]) for x in xs])
