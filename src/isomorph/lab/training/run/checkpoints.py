"""The files that a run writes: snapshots to resume from, and checkpoints of the evaluated model.

Every process must call these functions; the leading one writes.
"""

import json
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from isomorph.checkpoints.autoencoder import save_autoencoder as write_autoencoder
from isomorph.checkpoints.files import read_contents
from isomorph.checkpoints.model import write_model
from isomorph.checkpoints.open import load
from isomorph.errors import UserError
from isomorph.lab.training.parallel import gathered_state_dict
from isomorph.lab.training.recipe.recipe import identity_json
from isomorph.lab.training.run.snapshot import write_snapshot
from isomorph.lab.training.run.state import Run


def save_snapshot(run: Run) -> Path:
    """Write a snapshot and return its folder. Raises: UserError when it cannot be written."""
    run.share_unreadable()
    run.share_buffers()
    tensors, values = run.tensors()
    state = {
        "optimizer": values,
        "recipe": json.loads(identity_json(run.recipe)),
        "progress": vars(run.progress),
        "lanes": run.lanes,
        "data": run.counts,
        "model": run.header,
    }
    return write_snapshot(run.recipe.folder, run.progress.step, tensors, state, run.runtime)


def save_model(run: Run, path: Path) -> None:
    """Write a checkpoint of the evaluated model."""
    tensors = gathered_state_dict(run.eval_model)
    if run.runtime.is_main:
        write_model(run.header, tensors, path)


def has_saved_model(run: Run, path: Path) -> bool:
    """Return True if this checkpoint exists with the current weights."""
    tensors = gathered_state_dict(run.eval_model)
    same = False
    if run.runtime.is_main:
        with suppress(UserError):  # no such file, or a truncated one
            written = read_contents(path)
            same = written.header == run.header and written.tensors.keys() == tensors.keys()
            if same:
                same = all(
                    torch.equal(tensor.cpu(), written.tensors[name])
                    for name, tensor in tensors.items()
                )
    return bool(run.runtime.maximum(same)[0])


def save_autoencoder(run: Run) -> None:
    """Write the whole autoencoder after masked pre-training; nothing for other runs."""
    if not run.objective.autoencoder:
        return
    model = run.objective.autoencoder(run.averaged or run.trained)
    tensors = gathered_state_dict(model)
    if run.runtime.is_main:
        write_autoencoder(model, run.recipe.folder / "autoencoder.safetensors", run.header, tensors)


def final_model(run: Run) -> nn.Module:
    """Return the evaluated model of a finished run, unsharded, in eval mode."""
    if run.recipe.scale.parallel == "ddp":
        return run.eval_model.eval()
    run.runtime.maximum(0)  # wait until the leading process has written the file
    return load(run.recipe.folder / "model.safetensors")
