"""Tables of metrics, and printing in a terminal: control characters in names from files are escaped here."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

# Measured numbers by name; a row of values of any kind by name; rows of cells, the head first.
Metrics = dict[str, float]
Row = dict[str, Any]
Rows = list[Row]
Table = list[list[str]]

# What follows the name of a model whose weights are random.
RANDOM_WEIGHTS = " (random weights)"

MetricFormats = dict[str, tuple[str, Callable[[Any], str]]]


def _formats(form: str, **labels: str) -> MetricFormats:
    text = f"{{:{form}}}".format
    return {name: (label, text) for name, label in labels.items()}


def _millions(count: float) -> str:
    return f"{count / 1e6:,.1f}"


def _average_precision_formats(kind: str) -> MetricFormats:
    """Return the formats of COCO's APs of boxes or masks: at thresholds of the IoU, and by size of the object."""
    labels = {f"{kind}_ap": f"{kind} AP (%)"}
    for threshold in ("50", "75"):
        labels[f"{kind}_ap{threshold}"] = f"{kind} AP{threshold} (%)"
    for size in ("small", "medium", "large"):
        labels[f"{kind}_ap_{size}"] = f"{kind} AP, {size} (%)"
    return _formats(".1f", **labels)


# Label and format of every metric, in the order of the tables.
METRIC_FORMATS: MetricFormats = {
    **_formats(".2f", top1="top-1 (%)", top5="top-5 (%)"),
    **_formats(
        ".4f",
        nll="NLL (nats)",
        reconstruction="reconstruction (MSE of hidden patches)",
        alignment="alignment (smooth L1 with the teacher)",
    ),
    **_formats(".5f", denoising="error of the predicted noise (MSE)"),
    **_formats(".3f", fid="FID"),
    **_formats(".6f", kid="KID", kid_std="standard deviation of KID"),
    **_formats(".4f", frechet_distance="Frechet distance"),
    **_formats(
        ".6f",
        kernel_distance="kernel distance",
        kernel_distance_std="standard deviation of kernel distance",
    ),
    **_formats(".4f", precision="precision", recall="recall"),
    **_formats(".2f", ece="ECE (%, 15 bins)"),
    **_formats(".1f", probability="probability (%)"),
    **_formats(
        ".2f",
        miou="mean IoU (%)",
        mean_accuracy="mean accuracy (%)",
        pixel_accuracy="pixel accuracy (%)",
        iou="IoU (%)",
        share="share of pixels (%)",
    ),
    **_formats(",.0f", images="images"),
    **_formats(
        ".2f",
        accuracy="accuracy (%)",
        f1="F1 (%)",
        matthews="Matthews correlation (%)",
        spearman="Spearman correlation (%)",
        pearson="Pearson correlation (%)",
    ),
    **_formats(",.0f", examples="examples"),
    **_formats(".4f", masked_loss="loss of masked words (nats)"),
    **_formats(
        ".2f",
        masked_accuracy="masked words predicted (%)",
        perplexity="perplexity of masked words",
    ),
    **_formats(",.0f", sequences="sequences"),
    **_average_precision_formats("box"),
    **_average_precision_formats("mask"),
    **_formats(",.0f", real_images="real images", parameters="parameters"),
    "macs": ("M MACs per image", _millions),
    "step_macs": ("M MACs per pass, whatever the batch", _millions),
    **_formats(",.0f", images_per_second="images / s"),
}

POINT_FORMATS: MetricFormats = {
    "suite": ("suite", str),
    "size": ("size", lambda size: " x ".join(map(str, size))),
    "rfc": ("rfc", "{:g}".format),
}

PIPE_WIDTH = 200  # columns of a table that is not printed in a terminal


# Characters that move a terminal's cursor, change the direction of the text, or cannot be encoded.
_UNPRINTABLE = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """Return a text for a terminal with its control characters escaped; line breaks and tabs stay."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], str(text))


def say(text: object, file: Any = None) -> None:
    """Print a text with its control characters escaped."""
    print(printable(text), file=file, flush=file is not None)


def _cells(row: Sequence[str]) -> list[str]:
    return [printable(cell).replace("\n", r"\n") for cell in row]


def interval_text(percent: float, images: int) -> str:
    """Return the 95% interval of a share, in percent, that was measured on a number of images, such as "34.2 to 74.2".

    Source: Wilson (1927), "Probable inference", the score interval; images are taken as drawn independently
    """
    z = 1.96
    share = percent / 100
    centre = share + z**2 / (2 * images)
    variance = share * (1 - share) / images + (z / (2 * images)) ** 2
    reach = z * variance**0.5
    scale = 1 + z**2 / images
    low = max(100 * (centre - reach) / scale, 0)
    high = 100 * (centre + reach) / scale
    return f"{low:.1f} to {high:.1f}"


def chance_difference(percent: float, images: int) -> float:
    """Return by how many points two measured shares of this size may differ by chance (95%), images drawn for each."""
    variance = percent * (100 - percent) / images
    return 1.96 * (2 * variance) ** 0.5


def metric_table(title: str, metrics: Mapping[str, float]) -> Table:
    """Return a table with a row for each metric that has a format; top-1 with its interval, if images were counted."""
    rows = [["", title]]
    for key, value in metrics.items():
        if key in METRIC_FORMATS:
            label, text = METRIC_FORMATS[key]
            rows.append([label, text(value)])
    if "top1" in metrics and metrics.get("images"):
        interval = interval_text(metrics["top1"], int(metrics["images"]))
        rows.insert(2, ["95% interval of top-1 (%)", interval])
    return rows


def row_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a line for each row of metrics and names; a dash stands for a value that is missing."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    known = POINT_FORMATS | METRIC_FORMATS
    formats = {name: known.get(name, (name, _plain_text)) for name in names}
    table = [[label for label, _ in formats.values()]]
    for row in rows:
        cells = []
        for name, (_, text) in formats.items():
            value = row.get(name)
            cells.append("-" if value is None else text(value))
        table.append(cells)
    return table


def _plain_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_plain_text, value))
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)


def grid_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each point: suite, size and rfc, then its metrics, a dash for none."""
    given = dict.fromkeys(key for point in points for key in point)
    names = [name for name in given if name in POINT_FORMATS]
    names += [name for name in given if name in METRIC_FORMATS]
    return row_table([{name: point.get(name) for name in names} for point in points])


class _Output(Console):
    """Standard output; a closed pipe is an error for the caller, where rich would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        raise


def count_of(number: int, what: str) -> str:
    """Return a number of things in words, such as "1 epoch" and "2 epochs"."""
    ending = "" if number == 1 else "s"
    return f"{number:,} {what}{ending}"


def print_text_table(rows: Sequence[Sequence[str]]) -> None:
    """Print a table of texts, aligned to the left, a line for each row."""
    cells = list(map(_cells, rows))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(padded).rstrip())


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print a table of numbers, aligned to the right; the first row is its head."""
    head, *body = map(_cells, rows)
    table = RichTable(box=None, pad_edge=False, header_style="bold")
    table.add_column(escape(head[0]), overflow="fold", no_wrap=True)
    for name in head[1:]:
        table.add_column(escape(name), justify="right", overflow="fold")
    for row in body:
        table.add_row(*map(escape, row))
    console = _Output()
    if not console.is_terminal:
        console = _Output(width=PIPE_WIDTH)
    console.print(table)
