"""Loading a model from its file: one that isomorph wrote, or another one whose architecture is known."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from isomorph.checkpoints.arguments import read_arguments
from isomorph.checkpoints.contents import read_contents
from isomorph.checkpoints.files import read_header
from isomorph.checkpoints.foreign import ModelOptions, open_foreign
from isomorph.checkpoints.header import FORMAT, parse_header
from isomorph.checkpoints.hub import local_file
from isomorph.checkpoints.model import cast_like, load_state
from isomorph.checkpoints.rebuild import (
    describe_base,
    describe_data,
    rebuild,
    rebuild_from_header,
    record_base,
    record_data,
)
from isomorph.errors import UserError
from isomorph.models import create, require_registered
from isomorph.surgery import Edit, edits, replay
from isomorph.surgery.notes import add_notes, notes


def load(
    path: str | Path,
    base: nn.Module | str | None = None,
    *,
    ema: bool = True,
    revision: str | None = None,
    **arguments: Any,
) -> nn.Module:
    """Load a model saved by `save`: create its base, replay its edits, load every tensor; in eval mode.

    The model gets the floating-point type of the saved tensors. A name such as hf-hub:me/name is a model on the hub.

    Args:
        base: For a model that timm cannot build: a module like the one that was recast and saved, for example
            MyModel(). It stays unchanged. Or the name of a timm model with the same tensors (resnet18 for torchvision).
            Checkpoints that isomorph did not write need one of both; those of timm's training script name theirs.
        ema: Take the averaged weights of a training checkpoint, where it has any, else the last ones.
        revision: Branch, tag or commit of a model on the hub.
        arguments: More arguments of timm.create_model, where `base` is or could be a name. Number of classes and image
            size are read from the tensors.

    Raises: UserError when the file is missing or truncated, the base is missing, or the tensors do not fit.

    >>> iso.save(timm.create_model("cifar_resnet20", num_classes=3), "small.safetensors")
    >>> model = iso.load("small.safetensors")
    >>> model(torch.randn(1, 3, 32, 32)).shape
    torch.Size([1, 3])
    >>> torch.save({"state_dict": model.state_dict()}, "other.pth")
    >>> iso.load("other.pth", base="cifar_resnet20").num_classes
    3
    """
    path = local_file(path, revision)
    if isinstance(base, type):
        raise UserError(f"base {base.__name__} is a class; give a module, base={base.__name__}()")
    if isinstance(base, nn.Module) and arguments:
        raise UserError(f"base is a module, which is taken as it is; leave {', '.join(arguments)} out")
    if isinstance(base, nn.Module):
        return _load_into_base(path, base, ema)
    if not is_own_file(path):
        classes = arguments.pop("num_classes", None)
        return open_foreign(path, ModelOptions(base, classes, arguments, ema))
    if base is not None and "module" in read_header(path):
        return open_as(path, ModelOptions(base, arguments.pop("num_classes", None), arguments, ema))
    if base is not None or arguments:
        given = f"base={base!r}" if base is not None else ", ".join(arguments)
        raise UserError(f"{path} records how to build its model; leave {given} out")
    return _load_own(path)


def is_own_file(path: Path) -> bool:
    """True for a file that isomorph wrote, from whose header a model can be rebuilt; others have the format "pt"."""
    return path.suffix == ".safetensors" and read_header(path).get("format", "").startswith("isomorph")


def _load_own(path: Path) -> nn.Module:
    """Load a file that isomorph wrote, of a model that timm can build."""
    header, state = read_header(path), read_contents(path).tensors
    model = rebuild_from_header(header, state, path)
    load_state(cast_like(model, state), state, path)
    return model.eval()


def open_as(path: Path, options: ModelOptions) -> nn.Module:
    """Open a file of a module that timm could not build as a timm model with the same tensors, torchvision's ResNets.

    Raises: UserError when the architecture in the options does not fit.
    """
    assert options.arch is not None
    require_registered(options.arch)
    arguments = read_arguments(options.arch, read_contents(path).tensors, options.arguments())
    base = record_base(create(options.arch, **arguments), {"name": options.arch, **arguments})
    return _load_into_base(path, base, ema=True)


def open_with_classes(path: Path, arguments: Mapping[str, Any]) -> tuple[nn.Module, list[str]]:
    """Open a checkpoint with other arguments of timm.create_model, and a new classifier if they ask for other classes.

    Returns the model and the names of its new tensors.

    Raises: UserError when the file cannot be opened, or does not fit with these arguments.
    """
    opened = load(path)
    base = {**describe_base(opened), **arguments}
    model = rebuild(base, edits(opened))
    record_data(model, describe_data(opened))
    add_notes(model, *notes(opened))
    return model, load_state(model, opened.state_dict(), path, fresh_head=True)


def _load_into_base(path: Path, base: nn.Module, ema: bool) -> nn.Module:
    """Return a copy of the base with the file's edits and tensors. Raises: UserError when they do not fit."""
    contents = read_contents(path, ema)
    header = read_header(path) if is_own_file(path) else {}
    parts = parse_header(header, path) if header.get("format") == FORMAT else None
    model = _replay_all(copy.deepcopy(base), parts.edits if parts else (), path)
    saved_from = f" (it was saved from a {parts.module['class']})" if parts and parts.module else ""
    try:
        load_state(cast_like(model, contents.tensors), contents.tensors, path)
    except UserError as misfit:
        raise UserError(f"{misfit}{saved_from}; give the base as it was before it was recast") from None
    if parts and parts.data:
        record_data(model, parts.data)
    add_notes(model, *filter(None, [contents.note(path)]))
    return model.eval()


def _replay_all(model: nn.Module, recorded: tuple[Edit, ...], path: Path) -> nn.Module:
    """Return the model with the edits of a file that it does not have yet. Raises: UserError when one does not fit."""
    if edits(model) != recorded[: len(edits(model))]:
        raise UserError(f"base has other edits than {path}; give the module as it was before it was recast")
    for edit in recorded[len(edits(model)) :]:
        try:
            model = replay(model, edit)
        except UserError as error:
            raise UserError(f"base {type(model).__name__} does not fit {path}: {error}") from None
    return model
