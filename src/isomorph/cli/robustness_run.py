"""What `isomorph robustness` checks, measures and prints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from isomorph.cli.progress import progress_bar
from isomorph.data.corruptions.corrupt import SEVERITIES
from isomorph.data.sources import Source
from isomorph.distributed import Runtime
from isomorph.suites.robustness.cells import wanted_cells
from isomorph.suites.robustness.published import open_published
from isomorph.suites.robustness.run import robustness
from isomorph.suites.robustness.scores import severity_table, summary_lines
from isomorph.terminal_tables import print_table


def check_published_files(
    suite: str, folder: Path | None, corruptions: Sequence[str], severities: Sequence[int], extra: bool
) -> None:
    """Raise UserError if published corrupted images are asked for, and files of them are missing."""
    if published := open_published(suite, folder and folder.expanduser()):
        published.check_files(wanted_cells(corruptions or None, severities or SEVERITIES, extra))


def measure(
    model: nn.Module, source: Source | None, suite: str, runtime: Runtime, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the result of `iso.robustness`; the main process shows the progress."""
    with progress_bar("cells", show=runtime.is_main) as progress:
        return robustness(model, source, suite, progress=progress, runtime=runtime, **options)


def print_result(result: Mapping[str, Any]) -> None:
    """Print accuracy by corruption and severity, and the summary."""
    print_table(severity_table(result))
    print("\n" + "\n".join(summary_lines(result)))
