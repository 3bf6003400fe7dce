"""Opening a model by what a user names: its file, its name in timm, or the folder of its run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from isomorph.checkpoints.files import Contents, is_own, read_contents, read_header
from isomorph.checkpoints.foreign import NO_OPTIONS, ModelOptions
from isomorph.checkpoints.model import (
    describe_base,
    describe_data,
    load_state,
    rebuild,
    record_data,
)
from isomorph.checkpoints.open import build_by_function, load, local_file, open_contents
from isomorph.checkpoints.paths import CHECKPOINTS, HUB, is_function
from isomorph.errors import UserError
from isomorph.json_values import JsonObject
from isomorph.lab.training.run.named_state import AVERAGED_PREFIX, MODEL_PREFIX
from isomorph.lab.training.run.snapshot import (
    DamagedSnapshot,
    newest_snapshot,
    peek_header,
    read_snapshot,
)
from isomorph.models import create, require_registered
from isomorph.surgery import edits
from isomorph.surgery.rule import add_notes, notes


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
        model = build_by_function(name, options.arguments() | arguments)
        return open_contents(read_contents(weights, options.ema), base=model) if weights else model
    if options.arch:
        raise UserError(f"`base` is for checkpoints; {name!r} is not a file")
    require_registered(name)
    arguments = {**arguments, **options.arguments()}
    if weights:
        named = options._replace(arch=name, num_classes=None, model_kwargs=arguments)
        return open_contents(read_contents(weights, options.ema)._replace(header={}), named)
    public = _pretrained_cfg(name)
    if pretrained and not (public and public.has_weights):
        raise UserError(f"{name} has no public weights; give `weights`")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # random weights are the same at every call
        return create(name, pretrained=pretrained, **arguments).eval()


def open_trained(path: Path, options: ModelOptions = NO_OPTIONS) -> nn.Module:
    """Open a checkpoint, or the current model (the encoder of pre-training) of a run; in eval mode, averaged if any.

    Raises: UserError when there is no model yet, or the file is damaged or does not fit.
    """
    path = local_file(path)
    contents = _read_run(path, options.ema) if path.is_dir() else read_contents(path, options.ema)
    return open_contents(contents, options)


def open_with_classes(path: Path, arguments: Mapping[str, Any]) -> tuple[nn.Module, list[str]]:
    """Open a checkpoint with other arguments of timm.create_model; return the model and the names of its new tensors.

    The rate of drop path is the one that is given, 0 if none is, and not that of the training before.

    Raises: UserError when the file cannot be opened, or does not fit with these arguments.
    """
    opened = load(path)
    base = {**describe_base(opened), **arguments}
    if "drop_path_rate" in base and "drop_path_rate" not in arguments:
        base["drop_path_rate"] = 0.0
    model = rebuild(base, edits(opened))
    record_data(model, describe_data(opened))
    add_notes(model, *notes(opened))
    return model, load_state(model, opened.state_dict(), path, fresh_head=True)


def is_checkpoint_or_run(name: str) -> bool:
    """True if this is a checkpoint, also on the hub, or a run's folder, and not the name of a timm model."""
    return (
        name.startswith(HUB)
        or name.endswith(CHECKPOINTS)
        or (Path(name).exists() and not timm.is_model(name))
    )


def is_missing(name: str) -> bool:
    """Return True for a local checkpoint or run that does not exist."""
    return not (name.startswith(HUB) or timm.is_model(name) or Path(name).exists())


def needs_options(name: str) -> bool:
    """True for a checkpoint that isomorph did not write, or one or a run of a module that timm could not build."""
    path = Path(name)
    if not is_checkpoint_or_run(name):
        return False
    if path.is_dir():
        return "module" in (peek_header(path) or ())
    header = read_header(path) if path.suffix == ".safetensors" else {}
    return not is_own(header) or "module" in header


def check_pretrained_option(names: Sequence[str], weights: Path | None, pretrained: bool) -> None:
    """Raise UserError if random weights are asked for, for models that have weights."""
    if not pretrained and (weights or all(map(is_checkpoint_or_run, names))):
        raise UserError(
            "pretrained=False asks for random weights; give a timm model by name and no `weights`"
        )


def _pretrained_cfg(name: str) -> Any:
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError:
        stem, _, tag = name.partition(".")
        tags = ", ".join(known.partition(".")[2] for known in timm.list_pretrained(f"{stem}.*"))
        raise UserError(f"{stem} has no weights tagged {tag!r}; it has {tags or 'none'}") from None


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
    epochs = _epochs_of(found.values)
    whole = "the run's last snapshot"
    if progress["closed"] == epochs:
        whole = "the finished run"
    note = (
        f"{path}: {which} of {whole}, after {progress['closed']} of {epochs} epochs, "
        f"{progress['step']} steps"
    )
    return Contents(path, state, found.values["model"], notes=(note,))


def _epochs_of(values: JsonObject) -> Any:
    """Return the number of epochs of a run; of one with a number of iterations, in which they end."""
    iterations = values["recipe"].get("iterations")
    if not iterations:
        return values["recipe"].get("epochs")
    return math.ceil(iterations / max(1, values["data"]["steps"]))


def _encoder_prefix(recipe: JsonObject) -> str:
    """Return the prefix of the model's tensor names in a run: pre-training and guided detection wrap the model."""
    task = recipe.get("task")
    if isinstance(task, dict) and task.get("name") == "detection" and task.get("teacher"):
        return "student."
    mask = recipe.get("mask")
    if not isinstance(mask, dict):
        return ""
    return "student.encoder." if mask.get("teacher") else "encoder."
