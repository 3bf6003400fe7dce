"""Opening a model from its file.

One way for all files: find the path (`local_file`), read tensors and header (`read_contents`), build the model that
they describe, load the tensors (`open_contents`).
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from isomorph.checkpoints.files import Contents, read_contents
from isomorph.checkpoints.foreign import NO_OPTIONS, ModelOptions, build_foreign, read_arguments
from isomorph.checkpoints.hub import download_model
from isomorph.checkpoints.model import (
    cast_like,
    check_size_of_edits,
    describe_base,
    load_state,
    read_parts,
    rebuild_from_header,
    record_data,
    warn_of_nan,
)
from isomorph.checkpoints.paths import HUB, is_function
from isomorph.errors import UserError, first_line, names_class
from isomorph.models import create, require_registered
from isomorph.operations import copy_module, in_eval_mode
from isomorph.surgery import apply_edit, edits
from isomorph.surgery.rule import add_notes, update_record


def load(
    path: str | Path,
    base: nn.Module | str | None = None,
    *,
    ema: bool = True,
    revision: str | None = None,
    **arguments: Any,
) -> nn.Module:
    """Load a model saved by `save`: create its base, apply its edits, load every tensor; in eval mode.

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
    if callable(base) and not isinstance(base, nn.Module):
        name = getattr(base, "__name__", "base")
        raise UserError(f"base {name} is a {type(base).__name__}, not a module; give base={name}()")
    if isinstance(base, str) and names_class(base):
        raise UserError(
            f"base {base!r} is text, not a module; give base={base.removesuffix('()')}() without quotes"
        )
    if isinstance(base, nn.Module) and arguments:
        raise UserError(
            f"base is a module, which is taken as it is; leave {', '.join(arguments)} out"
        )
    contents = read_contents(local_file(path, revision), ema)
    warn_of_nan(contents.tensors, "loaded")
    if isinstance(base, nn.Module):
        return open_contents(contents, base=base)
    return open_contents(
        contents, ModelOptions(base, arguments.pop("num_classes", None), arguments, ema)
    )


def local_file(name: str | Path, revision: str | None = None) -> Path:
    """Return the path of a checkpoint, or of the weights of a model on the hub (`revision`: branch, tag or commit).

    Raises: UserError when there is no such model or revision, it is private, or the hub does not answer.
    """
    if not str(name).startswith(HUB):
        if revision is not None:
            raise UserError(
                f"revision {revision!r} is for models on the hub, hf-hub:OWNER/NAME; {name} is a file"
            )
        return Path(name)
    repository, _, named = str(name).partition(":")[2].partition("@")
    if named and revision is not None and revision != named:
        raise UserError(
            f"{name} names a revision, and revision={revision!r} is another; give one of them"
        )
    return download_model(repository, revision or named or None)


def open_contents(
    contents: Contents, options: ModelOptions = NO_OPTIONS, base: nn.Module | None = None
) -> nn.Module:
    """Return the model that a file, the options or a base describe, with the file's tensors; in eval mode."""
    if base is None:
        base = _named_base(contents, options)
    if base is not None:
        model = _with_edits_of(contents, base)
    elif contents.is_own:
        model = cast_like(rebuild_from_header(contents), contents.tensors)
        _check_agreement(model, options, contents.path)
    else:
        model = build_foreign(contents, options)
    try:
        load_state(model, contents.tensors, contents.path)
    except UserError as error:
        if base is None:
            raise
        raise UserError(f"{error}{_hint_of_base(contents, model)}") from None
    add_notes(model, *contents.notes)
    return in_eval_mode(model)


def _named_base(contents: Contents, options: ModelOptions) -> nn.Module | None:
    """Return the model that the options name as the base of a file's edits, or None."""
    if options.arch and is_function(options.arch):
        return build_by_function(options.arch, options.arguments())
    # such as torchvision's ResNets
    if options.arch and contents.is_own and "module" in contents.header:
        require_registered(options.arch)
        return create(
            options.arch, **read_arguments(options.arch, contents.tensors, options.arguments())
        )
    return None


def _with_edits_of(contents: Contents, base: nn.Module) -> nn.Module:
    """Return a copy of a base in the precision of a file, with the edits and the images that its header records."""
    if not contents.is_own:
        return cast_like(copy_module(base), contents.tensors)
    header = read_parts(contents)
    base_edits = edits(base)
    if base_edits != header.edits[: len(base_edits)]:
        raise UserError(
            f"base has other edits than {contents.path}; give the module as it was before it was recast"
        )
    new_edits = header.edits[len(base_edits) :]
    if new_edits:
        check_size_of_edits(contents, base, new_edits)
    model = copy_module(base)  # after the check, which makes a copy too
    try:
        for edit in new_edits:
            model = apply_edit(model, edit)
    except UserError as error:
        raise UserError(
            f"base {type(model).__name__} does not fit {contents.path}: {error}"
        ) from None
    except (RuntimeError, TypeError) as error:  # of fields that no layer can have
        raise UserError(f"cannot rebuild {contents.path}: {first_line(error)}") from error
    if header.data:
        record_data(model, header.data)
    return cast_like(model, contents.tensors)


def _hint_of_base(contents: Contents, model: nn.Module) -> str:
    """Return what the base of a file was and how to give it, as the end of a message."""
    module = read_parts(contents).module if contents.is_own else {}
    saved_from = f" (it was saved from a {module['class']})" if module else ""
    return (
        f"{saved_from}; give the base as it was before it was recast"
        if edits(model)
        else saved_from
    )


@contextmanager
def _working_folder_last() -> Iterator[None]:
    """Context in which Python also imports from the working folder; what the user's code adds to the path stays."""
    folder = os.getcwd()
    is_new = folder not in sys.path
    if is_new:
        sys.path.append(folder)
    try:
        yield
    finally:
        if is_new and folder in sys.path:
            sys.path.remove(folder)


def import_function(name: str, action: str = "use") -> Any:
    """Return what `package.module:name` names. The working folder is searched last.

    Raises: UserError when it cannot be imported.
    """
    module, _, function = name.partition(":")
    try:
        with _working_folder_last():
            return getattr(import_module(module), function)
    except Exception as error:  # whatever the user's code raises
        reason = f"{type(error).__name__}: {first_line(error)}"
        names = vars(sys.modules[module]) if module in sys.modules else {}
        suggestions = get_close_matches(function, names, n=1)
        advice = (
            f"did you mean {module}:{suggestions[0]}?"
            if suggestions
            else "give it as Python imports it"
        )
        raise UserError(f"cannot {action} {name} ({reason}); {advice}") from error


def build_by_function(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Return the model that `package.module:function` builds with these arguments, or that it is; in eval mode.

    The working folder is searched last. Raises: UserError when it cannot be imported or called, or is not a module.
    """
    model = import_function(name, "build a model by")
    if not isinstance(model, nn.Module):
        try:
            with _working_folder_last():
                model = model(**arguments)
        except Exception as error:  # whatever the user's code raises
            reason = f"{type(error).__name__}: {first_line(error)}"
            advice = (
                "give a function that runs without arguments, or its arguments as `model.kwargs`"
            )
            raise UserError(f"cannot build a model by {name} ({reason}); {advice}") from error
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{name} returns {type(model).__name__}, not a torch.nn.Module; give a function that does"
        )
    update_record(model, is_of_function=True)
    return in_eval_mode(model)


def _check_agreement(model: nn.Module, options: ModelOptions, path: Path) -> None:
    """Raise UserError for options that contradict a file that says how to build its model."""
    if options._replace(ema=True) == NO_OPTIONS:
        return
    base = describe_base(model)
    recorded = {"num_classes": getattr(model, "num_classes", None), **base}
    others = {
        key: value
        for key, value in options.arguments().items()
        if key not in recorded or recorded[key] != value
    }
    arguments = [f"{key}={value}" for key, value in others.items()]
    if options.arch and options.arch.partition(".")[0] != base["name"].partition(".")[0]:
        arguments.insert(0, f"base={options.arch}")
    if arguments:
        raise UserError(
            f"{path} says how to build its model, {base['name']}; leave {' and '.join(arguments)} out"
        )
