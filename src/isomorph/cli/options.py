"""Options that several commands share, each declared once: their types, help texts and limits.

A group is a dataclass: a command takes it as one keyword argument, for example `weights: WeightsOptions`, and each of
its fields becomes an option. To add an option to every command of a group, add a field with its help text, and the
largest value of a number to LIMITS.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter, Token

from isomorph.checkpoints.paths import parse_hub_name, require_writable
from isomorph.errors import UserError

Command = TypeVar("Command", bound=Callable[..., None])


def _parse_whole_number(kind: type, tokens: Sequence[Token]) -> int:
    """Return a whole number as it was typed. Raises: UserError for a fraction, which cyclopts would round."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise UserError(f"{tokens[0].keyword} {tokens[0].value} must be a whole number") from None


WholeNumber = Annotated[int, Parameter(converter=_parse_whole_number)]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON.")]
Model = Annotated[
    str,
    Parameter(
        help="Name of a timm model, a checkpoint of isomorph or of another program, the folder of a run, or a model on "
        "the Hugging Face hub as hf-hub:OWNER/NAME."
    ),
]
Root = Annotated[Path | None, Parameter(help="Folder of the data; by default $ISOMORPH_DATA, else ./data.")]
Weights = Annotated[
    Path | None, Parameter(help="Checkpoint to load into the timm model instead of its public weights.")
]
Split = Annotated[
    float | None,
    Parameter(help="Fraction of every class to test on, for a folder without test images of its own; 1 takes all."),
]
Pretrained = Annotated[
    bool, Parameter(help="Load the timm model's public weights; --no-pretrained starts from random ones.")
]
MaxImages = Annotated[
    WholeNumber | None,
    Parameter(help="Use only this many test images, evenly spaced over the classes, for a quick trial."),
]
Overwrite = Annotated[bool, Parameter(negative="", help="Replace --out if it exists.")]
Device = Annotated[str, Parameter(help="Device to run on: auto, cpu, cuda, cuda:1, ...")]


LIMITS: dict[str, float] = {
    "atol": 1e6,
    "batch": 2**16,
    "batch_size": 2**16,
    "classes": 10**7,
    "loss": 100,
    "max_images": 10**9,
    "images": 10**7,
    "megabytes": 1000,
    "num_classes": 10**7,
    "recalibrate": 10**6,
    "rfc": 100,
    "seconds": 24 * 60 * 60,
    "seed": 2**31 - 1,
    "seeds": 2**31 - 1,
    "setting": 1e6,
    "severity": 5,
    "size": 2**13,
    "split": 1,
    "steps": 10**6,
    "tolerance": 0.5,
    "workers": 256,
}
"""Largest allowed value of every numeric option, by name; the same in all commands."""


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """How to open a checkpoint that isomorph did not write."""

    arch: Annotated[
        str | None,
        Parameter(
            help="Architecture of a checkpoint of another program: a timm model, for example resnet18. Checkpoints of "
            "timm's train script name theirs."
        ),
    ] = None
    num_classes: Annotated[
        WholeNumber | None, Parameter(help="Number of classes, if the checkpoint does not contain it.")
    ] = None
    model_kwargs: Annotated[
        list[str] | None,
        Parameter(
            consume_multiple=True,
            help="More arguments of timm.create_model that the checkpoint does not contain, for example img_size=96 "
            "num_heads=6.",
        ),
    ] = None
    ema: Annotated[
        bool, Parameter(help="Load a checkpoint's averaged weights (EMA) if it has any; --no-ema loads the last ones.")
    ] = True


def check_limits(command: Command) -> Command:
    """Decorate a command so that values beyond LIMITS, infinite or NaN raise UserError before it runs."""

    @functools.wraps(command)
    def checked(*arguments: Any, **options: Any) -> None:
        _check_options(options)
        command(*arguments, **options)

    return checked  # type: ignore[return-value]


def _check_options(options: dict[str, Any]) -> None:
    """Raise UserError for an option beyond its limit, alone or in a group."""
    for name, value in options.items():
        if name in LIMITS:
            _check_limit(name, value, LIMITS[name])
        elif dataclasses.is_dataclass(value):
            _check_options({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})


def _check_limit(name: str, value: Any, limit: float) -> None:
    """Raise UserError if a number, or one of several, is not finite or is beyond the limit."""
    if isinstance(value, list | tuple):
        for number in value:
            _check_limit(name, number, limit)
    elif name == "max_images" and value is not None and value < 1:
        raise UserError(f"--max-images {value} must be at least 1")
    elif isinstance(value, float) and math.isnan(value):
        raise UserError(f"--{name.replace('_', '-')} nan must be a number")
    elif isinstance(value, int | float) and not abs(value) <= limit:
        raise UserError(f"--{name.replace('_', '-')} {value:,g} is out of range; give at most {limit:,}")


def _check_suffix(option: str, path: Path, suffixes: Sequence[str]) -> None:
    """Raise UserError for a file with another suffix than these."""
    if path.suffix not in suffixes:
        raise UserError(f"{option} {path} must end in {' or '.join(suffixes)}")


def check_out(
    out: Path, overwrite: bool, source: Path | None = None, suffixes: Sequence[str] = (".safetensors",)
) -> None:
    """Check that a model can be written to --out; `source` is the file that it is made from.

    Raises: UserError for another suffix than these, the file it is made from, or one that exists.
    """
    _check_suffix("--out", out, suffixes)
    if not out.exists():
        return
    if source and source.exists() and out.samefile(source):
        raise UserError(f"--out {out} is the model that is changed; give another file")
    if out.is_file() and not overwrite:
        raise UserError(f"--out {out} exists; give --overwrite to replace it, or another file")


def choose_page(out: Path | None, usual: str, overwrite: bool, folder: str = "") -> Path:
    """Return the file for a page: --out, or `usual`, with a number if there is one of that name already.

    `folder` ends the name of a folder that is written next to the page, and that must not exist either.

    Raises: UserError for a page that does not end in .html, that cannot be written, or one given as --out that exists,
        without --overwrite.
    """
    if out:
        _check_suffix("--out", out, (".html",))
    path, number = out or Path(usual), 2
    while not overwrite and (path.exists() or (folder and path.with_name(path.stem + folder).exists())):
        if out:
            what = out if out.exists() else out.with_name(out.stem + folder)
            raise UserError(f"--out: {what} exists; give --overwrite to replace it, or another file")
        path, number = Path(usual).with_stem(f"{Path(usual).stem}-{number}"), number + 1
    require_writable(path)
    return path


def check_page(page: Path | None, overwrite: bool) -> None:
    """Raise UserError for a --page that does not end in .html, cannot be written, or exists without --overwrite."""
    if page is None:
        return
    _check_suffix("--page", page, (".html",))
    if page.exists() and not overwrite:
        raise UserError(f"--page {page} exists; give --overwrite to replace it, or another file")
    require_writable(page)


def check_figures(folder: Path | None, overwrite: bool) -> None:
    """Raise UserError if --figures names a folder that has files already, without --overwrite."""
    if folder and not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"--figures {folder} is not empty; give --overwrite to replace its files, or another folder")


def out_next_to(model: Path | str, ending: str) -> Path:
    """Return NAME with an ending in the folder of a file or run; of a model that is none, in the working folder."""
    hub = parse_hub_name(model)
    path = Path(model).resolve() if Path(model).exists() else Path(Path(hub.repository if hub else model).name)
    return path.with_name(path.name.removesuffix(".safetensors") + ending)


def display_name(model: str, pretrained: bool) -> str:
    """Return the name of a model in results, which says when its weights are random."""
    return model if pretrained else f"{model} (random weights)"
