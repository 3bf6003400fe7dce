"""The application, and the options that several commands share."""

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
    """A whole number as it was typed: cyclopts would round a fraction."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value} is not a whole number") from None


WholeNumber = Annotated[int, Parameter(converter=_parse_whole_number)]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print plain JSON for machines.")]
Model = Annotated[str, Parameter(help="A timm model, a checkpoint written by isomorph, or the folder of a run.")]
Root = Annotated[Path | None, Parameter(help="Folder of the data; by default $ISOMORPH_DATA, else ./data.")]
Weights = Annotated[Path | None, Parameter(help="Checkpoint of the base model instead of its public weights.")]
Device = Annotated[str, Parameter(help="auto, cpu, cuda, cuda:1, ...")]


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
"""The largest number that an option takes, by its name, in every command."""


def check_limits(command: Command) -> Command:
    """A command that rejects numbers beyond LIMITS, and those that are not finite, before it does anything."""

    @functools.wraps(command)
    def checked(*arguments: Any, **options: Any) -> None:
        for name, limit in LIMITS.items():
            _check_limit(name, options.get(name), limit)
        command(*arguments, **options)

    return checked  # type: ignore[return-value]


def _check_limit(name: str, value: Any, limit: float) -> None:
    """Raises: UserError for a number, or one of several, that is not finite or beyond the limit."""
    if isinstance(value, list | tuple):
        for number in value:
            _check_limit(name, number, limit)
    elif isinstance(value, int | float) and not abs(value) <= limit:
        raise UserError(f"--{name.replace('_', '-')} {value:,g} is out of range; give at most {limit:,}")


def display_name(model: str, pretrained: bool) -> str:
    """What a model is called in results: that its weights are random is part of it."""
    return model if pretrained else f"{model} (random weights)"


def track_steps(steps: Iterable[T], title: str, total: int) -> Iterable[T]:
    """Steps with a progress bar, on a terminal."""
    console, quiet = Console(stderr=True), not sys.stderr.isatty()
    return track(steps, title, total, console=console, transient=True, disable=quiet)


@contextmanager
def spinner(title: str) -> Iterator[Callable[[str], None]]:
    """A sign of life and the time it has taken, on a terminal, that is told what is being done."""
    console, quiet = Console(stderr=True), not sys.stderr.isatty()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as shown:
        task = shown.add_task(title)
        yield lambda doing: shown.update(task, description=f"{title}: {doing}")


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float, int, str], None]]:
    """A progress bar, on a terminal, that is told steps done, steps in all, and what is being done."""
    console, quiet = Console(stderr=True), not sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as shown:
        task = shown.add_task(title)

        def tell(done: float, total: int, doing: str) -> None:
            shown.update(task, completed=round(done, 1), total=total, description=doing)

        yield tell
