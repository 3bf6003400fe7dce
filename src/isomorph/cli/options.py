"""The application, and options that several commands share, each declared once: types, help texts and limits.

A group is a dataclass: a command takes it as one keyword argument, for example `checkpoint: CheckpointOptions`, and
each of its fields becomes an option. To add an option to every command of a group, add a field with its help text, and
the smallest and largest value of a number to LIMITS.
"""

import dataclasses
import functools
import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

from cyclopts import App, Parameter, Token

import isomorph as iso
from isomorph.checkpoints.paths import CHECKPOINTS, HUB, is_function, parse_hub_name, require_new, require_writable
from isomorph.cli.tables import tables
from isomorph.errors import UserError
from isomorph.process import exit_on_interrupt, keep_freed_memory, raise_on_interrupt

app = App(
    name="isomorph",
    help="Change the form of a vision model, keep its function.",
    version=iso.__version__,
    version_format="plaintext",
    exit_on_error=False,
    suppress_keyboard_interrupt=False,
    print_error=False,
    default_parameter=Parameter(negative_iterable=()),
)

Command = TypeVar("Command", bound=Callable[..., None])
T = TypeVar("T")
EXPORTED = (".onnx", ".pt2")
"""Suffixes of exported models."""
SIZE_FIELDS = ("data.size", "model.recast.grid_size")
"""Recipe fields that are sizes."""
_SIZE_OPTIONS = ("--size", "--grid-size", *(f"--{field}" for field in SIZE_FIELDS))
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?")
_SIZE = re.compile(r"[\[(]?\s*(-?\d+)\s*(?:[x, ]\s*(-?\d+)\s*)?[\])]?", re.IGNORECASE)


def _parse_whole_number(kind: type, tokens: Sequence[Token]) -> int:
    """Return a whole number as it was typed. Raises: UserError for a fraction, which cyclopts would round."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise UserError(f"{tokens[0].keyword} {tokens[0].value} must be a whole number") from None


def parse_size(option: str, text: str) -> tuple[int, int]:
    """Return the height and width that a text such as 96, 96x128 or [96, 128] stands for.

    Raises: UserError, which names the option, for anything else.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found or max(map(len, found.groups(default=""))) > 20:
        given = text if len(text) <= 40 else f"{text[:40]}..."
        raise UserError(f"{given} is not a size; write {option} 96, or {option} 96 128 for height and width")
    height, width = found.groups()
    return int(height), int(width or height)


def _convert_sizes(kind: type, tokens: Sequence[Token]) -> list[tuple[int, int]]:
    return [parse_size(token.keyword or "--size", token.value) for token in tokens]


def only_size(sizes: Sequence[tuple[int, int]] | None) -> tuple[int, int] | None:
    """Return the size that --size gives, or None without one. Raises: UserError for several."""
    if sizes and len(sizes) > 1:
        raise UserError("--size is given several times; give one height and width")
    return sizes[0] if sizes else None


def join_sizes(tokens: Sequence[str]) -> list[str]:
    """Return a command line in which what follows an option for a size is a single argument: --size=96x128.

    A size is written 96, 96 128 or 96x128 (height, then width).
    """
    joined: list[str] = []
    rest = list(tokens)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if option not in _SIZE_OPTIONS:
            joined.append(f"{option}{equals}{value}")
            continue
        if not equals:
            numbers = next((i for i, text in enumerate(rest[:2]) if not _NUMBER.fullmatch(text)), len(rest[:2]))
            count = max(numbers, int(bool(rest) and rest[0][:1] in "[("))
            value = "x".join(rest[:count])
            del rest[:count]
        bare = "x".join(value.strip("[]() ").replace(",", " ").split())  # a list in brackets has a meaning in cyclopts
        joined.append(f"{option}={bare}" if value else option)
    return joined


def place_model(tokens: Sequence[str]) -> list[str]:
    """Return a command line in which what follows --model comes right after the command, as its MODEL."""
    command, *rest = tokens
    for number, token in enumerate(rest if command != "train" else ()):
        name, equals, value = token.partition("=")
        if name == "--model" and (equals or rest[number + 1 :]):
            return [command, value or rest[number + 1], *rest[:number], *rest[number + (1 if equals else 2) :]]
    return list(tokens)


Flag = Annotated[bool, Parameter(negative="")]
WholeNumber = Annotated[int, Parameter(converter=_parse_whole_number)]
Several = Parameter(consume_multiple=True)
"""Marks an option that takes several values at once."""
Size = Annotated[tuple[int, int], Parameter(converter=lambda *given: _convert_sizes(*given)[0], n_tokens=1)]
Sizes = Annotated[list[tuple[int, int]] | None, Parameter(converter=_convert_sizes, n_tokens=1)]
"""Type of an option for a size that may be given several times."""
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON.")]
Model = Annotated[
    str,
    Parameter(
        help="Name of a timm model, a checkpoint of isomorph or of another program, the folder of a run, a model on "
        "the Hugging Face hub as hf-hub:OWNER/NAME, or package.module:function that builds your own.",
    ),
]
Root = Annotated[Path | None, Parameter(help="Folder of the data; by default $ISOMORPH_DATA, else ./data.")]
Split = Annotated[
    float | None,
    Parameter(
        help="Fraction of every class to test on, for a folder without test images of its own; 1 takes all. By default "
        "that of the model's training."
    ),
]
MaxImages = Annotated[
    WholeNumber | None,
    Parameter(help="Use only this many test images, evenly spaced over the classes, for a quick trial."),
]
Overwrite = Annotated[bool, Parameter(negative="", help="Replace --out if it exists.")]
Device = Annotated[str, Parameter(help="Device to run on: auto, cpu, cuda, cuda:1, ...")]


_RANGES: dict[tuple[float, float], tuple[str, ...]] = {
    (0, 0.5): ("tolerance",),
    (0, 1): ("split",),
    (0, 100): ("rfc",),
    (0, 256): ("workers",),
    (0, 24 * 60 * 60): ("seconds",),
    (0, 1e6): ("atol", "recalibrate"),
    (0, 10**7): ("num_classes",),
    (0, 2**31 - 1): ("seed", "seeds"),
    (0.5, 1000): ("megabytes",),
    (1, 5): ("severity",),
    (1, 2**13): ("size",),
    (1, 2**16): ("batch", "batch_size"),
    (1, 10**6): ("steps",),
    (1, 10**7): ("classes", "images"),
    (1, 10**9): ("max_images",),
}
LIMITS = {name: limits for limits, names in _RANGES.items() for name in names}
"""Smallest and largest allowed value of every numeric option, by name; the same in all commands."""


@dataclass_transform(frozen_default=True)
def group(options: type[T]) -> type[T]:
    """Make a class a group of options: its fields, with the texts below them, are options of their own."""
    return Parameter(name="*")(dataclasses.dataclass(frozen=True)(options))


@group
class CheckpointOptions:
    """How to open a checkpoint that isomorph did not write.

    Parameters
    ----------
    arch
        Architecture of a checkpoint of another program: a timm model, for example resnet18, or package.module:function
        that builds your own. Checkpoints of timm's train script name theirs.
    num_classes
        Number of classes, if the checkpoint does not contain it.
    model_kwargs
        More arguments of timm.create_model that the checkpoint does not contain, for example img_size=96 num_heads=6.
    ema
        Load a checkpoint's averaged weights (EMA) if it has any; --no-ema loads the last ones.
    """

    arch: str | None = None
    num_classes: WholeNumber | None = None
    model_kwargs: Annotated[list[str] | None, Several] = None
    ema: bool = True


@group
class WeightsOptions(CheckpointOptions):
    """How to open a checkpoint, or a timm model with weights from a file.

    Parameters
    ----------
    weights
        Checkpoint to load into the timm model instead of its public weights.
    """

    weights: Path | None = None


@group
class OpenOptions(WeightsOptions):
    """How to open a checkpoint, or a timm model with public, random or other weights.

    Parameters
    ----------
    pretrained
        Load the timm model's public weights; --no-pretrained starts from random ones.
    """

    pretrained: bool = True


@group
class LoadOptions:
    """How to load test images.

    Parameters
    ----------
    batch_size
        Images per batch.
    workers
        Number of processes that load images; 0 loads them in the main process.
    """

    root: Root = None
    max_images: MaxImages = None
    batch_size: WholeNumber = 100
    workers: WholeNumber = 0


@group
class DataOptions:
    """Which test images to take.

    Parameters
    ----------
    data
        A folder of images or a data source (cifar10, cifar100, digits, imagefolder, ...).
    """

    data: str | None = None
    root: Root = None
    split: Split = None
    max_images: MaxImages = None


@contextmanager
def loading() -> Iterator[None]:
    """Context for the imports of what a command computes with: torch, timm and the packages of isomorph.

    Modules of `isomorph.cli` import none of these at their top, so that help, lists and errors in the command line are
    printed at once. Ctrl-C ends the process while modules are imported, and raises KeyboardInterrupt afterwards.

    Raises: UserError if torch, torchvision, timm or a package that they need cannot be imported; an ImportError of a
        module of isomorph, which is no user's mistake, stays as it is.
    """
    exit_on_interrupt()
    keep_freed_memory()
    try:
        iso.prepare()
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "isomorph":
            raise
        raise UserError(" ".join(str(error).split())) from error
    finally:
        raise_on_interrupt()


def command(function: Command) -> Command:
    """Register a function as the command of its name."""
    app.command(check_limits(function), name=function.__name__.rstrip("_"))
    return function


def check_limits(function: Command) -> Command:
    """Decorate a command so that values beyond LIMITS or NaN raise UserError before it runs."""

    @functools.wraps(function)
    def checked(*arguments: Any, **options: Any) -> None:
        given = inspect.signature(function).bind(*arguments, **options).arguments
        _check_options(given, _LIMIT_CHECKS)
        _check_options(given, _EXISTING)
        function(*arguments, **options)

    return checked  # type: ignore[return-value]


def _check_options(options: Mapping[str, Any], checks: Mapping[str, Callable[[Any], None]]) -> None:
    """Raise UserError for an option, or one of its values, that does not pass its check, alone or in a group."""
    for name, value in options.items():
        if dataclasses.is_dataclass(value):
            _check_options(vars(value), checks)
        elif name in checks and value is not None:
            for each in _flatten(value):
                checks[name](each)


def _flatten(value: Any) -> Iterator[Any]:
    """Yield the values in lists, or the value itself."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flatten(each)
    else:
        yield value


def _check_limit(name: str, value: Any) -> None:
    """Raise UserError if a number is beyond its limits."""
    option, (least, most) = f"--{name.replace('_', '-')}", LIMITS[name]
    if isinstance(value, int | float) and not least <= value <= most:
        if math.isnan(value):
            raise UserError(f"{option} nan must be a number")
        if value < least:
            raise UserError(f"{option} {value:,g} must be at least {least:g}")
        raise UserError(f"{option} {value:,g} is out of range; give at most {most:,}")


def _check_model(path: Any) -> None:
    """Raise UserError for the path of a model that is not there, before torch is imported to look for it."""
    name = str(path)
    suffix, missing = Path(name).suffix, not os.path.exists(name)
    if missing and suffix not in EXPORTED and not name.startswith(HUB) and not is_function(name):
        if name.endswith(CHECKPOINTS):
            raise UserError(f"there is no checkpoint {name}")
        if "/" in name:
            raise UserError(f"there is no file or folder {name}")


def _check_data(name: str) -> None:
    """Raise UserError for what is neither a data source nor a folder."""
    if name in tables()["sources"] or os.path.isdir(os.path.expanduser(name)):
        return
    folder = os.path.dirname(os.path.expanduser(name)) or "."
    near = [entry.path.removeprefix("./") for entry in os.scandir(folder)] if os.path.isdir(folder) else []
    close = get_close_matches(name[:200], [*tables()["sources"], *near], n=1)
    hint = f"did you mean {close[0]}?" if close else f"give a folder, or one of {', '.join(tables()['sources'])}"
    raise UserError(f"data source {name!r} is unknown, and there is no folder of that name; {hint}")


def _check_file(name: Any) -> None:
    if not os.path.isfile(os.path.expanduser(name)):
        raise UserError(f"{name} is a folder; give a file" if os.path.isdir(name) else f"there is no file {name}")


_LIMIT_CHECKS = {name: functools.partial(_check_limit, name) for name in LIMITS}
_EXISTING: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys(("model", "original", "other", "against", "weights"), _check_model),
    "image": _check_file,
    "data": _check_data,
}
"""Checks that what an option names is there, by the names of options; the same in all commands."""


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
    if source and source.exists() and out.exists() and out.samefile(source):
        raise UserError(f"--out {out} is the model that is changed; give another file")
    if not out.is_dir():
        require_new(out, overwrite, "--out")


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
    require_new(path, overwrite, "--out")
    require_writable(path)
    return path


def check_page(page: Path | None, overwrite: bool) -> None:
    """Raise UserError for a --page that does not end in .html, cannot be written, or exists without --overwrite."""
    if page is None:
        return
    _check_suffix("--page", page, (".html",))
    require_new(page, overwrite, "--page")
    require_writable(page)


def out_next_to(model: Path | str, ending: str) -> Path:
    """Return NAME with an ending in the folder of a file or run; of a model that is none, in the working folder."""
    hub = parse_hub_name(model)
    name = hub.repository if hub else str(model).rpartition(":")[2] if is_function(str(model)) else model
    path = Path(model).resolve() if Path(model).exists() else Path(Path(name).name)
    return path.with_name(path.name.removesuffix(".safetensors") + ending)


def display_name(model: str, pretrained: bool) -> str:
    """Return the name of a model in results, which says when its weights are random."""
    return model if pretrained else f"{model} (random weights)"
