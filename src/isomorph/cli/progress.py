"""Progress bars on stderr, in a terminal only."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)

T = TypeVar("T")


def track_steps(steps: Iterable[T], title: str, total: int) -> Iterable[T]:
    """Iterate over steps and show a progress bar if stderr is a terminal."""
    console, quiet = Console(stderr=True), not sys.stderr.isatty()
    return track(steps, title, total, console=console, transient=True, disable=quiet)


@contextmanager
def spinner(title: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner with the elapsed time if stderr is a terminal.

    Yields a function that takes the name of the current step.
    """
    console, quiet = Console(stderr=True), not sys.stderr.isatty()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task(title)
        yield lambda step: bar.update(task, description=f"{title}: {step}")


@contextmanager
def progress_bar(title: str, show: bool = True) -> Iterator[Callable[[float, int, str], None]]:
    """Show a progress bar if stderr is a terminal, and `show`.

    Yields a function that takes the number of finished steps, the number of all steps and the name of the current one.
    """
    console, quiet = Console(stderr=True), not (show and sys.stderr.isatty())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task(title)

        def update(done: float, total: int, step: str) -> None:
            bar.update(task, completed=round(done, 1), total=total, description=step)

        yield update
