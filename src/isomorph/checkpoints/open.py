"""Opening a model: from its file, by its name in timm, or from the folder of its run.

One way for all files: find the path (`local_file`), read tensors and header (`read_contents`, `_read_run`), build the
model that they describe, load the tensors (`_open`).
"""

import copy
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from isomorph.checkpoints.files import Contents, is_own, read_contents, read_header
from isomorph.checkpoints.foreign import NO_OPTIONS, ModelOptions, build_foreign, read_arguments
from isomorph.checkpoints.hub import download_model
from isomorph.checkpoints.model import (
    cast_like,
    describe_base,
    describe_data,
    load_state,
    read_parts,
    rebuild,
    rebuild_from_header,
    record_data,
    warn_of_nan,
)
from isomorph.checkpoints.named_state import AVERAGED_PREFIX, MODEL_PREFIX
from isomorph.checkpoints.paths import CHECKPOINTS, HUB, is_function
from isomorph.checkpoints.snapshot import (
    DamagedSnapshot,
    newest_snapshot,
    peek_header,
    read_snapshot,
)
from isomorph.errors import UserError, short_reason
from isomorph.models import create, require_registered
from isomorph.surgery import apply_edit, edits
from isomorph.surgery.rule import add_notes, notes, update_record


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
    if isinstance(base, nn.Module) and arguments:
        raise UserError(
            f"base is a module, which is taken as it is; leave {', '.join(arguments)} out"
        )
    contents = read_contents(local_file(path, revision), ema)
    warn_of_nan(contents.tensors, "loaded")
    if isinstance(base, nn.Module):
        return _open(contents, base=base)
    return _open(contents, ModelOptions(base, arguments.pop("num_classes", None), arguments, ema))


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
    return download_model(repository, revision or named or None)


def _open(
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
    return model.eval()


def _named_base(contents: Contents, options: ModelOptions) -> nn.Module | None:
    """Return the model that the options name as the base of a file's edits, or None."""
    if options.arch and is_function(options.arch):
        return build_own(options.arch, options.arguments())
    if (
        options.arch and contents.is_own and "module" in contents.header
    ):  # such as torchvision's ResNets
        require_registered(options.arch)
        return create(
            options.arch, **read_arguments(options.arch, contents.tensors, options.arguments())
        )
    return None


def _with_edits_of(contents: Contents, base: nn.Module) -> nn.Module:
    """Return a copy of a base in the precision of a file, with the edits and the images that its header records."""
    model = copy.deepcopy(base)
    if not contents.is_own:
        return cast_like(model, contents.tensors)
    header = read_parts(contents)
    done = edits(base)
    if done != header.edits[: len(done)]:
        raise UserError(
            f"base has other edits than {contents.path}; give the module as it was before it was recast"
        )
    try:
        for edit in header.edits[len(done) :]:
            model = apply_edit(model, edit)
    except UserError as error:
        raise UserError(
            f"base {type(model).__name__} does not fit {contents.path}: {error}"
        ) from None
    if header.data:
        record_data(model, header.data)
    return cast_like(model, contents.tensors)


def _hint_of_base(contents: Contents, model: nn.Module) -> str:
    module = read_parts(contents).module if contents.is_own else {}
    saved_from = f" (it was saved from a {module['class']})" if module else ""
    return (
        f"{saved_from}; give the base as it was before it was recast"
        if edits(model)
        else saved_from
    )


@contextmanager
def _working_folder_last() -> Iterator[None]:
    sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path.remove(os.getcwd())


def import_own(name: str, use: str = "use") -> Any:
    """Return what `package.module:name` names. The working folder is searched last.

    Raises: UserError when it cannot be imported.
    """
    module, _, function = name.partition(":")
    try:
        with _working_folder_last():
            return getattr(import_module(module), function)
    except Exception as error:  # whatever the user's code raises
        reason = f"{type(error).__name__}: {short_reason(error)}"
        known = vars(sys.modules[module]) if module in sys.modules else {}
        close = get_close_matches(function, known, n=1)
        advice = f"did you mean {module}:{close[0]}?" if close else "give it as Python imports it"
        raise UserError(f"cannot {use} {name} ({reason}); {advice}") from error


def build_own(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Return the model that `package.module:function` builds with these arguments, or that it is; in eval mode.

    The working folder is searched last. Raises: UserError when it cannot be imported or called, or is not a module.
    """
    model = import_own(name, "build a model by")
    if not isinstance(model, nn.Module):
        try:
            with _working_folder_last():
                model = model(**arguments)
        except Exception as error:  # whatever the user's code raises
            reason = f"{type(error).__name__}: {short_reason(error)}"
            advice = (
                "give a function that runs without arguments, or its arguments as `model.kwargs`"
            )
            raise UserError(f"cannot build a model by {name} ({reason}); {advice}") from error
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{name} returns a {type(model).__name__}, not a torch.nn.Module; give a function that does"
        )
    update_record(model, is_own=True)
    return model.eval()


def open_with_classes(path: Path, arguments: Mapping[str, Any]) -> tuple[nn.Module, list[str]]:
    """Open a checkpoint with other arguments of timm.create_model; return the model and the names of its new tensors.

    Raises: UserError when the file cannot be opened, or does not fit with these arguments.
    """
    opened = load(path)
    base = {**describe_base(opened), **arguments}
    model = rebuild(base, edits(opened))
    record_data(model, describe_data(opened))
    add_notes(model, *notes(opened))
    return model, load_state(model, opened.state_dict(), path, fresh_head=True)


def open_model(
    name: str,
    weights: Path | None = None,
    pretrained: bool = True,
    options: ModelOptions = NO_OPTIONS,
    **arguments: Any,
) -> nn.Module:
    """Open a model in eval mode: its name in timm, its checkpoint, the folder of its run, or package.module:function.

    `options` say what a checkpoint that isomorph did not write leaves open. A timm model gets the weights of the file
    `weights`, else its public weights if `pretrained`, else random ones; `arguments` go to timm.create_model.

    Raises: UserError when there is no such model, its weights are missing, or they do not fit.
    """
    if is_checkpoint_or_run(name):
        if weights:
            raise UserError(f"{name} has weights already; `weights` applies to timm models by name")
        return open_trained(Path(name), options)
    if is_function(name):
        model = build_own(name, options.arguments() | arguments)
        return _open(read_contents(weights, options.ema), base=model) if weights else model
    if options.arch:
        raise UserError(f"`base` is for checkpoints; {name!r} is not a file")
    require_registered(name)
    arguments = {**arguments, **options.arguments()}
    if weights:
        named = options._replace(arch=name, num_classes=None, model_kwargs=arguments)
        return _open(read_contents(weights, options.ema)._replace(header={}), named)
    public = _pretrained_cfg(name)
    if pretrained and not (public and public.has_weights):
        raise UserError(f"{name} has no public weights; give `weights`")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # random weights are the same at every call
        return create(name, pretrained=pretrained, **arguments).eval()


def _pretrained_cfg(name: str) -> Any:
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError:
        stem, _, tag = name.partition(".")
        tags = ", ".join(known.partition(".")[2] for known in timm.list_pretrained(f"{stem}.*"))
        raise UserError(f"{stem} has no weights tagged {tag!r}; it has {tags or 'none'}") from None


def check_pretrained_option(names: Sequence[str], weights: Path | None, pretrained: bool) -> None:
    """Raise UserError if random weights are asked for for models that have weights."""
    if not pretrained and (weights or all(map(is_checkpoint_or_run, names))):
        raise UserError(
            "pretrained=False asks for random weights; give a timm model by name and no `weights`"
        )


def is_checkpoint_or_run(name: str) -> bool:
    """True if this is a checkpoint, also on the hub, or a run's folder, and not the name of a timm model."""
    return (
        name.startswith(HUB)
        or name.endswith(CHECKPOINTS)
        or (Path(name).exists() and not timm.is_model(name))
    )


def open_trained(path: Path, options: ModelOptions = NO_OPTIONS) -> nn.Module:
    """Open a checkpoint, or the current model (the encoder of pre-training) of a run; in eval mode, averaged if any.

    Raises: UserError when there is no model yet, or the file is damaged or does not fit.
    """
    path = local_file(path)
    contents = _read_run(path, options.ema) if path.is_dir() else read_contents(path, options.ema)
    return _open(contents, options)


def needs_options(name: str) -> bool:
    """True for a checkpoint that isomorph did not write, or one or a run of a module that timm could not build."""
    path = Path(name)
    if not is_checkpoint_or_run(name):
        return False
    if path.is_dir():
        return "module" in (peek_header(path) or ())
    header = read_header(path) if path.suffix == ".safetensors" else {}
    return not is_own(header) or "module" in header


def _check_agreement(model: nn.Module, options: ModelOptions, path: Path) -> None:
    if options._replace(ema=True) == NO_OPTIONS:
        return
    base = describe_base(model)
    recorded = {"num_classes": getattr(model, "num_classes", None), **base}
    others = {
        key: value
        for key, value in options.arguments().items()
        if key not in recorded or recorded[key] != value
    }
    given = [f"{key}={value}" for key, value in others.items()]
    if options.arch and options.arch.partition(".")[0] != base["name"].partition(".")[0]:
        given.insert(0, f"base={options.arch}")
    if given:
        raise UserError(
            f"{path} says how to build its model, {base['name']}; leave {' and '.join(given)} out"
        )


def _read_run(path: Path, ema: bool) -> Contents:
    """Return the tensors of a run's newest snapshot and its model's header, or those of the model that it wrote last.

    Raises: UserError when there is no model yet, or the file is damaged.
    """
    found = newest_snapshot(path)
    if found is None and (path / "model.safetensors").is_file():
        return read_contents(path / "model.safetensors")
    if found is None:
        raise UserError(f"{path} is neither a checkpoint nor the folder of a run with a snapshot")
    if found.damaged:  # an older one is another model
        raise DamagedSnapshot(f"{found.damaged[0][1]}; resume the run, or give one of its files")
    tensors = read_snapshot(found.path)
    recipe = found.values["recipe"]
    progress = found.values["progress"]
    averaged = ema and any(name.startswith(AVERAGED_PREFIX) for name in tensors)
    prefix = (AVERAGED_PREFIX if averaged else MODEL_PREFIX) + _encoder_prefix(recipe)
    state = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    which = "averaged weights (EMA)" if averaged else "weights"
    whole = (
        "the finished run"
        if progress["closed"] == recipe.get("epochs")
        else "the run's last snapshot"
    )
    when = f"after {progress['closed']} of {recipe.get('epochs')} epochs, {progress['step']} steps"
    return Contents(
        path, state, found.values["model"], notes=(f"{path}: {which} of {whole}, {when}",)
    )


def _encoder_prefix(recipe: Mapping[str, Any]) -> str:
    """Return the prefix of the model's tensor names in a run: pre-training and guided detection wrap the model."""
    task = recipe.get("task")
    if isinstance(task, dict) and task.get("name") == "detection" and task.get("teacher"):
        return "student."
    mask = recipe.get("mask")
    if not isinstance(mask, dict):
        return ""
    return "student.encoder." if mask.get("teacher") else "encoder."
