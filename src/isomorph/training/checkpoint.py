"""Files that survive: written whole or not at all, read without running code, and enough to rebuild the model."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from isomorph.errors import UserError
from isomorph.models import create
from isomorph.surgery import RULES, Edit, edits, replay

FORMAT = "isomorph-1"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` on a file beside `path`, flushes it to disk and renames it: readers see the old file or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def describe_edits(model: nn.Module) -> list[dict[str, Any]]:
    """The model's edits as plain values."""
    return [
        {"rule": type(edit.rule).__name__, "fields": dataclasses.asdict(edit.rule), "names": list(edit.names)}  # type: ignore[call-overload]
        for edit in edits(model)
    ]


def describe_base(model: nn.Module) -> dict[str, Any]:
    """How timm creates the model that the edits start from: its name, classes and input channels."""
    config = getattr(model, "pretrained_cfg", None) or {}
    if not config.get("architecture"):
        raise UserError(f"{type(model).__name__} does not come from timm.create_model; give save() its base")
    return {
        "name": config["architecture"],
        "num_classes": getattr(model, "num_classes", None),
        "in_chans": getattr(model, "in_chans", 3),
    }


def save(model: nn.Module, path: str | Path, base: dict[str, Any] | None = None) -> None:
    """Writes the weights with all that rebuilds the model: its base and the edits made on it (safetensors, atomic).

    `base`: name and further arguments of timm.create_model; needed where the model was created with arguments other
    than num_classes and in_chans.
    """
    header = {
        "format": FORMAT,
        "base": json.dumps(base or describe_base(model)),
        "edits": json.dumps(describe_edits(model)),
    }
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    write_atomically(Path(path), lambda file: save_file(tensors, str(file), metadata=header))


def load(path: str | Path) -> nn.Module:
    """Rebuilds a model written by `save`: creates the base, replays the edits, loads every tensor strictly; eval mode.

    Raises: UserError when the file is missing, truncated, not isomorph's, or does not fit.
    """
    path = Path(path)
    header = read_header(path)
    if header.get("format") != FORMAT:
        raise UserError(
            f"{path} holds weights only, not how to rebuild the model; create the model and use load_weights"
        )
    try:
        base, stored = json.loads(header["base"]), json.loads(header["edits"])
        recorded = [Edit(RULES[edit["rule"]](**edit["fields"]), tuple(edit["names"])) for edit in stored]
        arguments = {key: value for key, value in base.items() if key not in ("name", "pretrained")}
        model = create(base["name"], **arguments)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise UserError(
            f"{path} says how to rebuild its model in a way this isomorph does not know ({error!r})"
        ) from None
    for edit in recorded[len(edits(model)) :]:
        model = replay(model, edit)
    load_weights(model, path)
    return model.eval()


def read_header(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file. Raises: UserError when it cannot be read."""
    if not path.is_file():
        raise UserError(f"no checkpoint {path}")
    try:
        with safe_open(str(path), framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); it may be truncated") from None


def read_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file or of a PyTorch one (weights only: no code in it is run)."""
    if not path.is_file():
        raise UserError(f"no checkpoint {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(str(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load and safetensors raise many kinds for a damaged file
        raise UserError(
            f"cannot read checkpoint {path} ({str(error).splitlines()[0]}); it may be truncated or foreign"
        ) from None
    for key in ("state_dict", "model"):
        state = state.get(key, state) if isinstance(state, dict) else state
    if not isinstance(state, dict):
        raise UserError(f"checkpoint {path} holds a {type(state).__name__}, not a dictionary of tensors")
    return state


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Loads a checkpoint into a model, strictly, through the model's own filter for foreign layouts.

    Raises: UserError saying which tensors are missing, unexpected or of another shape; the model is then unchanged.
    """
    path = Path(path)
    state = read_tensors(path)
    module = __import__(type(model).__module__, fromlist=["checkpoint_filter_fn"])
    if hasattr(module, "checkpoint_filter_fn"):
        state = module.checkpoint_filter_fn(state, model)
    refuse_misfit(model, state, path)
    model.load_state_dict(state)


def refuse_misfit(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Raises: UserError when the state is not the model's, tensor for tensor."""
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    shapes = [
        f"{name} {tuple(state[name].shape)} for {tuple(own[name].shape)}"
        for name in own
        if shape_differs(own, state, name)
    ]
    parts = [
        f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if names
    ]
    if parts:
        raise UserError(f"{path} does not fit {type(model).__name__}: tensors {'; '.join(parts)}")


def shape_differs(own: dict[str, Any], state: dict[str, Any], name: str) -> bool:
    return name in state and getattr(state[name], "shape", None) != own[name].shape


def save_state(state: dict[str, Any], path: Path) -> None:
    """Writes the state of a run (tensors and plain values), atomically."""
    write_atomically(path, lambda file: torch.save(state, file))


def load_state(path: Path) -> dict[str, Any]:
    """Reads the state of a run, without running code. Raises: UserError when it is damaged."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"cannot resume from {path} ({str(error).splitlines()[0]}); delete it to start the run again"
        ) from None
