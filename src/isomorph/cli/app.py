"""The application, and the options that several commands share."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import App, Parameter
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

T = TypeVar("T")
app = App(
    name="isomorph",
    help="Change the form of a vision model, keep its function.",
    version=iso.__version__,
    exit_on_error=False,
    print_error=False,
    default_parameter=Parameter(negative_iterable=()),
)
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print plain JSON for machines.")]
Model = Annotated[str, Parameter(help="A timm model, a checkpoint written by isomorph, or the folder of a run.")]
Root = Annotated[Path | None, Parameter(help="Folder of the data; by default $ISOMORPH_DATA, else ./data.")]
Weights = Annotated[Path | None, Parameter(help="Checkpoint of the base model instead of its public weights.")]
Device = Annotated[str, Parameter(help="auto, cpu, cuda, cuda:1, ...")]


def called(model: str, pretrained: bool) -> str:
    """What a model is called in results: that its weights are random is part of it."""
    return model if pretrained else f"{model} (random weights)"


def bar(steps: Iterable[T], title: str, total: int) -> Iterable[T]:
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
def steps_bar(title: str) -> Iterator[Callable[[float, int, str], None]]:
    """A progress bar, on a terminal, that is told steps done, steps in all, and what is being done."""
    console, quiet = Console(stderr=True), not sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as shown:
        task = shown.add_task(title)

        def tell(done: float, total: int, doing: str) -> None:
            shown.update(task, completed=round(done, 1), total=total, description=doing)

        yield tell
