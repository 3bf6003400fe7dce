"""Progress on stderr: bars in a terminal, elsewhere a line a minute for log files."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
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
SECONDS_BETWEEN_LINES = 60.0


class ProgressLines:
    """Prints at most one line a minute, the first after a minute, so that short work prints nothing."""

    def __init__(self) -> None:
        self.begun = self.printed = time.monotonic()
        self.first: float | None = None

    def update(self, done: float, total: int, step: str) -> None:
        """Print the step, how much is done, and the time left, which is estimated from the steps of this process."""
        if self.first is None:
            self.first = done  # above 0 if measurements were resumed
        spent, new, shown = time.monotonic() - self.begun, done - self.first, round(done, 1)
        left = f", {_rounded(spent / new * (total - done))} left" if new > 0 and shown < total else ""
        self.print(f"{step}: {shown:g} of {total}{left}")

    def print(self, text: str) -> None:
        """Print a line if the last one is a minute ago. A stderr that is closed is no reason to stop."""
        now = time.monotonic()
        if now - self.printed >= SECONDS_BETWEEN_LINES:
            self.printed = now
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)


def _rounded(seconds: float) -> str:
    """Return a time as h:mm:ss."""
    return str(timedelta(seconds=round(seconds)))


def track_steps(steps: Iterable[T], title: str, total: int) -> Iterable[T]:
    """Iterate over steps and show the progress."""
    if sys.stderr.isatty():
        yield from track(steps, title, total, console=Console(stderr=True), transient=True)
        return
    lines = ProgressLines()
    for done, step in enumerate(steps):
        lines.update(done, total, title)
        yield step


@contextmanager
def spinner(title: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner with the elapsed time.

    Yields a function that takes the name of the current step.
    """
    if not sys.stderr.isatty():
        lines = ProgressLines()
        yield lambda step: lines.print(f"{title}: {step}")
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title)
        yield lambda step: bar.update(task, description=f"{title}: {step}")


@contextmanager
def progress_bar(title: str, show: bool = True) -> Iterator[Callable[[float, int, str], None]]:
    """Show a progress bar, if `show`.

    Yields a function that takes the number of finished steps, the number of all steps and the name of the current one.
    """
    if not show:
        yield lambda done, total, step: None
        return
    if not sys.stderr.isatty():
        yield ProgressLines().update
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title)

        def update(done: float, total: int, step: str) -> None:
            bar.update(task, completed=round(done, 1), total=total, description=step)

        yield update
