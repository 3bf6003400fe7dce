"""The application, and the options that several commands share."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import track

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


def bar(steps: Iterable[T], title: str, total: int) -> Iterable[T]:
    """Steps with a progress bar, on a terminal."""
    console, quiet = Console(stderr=True), not sys.stderr.isatty()
    return track(steps, title, total, console=console, transient=True, disable=quiet)
