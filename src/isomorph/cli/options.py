"""The application, and options that several commands share, each declared once: types, help texts and limits.

A command takes a group, a dataclass, as one keyword argument; each field with its help text becomes an option.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

from cyclopts import App, Parameter, Token
from cyclopts.validators import Number
from cyclopts.validators import Path as PathKind

import isomorph as iso
from isomorph.checkpoints.paths import CHECKPOINTS, HUB, is_function, require_new, require_writable
from isomorph.cli.tables import tables
from isomorph.errors import UserError, did_you_mean, one_line, unknown_model
from isomorph.process import exit_on_interrupt, keep_freed_memory, raise_on_interrupt
from isomorph.terminal_tables import RANDOM_WEIGHTS

app = App(
    name="isomorph",
    help="Change the form of a vision model, keep its function.",
    version=iso.__version__,
    version_format="plaintext",
    exit_on_error=False,
    suppress_keyboard_interrupt=False,
    print_error=False,
    default_parameter=Parameter(negative_iterable=(), consume_multiple=True),
)

Command = TypeVar("Command", bound=Callable[..., None])
T = TypeVar("T")
EXPORTED = (".onnx", ".pt2")


def command(function: Command) -> Command:
    """Register a function as the command of its name."""
    app.command(function, name=function.__name__.rstrip("_"))
    return function


@dataclass_transform(frozen_default=True)
def group(options: type[T]) -> type[T]:
    """Make a class a group of options: its fields, with the texts below them, are options of their own."""
    return Parameter(name="*")(dataclasses.dataclass(frozen=True)(options))


def _parse_whole_number(kind: type, tokens: Sequence[Token]) -> int:
    """Return a whole number as it was typed. Raises: ValueError for a fraction, which cyclopts would round."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value} must be a whole number") from None


def whole(least: int, most: int) -> Parameter:
    """Return the parameter of a whole number within limits."""
    return Parameter(converter=_parse_whole_number, validator=Number(gte=least, lte=most))


def real(least: float, most: float) -> Parameter:
    """Return the parameter of a number within limits."""
    return Parameter(validator=Number(gte=least, lte=most))


def _parse_sizes(kind: type, tokens: Sequence[Token]) -> list[tuple[int, int]]:
    sizes = []
    for token in tokens:
        match = re.fullmatch(r"(\d{1,4})(?:x(\d{1,4}))?", token.value)
        height, width = (int(side or match[1]) for side in match.groups()) if match else (0, 0)
        if not (1 <= height <= 2**13 and 1 <= width <= 2**13):
            raise ValueError(
                f"{token.value[:40]} is not a size; write 96, or 96x128 for height and width"
            )
        sizes.append((height, width))
    return sizes


def _check_model(kind: type, path: Any) -> None:
    """Raise ValueError for a model, or the path of one, that is not there, before torch is imported to look for it."""
    name = str(path)
    elsewhere = Path(name).suffix in EXPORTED or name.startswith(HUB) or is_function(name)
    if path is None or os.path.exists(name) or elsewhere:
        return
    if name.endswith(CHECKPOINTS):
        raise ValueError(f"there is no checkpoint {name}")
    if "/" in name:
        raise ValueError(f"there is no file or folder {name}")
    if names := _names_if_unknown(name.partition(".")[0]):
        raise ValueError(
            f"there is no checkpoint {name}"
            if isinstance(path, Path)
            else unknown_model(name, names)
        )


def _names_if_unknown(name: str) -> list[str]:
    """Return the names of all models if no file of timm's or isomorph's models has the word, else an empty list."""
    timm_models = Path(str(distribution("timm").locate_file("timm/models")))
    own_models = Path(__file__).parents[1] / "models"
    files = [*timm_models.rglob("*.py"), *own_models.rglob("*.py")]
    text = "\n".join(path.read_text("utf8") for path in files)
    own_names = [model["name"] for model in tables()["models"]]
    if name in own_names or re.search(rf"\b{re.escape(name)}\b", text):
        return []
    return own_names + re.findall(r"^@register_model\ndef (\w+)", text, re.MULTILINE)


def _check_data(kind: type, name: str | None) -> None:
    sources = tables()["sources"]
    if name is None or name in sources or os.path.isdir(os.path.expanduser(name)):
        return
    hint = did_you_mean(name, sources, f"give a folder, or one of {', '.join(sources)}")
    raise ValueError(
        f"data source {name!r} is unknown, and there is no folder of that name; {hint}"
    )


Flag = Annotated[bool, Parameter(negative="")]
Whole = Annotated[int, Parameter(converter=_parse_whole_number)]
Count = Annotated[int, whole(1, 10**7)]
Classes = Annotated[int, whole(0, 10**7)]
Seed = Annotated[int, whole(0, 2**31 - 1)]
Severity = Annotated[int, whole(1, 5)]
Atol = Annotated[float, real(0, 1e6)]
Share = Annotated[float, real(0, 1)]
Seconds = Annotated[float, real(0, 24 * 60 * 60)]
BatchSize = Annotated[int, whole(1, 2**16), Parameter(help="Images per batch.")]
Size = Annotated[
    tuple[int, int] | None,
    Parameter(
        converter=lambda *given: _parse_sizes(*given)[0],
        n_tokens=1,
        metavar="SIZE",
        help="Height and width of the images, as in 96 or 96x128; by default the model's own.",
    ),
]
Sizes = Annotated[
    list[tuple[int, int]] | None,
    Parameter(
        converter=_parse_sizes,
        n_tokens=1,
        metavar="SIZE...",
        help="Heights and widths of the images, as in --size 96 96x128, a row each; by default the model's own.",
    ),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON.")]
NamedModel = Annotated[str, Parameter(validator=_check_model)]
Model = Annotated[
    NamedModel,
    Parameter(
        help="Name of a timm model, a checkpoint of isomorph or of another program, the folder of a run, a model on "
        "the Hugging Face hub as hf-hub:OWNER/NAME, or package.module:function that builds your own.",
    ),
]
Checkpoint = Annotated[
    Path,
    Parameter(
        validator=_check_model,
        help="A checkpoint of isomorph or of another program, or the folder of a run, finished or not.",
    ),
]
Out = Annotated[Path, Parameter(help="File for the new checkpoint (.safetensors).")]
Data = Annotated[str | None, Parameter(validator=_check_data)]
File = Annotated[Path, Parameter(validator=PathKind(exists=True, dir_okay=False))]
Folder = Annotated[Path, Parameter(validator=PathKind(exists=True, file_okay=False))]
Root = Annotated[
    Path | None, Parameter(help="Folder of the data; by default $ISOMORPH_DATA, else ./data.")
]
Split = Annotated[
    Share | None,
    Parameter(
        help="Fraction of every class to test on, for a folder without test images of its own; 1 takes all. By default "
        "that of the model's training."
    ),
]
MaxImages = Annotated[
    Count | None,
    Parameter(
        help="Use only this many test images, evenly spaced over the classes, for a quick trial."
    ),
]
Overwrite = Annotated[bool, Parameter(negative="", help="Replace --out if it exists.")]
Device = Annotated[str, Parameter(help="Device to run on: auto, cpu, cuda, cuda:1, ...")]


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
    num_classes: Classes | None = None
    model_kwargs: list[str] | None = None
    ema: bool = True


@group
class OpenOptions(CheckpointOptions):
    """How to open a checkpoint, or a timm model with public, random or other weights.

    Parameters
    ----------
    weights
        Checkpoint to load into the timm model instead of its public weights.
    pretrained
        Load the timm model's public weights; --no-pretrained starts from random ones.
    """

    weights: Annotated[Path | None, Parameter(validator=_check_model)] = None
    pretrained: bool = True


@group
class LoadOptions:
    """How to load test images.

    Parameters
    ----------
    workers
        Number of processes that load images; 0 loads them in the main process.
    """

    root: Root = None
    max_images: MaxImages = None
    batch_size: BatchSize = 100
    workers: Annotated[int, whole(0, 256)] = 0


@group
class DataOptions:
    """Which test images to take.

    Parameters
    ----------
    data
        A folder of images or a data source (cifar10, cifar100, digits, imagefolder, ...).
    """

    data: Data = None
    root: Root = None
    split: Split = None
    max_images: MaxImages = None

    def check(self) -> None:
        """Raise UserError for options on the images of --data without --data."""
        for option in ("root", "split", "max_images"):
            if getattr(self, option) is not None and not self.data:
                raise UserError(
                    f"--{option.replace('_', '-')} is about the images of --data; give --data too"
                )


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
        raise UserError(one_line(error)) from error
    finally:
        raise_on_interrupt()


def _is_read_from(out: Path, source: Path) -> bool:
    """True for the file that a model is read from, also for the model in the folder of a run."""
    if not out.exists():
        return False
    files = (source, source / "model.safetensors")
    return any(file.exists() and out.samefile(file) for file in files)


def check_out(
    out: Path | None,
    overwrite: bool,
    source: str | Path | None = None,
    suffixes: Sequence[str] = (".safetensors",),
    option: str = "--out",
) -> None:
    """Check that a command can write its file, if it has one; `source` is the file that it is made from.

    Raises: UserError for another suffix than these, the source, one that exists without `overwrite` or is not writable.
    """
    if out is None:
        return
    if out.suffix not in suffixes:
        raise UserError(f"{option} {out} must end in {' or '.join(suffixes)}")
    if source and _is_read_from(out, Path(source)):
        raise UserError(f"{option} {out} is the model that is changed; give another file")
    if not out.is_dir():
        require_new(out, overwrite, option)
    require_writable(out)


def display_name(model: str, pretrained: bool) -> str:
    """Return the name of a model in results, which says when its weights are random."""
    return model if pretrained else model + RANDOM_WEIGHTS
