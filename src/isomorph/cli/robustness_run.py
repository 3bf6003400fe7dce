"""What `isomorph robustness` checks and prints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isomorph.data.corruptions.corrupt import SEVERITIES
from isomorph.suites.robustness.published import open_published
from isomorph.suites.robustness.run import wanted_cells
from isomorph.suites.robustness.scores import severity_table, summary_lines
from isomorph.terminal_tables import print_table


def check_published_files(
    suite: str, folder: Path | None, corruptions: Sequence[str], severities: Sequence[int], extra: bool
) -> None:
    """Raise UserError if published corrupted images are asked for, and files of them are missing."""
    if published := open_published(suite, folder and folder.expanduser()):
        published.check_files(wanted_cells(corruptions or None, severities or SEVERITIES, extra))


def print_result(result: Mapping[str, Any]) -> None:
    """Print accuracy by corruption and severity, and the summary."""
    print_table(severity_table(result))
    print("\n" + "\n".join(summary_lines(result)))
