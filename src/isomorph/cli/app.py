"""The cyclopts application, and the options, limits and progress bars that commands share."""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import App, Parameter, Token
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

import isomorph as iso
from isomorph.errors import UserError

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., None])
app = App(
    name="isomorph",
    help="Change the form of a vision model, keep its function.",
    version=iso.__version__,
    exit_on_error=False,
    print_error=False,
    default_parameter=Parameter(negative_iterable=()),
)


def _parse_whole_number(kind: type, tokens: Sequence[Token]) -> int:
    """Parse a whole number. Raises: ValueError for a fraction, which cyclopts would round."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value} is not a whole number") from None


WholeNumber = Annotated[int, Parameter(converter=_parse_whole_number)]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON.")]
Model = Annotated[
    str,
    Parameter(help="Name of a timm model, a checkpoint written by isomorph (.safetensors), or the folder of a run."),
]
Root = Annotated[Path | None, Parameter(help="Folder of the data; by default $ISOMORPH_DATA, else ./data.")]
Weights = Annotated[
    Path | None, Parameter(help="Checkpoint to load into the timm model instead of its public weights.")
]
Device = Annotated[str, Parameter(help="Device to run on: auto, cpu, cuda, cuda:1, ...")]


LIMITS: dict[str, float] = {
    "atol": 1e6,
    "batch": 2**16,
    "batch_size": 2**16,
    "classes": 10**7,
    "limit": 10**9,
    "megabytes": 1000,
    "recalibrate": 10**6,
    "rfc": 100,
    "samples": 10**7,
    "seconds": 24 * 60 * 60,
    "seed": 2**31 - 1,
    "seeds": 2**31 - 1,
    "severity": 5,
    "size": 2**13,
    "workers": 256,
}
"""Largest allowed value of every numeric option, by name; the same in all commands."""


def check_limits(command: Command) -> Command:
    """Decorate a command so that values beyond LIMITS, infinite or NaN raise UserError before it runs."""

    @functools.wraps(command)
    def checked(*arguments: Any, **options: Any) -> None:
        for name, limit in LIMITS.items():
            _check_limit(name, options.get(name), limit)
        command(*arguments, **options)

    return checked  # type: ignore[return-value]


def _check_limit(name: str, value: Any, limit: float) -> None:
    """Raise UserError if a number, or one of several, is not finite or is beyond the limit."""
    if isinstance(value, list | tuple):
        for number in value:
            _check_limit(name, number, limit)
    elif isinstance(value, int | float) and not abs(value) <= limit:
        raise UserError(f"--{name.replace('_', '-')} {value:,g} is out of range; give at most {limit:,}")


def display_name(model: str, pretrained: bool) -> str:
    """Return the name of a model in results, which says when its weights are random."""
    return model if pretrained else f"{model} (random weights)"


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
def progress_bar(title: str) -> Iterator[Callable[[float, int, str], None]]:
    """Show a progress bar if stderr is a terminal.

    Yields a function that takes the number of finished steps, the number of all steps and the name of the current one.
    """
    console, quiet = Console(stderr=True), not sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task(title)

        def update(done: float, total: int, step: str) -> None:
            bar.update(task, completed=round(done, 1), total=total, description=step)

        yield update
