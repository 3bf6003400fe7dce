"""The application, and the options that several commands share."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

import isomorph as iso

app = App(
    name="isomorph",
    help="Change the form of a vision model, keep its function.",
    version=iso.__version__,
    exit_on_error=False,
    print_error=False,
    default_parameter=Parameter(negative_iterable=()),
)
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print plain JSON for machines.")]
Weights = Annotated[Path | None, Parameter(help="Checkpoint of the base model instead of its public weights.")]
Device = Annotated[str, Parameter(help="auto, cpu, cuda, cuda:1, ...")]
