"""Opening a model by its name in timm, its checkpoint, or the folder of its run."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from isomorph.checkpoints.files import read_header
from isomorph.checkpoints.foreign import NO_OPTIONS, ModelOptions, open_foreign
from isomorph.checkpoints.hub import local_file
from isomorph.checkpoints.hub_names import parse_hub_name
from isomorph.checkpoints.load import is_own_file, load, open_as
from isomorph.checkpoints.optimizer_state import AVERAGED_PREFIX, MODEL_PREFIX
from isomorph.checkpoints.rebuild import describe_base, rebuild_from_header
from isomorph.checkpoints.snapshot import (
    DamagedSnapshot,
    IntactSnapshot,
    newest_snapshot,
    read_snapshot,
)
from isomorph.errors import UserError
from isomorph.models import create, require_registered

_SUFFIXES = (".safetensors", ".pth", ".pt", ".pth.tar", ".ckpt", ".bin")
"""How names of checkpoints end; a file of another name is one too, if it exists."""


def open_model(
    name: str,
    weights: Path | None = None,
    pretrained: bool = True,
    options: ModelOptions = NO_OPTIONS,
    **arguments: Any,
) -> nn.Module:
    """Open a model by its name in timm, its checkpoint, or the folder of its run; in eval mode.

    `options` say what a checkpoint that isomorph did not write leaves open. A timm model gets the weights of the file
    `weights`, else its public weights if `pretrained`, else random ones; `arguments` go to timm.create_model.

    Raises: UserError when there is no such model, its weights are missing, or they do not fit.
    """
    if is_checkpoint_or_run(name):
        if weights:
            raise UserError(f"{name} has weights already; --weights applies to timm models by name")
        return open_trained(Path(name), options)
    if options.arch:
        raise UserError(f"--arch is for checkpoints; {name!r} is not a file" + _close_files(name))
    require_registered(name)
    arguments = {**arguments, **options.arguments()}
    if weights:
        return open_foreign(weights, options._replace(arch=name, num_classes=None, model_kwargs=arguments))
    public = _pretrained_cfg(name)
    if pretrained and not (public and public.has_weights):
        raise UserError(f"{name} has no public weights; give --weights")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # random weights are the same at every call
        return create(name, pretrained=pretrained, **arguments).eval()


def _close_files(name: str) -> str:
    """Return the names of files near this one, as a hint."""
    path = Path(name)
    names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(close[0])}?" if close else ""


def _pretrained_cfg(name: str) -> Any:
    """Return timm's config of a model's public weights. Raises: UserError for an unknown tag."""
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError:
        stem, _, tag = name.partition(".")
        tags = ", ".join(known.partition(".")[2] for known in timm.list_pretrained(f"{stem}.*"))
        raise UserError(f"{stem} has no weights tagged {tag!r}; it has {tags or 'none'}") from None


def check_pretrained_option(names: Sequence[str], weights: Path | None, pretrained: bool) -> None:
    """Raise UserError if --no-pretrained, which asks for random weights, is given for models that have weights."""
    if not pretrained and (weights or all(map(is_checkpoint_or_run, names))):
        raise UserError("--no-pretrained asks for random weights; give a timm model by name and no --weights")


def is_checkpoint_or_run(name: str) -> bool:
    """True if this is a checkpoint, also on the hub, or a run's folder, and not the name of a timm model."""
    return (
        parse_hub_name(name) is not None
        or name.endswith(_SUFFIXES)
        or (Path(name).exists() and not timm.is_model(name))
    )


def open_trained(path: Path, options: ModelOptions = NO_OPTIONS) -> nn.Module:
    """Open a checkpoint, or the current model of a run by its folder; in eval mode.

    For masked pre-training this is the encoder. The averaged weights are used if the file or run has any, and the last
    ones with `options.ema` False.

    Raises: UserError when there is no model yet, or the file is damaged or does not fit.
    """
    path = local_file(path)
    if not path.is_dir() and not is_own_file(path):
        return open_foreign(path, options)
    if path.is_file() and options.arch and "module" in read_header(path):
        return open_as(path, options)
    model = _open_run(path, options.ema) if path.is_dir() else load(path)
    _check_agreement(model, options, path)
    return model


def needs_options(name: str) -> bool:
    """True for a checkpoint that isomorph did not write, or of a module that timm could not build."""
    path = Path(name)
    if not is_checkpoint_or_run(name) or path.is_dir():
        return False
    return not is_own_file(path) or "module" in read_header(path)


def _check_agreement(model: nn.Module, options: ModelOptions, path: Path) -> None:
    """Raise UserError for options that are not those with which a file of isomorph says to build its model."""
    base = describe_base(model)
    name, classes = base["name"].partition(".")[0], getattr(model, "num_classes", None)
    recorded = {"num_classes": classes, **base}
    given = {"--arch": options.arch} if options.arch and options.arch.partition(".")[0] != name else {}
    others = {key: value for key, value in options.arguments().items() if key not in recorded or recorded[key] != value}
    if "num_classes" in others and options.num_classes is not None:
        given["--num-classes"] = others.pop("num_classes")
    if others:
        given["--model-kwargs"] = " ".join(f"{key}={value}" for key, value in others.items())
    if given:
        leave = " and ".join(f"{option} {value}" for option, value in given.items())
        raise UserError(f"{path} says how to build its model, {name} with {classes} classes; leave {leave} out")


def _open_run(path: Path, ema: bool) -> nn.Module:
    """Open the current model of a run by its folder, with its averaged weights if `ema` and it has any."""
    found = _newest_intact_snapshot(path)
    if found is None and (path / "model.safetensors").is_file():
        return load(path / "model.safetensors")
    if found is None:
        raise UserError(f"{path} is neither a checkpoint nor the folder of a run with a snapshot")
    header = found.values["model"] or _read_run_header(path)
    tensors = read_snapshot(found.path)
    has_average = any(name.startswith(AVERAGED_PREFIX) for name in tensors)
    prefix = AVERAGED_PREFIX if ema and has_average else MODEL_PREFIX
    prefix += _encoder_prefix(found.values["recipe"])
    state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    model = rebuild_from_header(header, state, found.path)
    try:
        model.load_state_dict(state)
    except RuntimeError:
        raise UserError(f"{found.path} is not the state of the run that wrote best.safetensors") from None
    return model.eval()


def _newest_intact_snapshot(folder: Path) -> IntactSnapshot | None:
    """Return the newest snapshot of a run. Raises: UserError when it is damaged, as an older one is another model."""
    files = [path for name in ("model", "best") if (path := folder / f"{name}.safetensors").is_file()]
    advice = f"give {files[0]} instead, or resume the run" if files else "resume the run"
    try:
        found = newest_snapshot(folder)
    except DamagedSnapshot as error:
        raise DamagedSnapshot(f"{error}; {advice}") from None
    if found and found.damaged:
        raise DamagedSnapshot(f"{found.damaged[0][1]}; {advice}")
    return found


def _read_run_header(folder: Path) -> dict[str, str]:
    """Return the header of a run whose snapshots have none. Raises: UserError when it has not been written yet."""
    if not (folder / "best.safetensors").is_file():
        raise UserError(f"the run in {folder} has no evaluated model yet; resume it until its first evaluation")
    return read_header(folder / "best.safetensors")


def _encoder_prefix(recipe: Mapping[str, Any]) -> str:
    """Return the prefix of the model's tensor names in a run: pre-training and guided detection wrap the model."""
    task = recipe.get("task")
    if isinstance(task, dict) and task.get("name") == "detection" and task.get("teacher"):
        return "student."
    mask = recipe.get("mask")
    if not isinstance(mask, dict):
        return ""
    return "student.encoder." if mask.get("teacher") else "encoder."
