"""Opening a model by timm name, checkpoint, or folder of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from isomorph.checkpoints.files import read_header
from isomorph.checkpoints.model import load, load_weights
from isomorph.checkpoints.optimizer_state import AVERAGED_PREFIX, MODEL_PREFIX
from isomorph.checkpoints.rebuild import rebuild_from_header
from isomorph.checkpoints.snapshot import (
    DamagedSnapshot,
    IntactSnapshot,
    newest_snapshot,
    read_snapshot,
)
from isomorph.errors import UserError
from isomorph.models import create, require_registered


def open_model(name: str, weights: Path | None = None, pretrained: bool = True, **arguments: Any) -> nn.Module:
    """Open a timm model by name, a checkpoint written by isomorph, or the model of a run by its folder; in eval mode.

    A timm model gets the weights of the file `weights`, else its public weights if `pretrained`, else random ones, and
    `arguments` go to timm.create_model.
    """
    if is_checkpoint_or_run(name):
        if weights:
            raise UserError(f"{name} has weights already; --weights applies to timm models by name")
        return open_trained(Path(name))
    require_registered(name)
    public = _pretrained_cfg(name)
    if pretrained and weights is None and not (public and public.has_weights):
        raise UserError(f"{name} has no public weights; give --weights")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # random weights are the same at every call
        model = create(name, pretrained=pretrained and weights is None, **arguments)
    if weights:
        load_weights(model, weights)
    return model.eval()


def _pretrained_cfg(name: str) -> Any:
    """Return timm's config of a model's public weights. Raises: UserError for an unknown tag."""
    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError:
        stem, _, tag = name.partition(".")
        tags = ", ".join(known.partition(".")[2] for known in timm.list_pretrained(f"{stem}.*"))
        raise UserError(f"{stem} has no weights tagged {tag!r}; it has {tags or 'none'}") from None


def check_pretrained_option(name: str, weights: Path | None, pretrained: bool) -> None:
    """Raise UserError if --no-pretrained, which asks for random weights, is combined with weights."""
    if not pretrained and (weights or is_checkpoint_or_run(name)):
        raise UserError("--no-pretrained asks for random weights; give a timm model by name and no --weights")


def is_checkpoint_or_run(name: str) -> bool:
    """True if this is the path of a checkpoint or of a run's folder, and not the name of a timm model."""
    return name.endswith(".safetensors") or (Path(name).is_dir() and not timm.is_model(name))


def open_trained(path: Path, averaged: bool = True) -> nn.Module:
    """Open a checkpoint written by isomorph, or the current model of a run by its folder; in eval mode.

    For masked pre-training this is the encoder. With `averaged`, the averaged weights are used if the run has any.

    Raises: UserError when there is no model yet, or the file is damaged or does not fit.
    """
    if path.suffix == ".safetensors":
        return load(path)
    found = _newest_intact_snapshot(path) if path.is_dir() else None
    if found is None and (path / "model.safetensors").is_file():
        return load(path / "model.safetensors")
    if found is None:
        raise UserError(f"{path} is neither a checkpoint (.safetensors) nor the folder of a run with a snapshot")
    header = found.values["model"] or _read_run_header(path)
    tensors = read_snapshot(found.path)
    prefix = AVERAGED_PREFIX if averaged and any(name.startswith(AVERAGED_PREFIX) for name in tensors) else MODEL_PREFIX
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
    """Return the prefix of the model's tensor names in a run: masked pre-training wraps an encoder."""
    mask = recipe.get("mask")
    if not isinstance(mask, dict):
        return ""
    return "student.encoder." if mask.get("teacher") else "encoder."
