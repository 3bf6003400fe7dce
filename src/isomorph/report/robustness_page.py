"""The page of `isomorph robustness`: a metric by corruption and severity, of one model or next to a baseline."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from isomorph.report import guides
from isomorph.report.charts import Table
from isomorph.report.findings import robustness_finding
from isomorph.report.html import Section, write_page
from isomorph.report.robustness_charts import AccuracyCells, robustness_charts, robustness_table, shared_means


def write_robustness(
    path: Path,
    results: Mapping[str, AccuracyCells],
    metric: str,
    measured: Sequence[str],
    table: Table,
    footer: str = "",
) -> int:
    """Write the page and return its size in bytes. `measured` are lines on the images, `table` has every corruption.

    `results` are the cells of the baseline, if there is one, and of the model, by name; `metric` is what they hold, in
    words ("top-1", "mean IoU").

    Raises: UserError when it cannot be written.
    """
    sections = [
        Section("Clean and corrupted images", " ".join(measured), table=robustness_table(results, metric)),
        Section("By corruption and severity", charts=robustness_charts(results, metric), guide=guides.ROBUSTNESS),
        Section("Every corruption and category", "Columns are severities.", table=table),
    ]
    return write_page(path, "Robustness", robustness_finding(shared_means(results), metric), sections, footer)
