"""What commands print: JSON, tables, and on stderr progress: bars in a terminal, elsewhere a line a minute."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from rich import progress as rich_progress
from rich.console import Console
from rich.markup import escape

import isomorph as iso
from isomorph.cli.messages import name_options
from isomorph.json_values import json_values
from isomorph.terminal_tables import print_table, printable, say

T = TypeVar("T")
SECONDS_BETWEEN_LINES = 60.0


def show(json_: bool, value: Any, *texts: str | Sequence[Sequence[str]]) -> None:
    """Print a value as JSON, or the texts and tables that say the same; null stands for NaN and infinity in JSON."""
    if json_:
        print(json.dumps(json_values(value), default=str))
        return
    for text in texts:
        if isinstance(text, str):
            say(name_options(text, *COMMAND[:1]))
        else:
            print_table(text)


# The words of the command that runs.
COMMAND: list[str] = []


def page_footer() -> str:
    """Return the footer of a page: versions and the date, and on a line of its own the command that writes the page."""
    import torch

    return (
        f"isomorph {iso.__version__}, torch {torch.__version__}, {time.strftime('%Y-%m-%d %H:%M')}. "
        "This file loads nothing from the network. Made by:\n" + shlex.join(["isomorph", *COMMAND])
    )


def page_line(out: object, size: int) -> str:
    """Return the line on a page that was written, with its size in bytes."""
    return f"page: {out}  ({size / 1e6:.2f} MB; open it in a browser)"


class ProgressLines:
    """Prints at most one line a minute, the first after a minute, so that short work prints nothing."""

    def __init__(self) -> None:
        self.begun = self.printed = time.monotonic()
        self.first: float | None = None

    def update(self, done: float, total: int, step: str) -> None:
        """Print the step, how much is done, and the time left, which is estimated from the steps of this process."""
        if self.first is None:
            self.first = done  # above 0 if measurements were resumed
        now = time.monotonic()
        if now - self.printed < SECONDS_BETWEEN_LINES:
            return
        self.printed = now
        line = step
        if total:
            line += f": {round(done, 1):g} of {total}"
        new = done - self.first
        if new > 0:
            seconds = (now - self.begun) / new * (total - done)
            line += f", {timedelta(seconds=round(seconds))} left"
        with suppress(OSError):  # a stderr that is closed is no reason to stop
            say(line, sys.stderr)


@contextmanager
def progress_bar(title: str, show: bool = True) -> Iterator[Callable[[float, int, str], None]]:
    """Show a progress bar; yields a function of steps done, all steps (0 if unknown) and the current one's name."""
    if not show:
        yield lambda done, total, step: None
        return
    if not sys.stderr.isatty():
        yield ProgressLines().update
        return
    columns = (
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    description = rich_progress.TextColumn("{task.description}")
    with rich_progress.Progress(
        description, *columns, console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(title)

        def update(done: float, total: int, step: str) -> None:
            bar.update(
                task,
                completed=round(done, 1),
                total=total or None,
                description=escape(printable(step)),
            )

        yield update


@contextmanager
def spinner(title: str) -> Iterator[Callable[[str], None]]:
    """Show work whose length is not known. Yields a function that takes the name of the current step."""
    with progress_bar(title) as update:
        yield lambda step: update(0, 0, f"{title}: {step}")


def track_steps(steps: Iterable[T], title: str, total: int) -> Iterable[T]:
    """Iterate over steps and show the progress."""
    with progress_bar(title) as update:
        for done, step in enumerate(steps):
            update(done, total, title)
            yield step
