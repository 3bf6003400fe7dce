"""Output shared by the commands that write an HTML page: its footer, the figures, and the printed summary."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import isomorph as iso
from isomorph.cli.json_output import print_json
from isomorph.report.charts import Table
from isomorph.report.figures import save_figures
from isomorph.report.html import Section
from isomorph.terminal_tables import print_table


def page_footer() -> str:
    """Return the footer of a page: versions and the date."""
    versions = f"isomorph {iso.__version__}, torch {torch.__version__}, {time.strftime('%Y-%m-%d %H:%M')}"
    return f"{versions}. This file loads nothing from the network."


def save_figures_and_print(
    out: Path,
    size: int,
    sections: list[Section],
    figures: Path | None,
    json_: bool,
    measured: Mapping[str, Any] | None = None,
    tables: Sequence[Table] = (),
) -> None:
    """Save the charts of a page to the folder `figures`, if given, and print what was measured and written.

    `out` and `size` are the page's path and its size in bytes, `measured` further values for JSON, `tables` for text.
    """
    saved = save_figures(figures, sections) if figures else []
    if json_:
        written = {"out": str(out), "bytes": size, "figures": [str(path) for path in saved]}
        print_json({**written, **(measured or {})})
        return
    for table in tables:
        print_table(table)
        print()
    figures_line = f"\nfigures: {len(saved)} files in {figures}" if figures else ""
    print(f"page: {out}  ({size / 1e6:.2f} MB; open it in a browser){figures_line}")
