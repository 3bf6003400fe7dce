"""The models that a run has left behind, one after the other: what looks along a training reads them here."""

import re
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from isomorph.analysis import Trajectory, dials_along
from isomorph.errors import UserError
from isomorph.training.build import open_trained
from isomorph.training.snapshot import newest


def kept_models(folder: str | Path, damaged: list[str] | None = None) -> Iterator[tuple[float, nn.Module]]:
    """Epoch and model of every checkpoint that `keep_every` left in a run's folder, then of the run as it is now.

    Models are read one at a time, in eval mode. With a list `damaged`, those that cannot be read are left out and said
    in it.

    Raises: UserError when the folder holds no run, or one that has not been evaluated yet.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder of a run")
    named = {path: re.fullmatch(r"epoch-(\d+)\.safetensors", path.name) for path in folder.iterdir()}
    epochs = sorted((int(match[1]), path) for path, match in named.items() if match)
    found = newest(folder)
    now = found.values["progress"]["closed"] if found else None
    if now is not None and now > max((epoch for epoch, _ in epochs), default=0):
        epochs.append((now, folder))
    if not epochs:
        raise UserError(f"{folder} holds no checkpoint of a run; keep some with keep_every=1 in its recipe")
    for epoch, path in epochs:
        try:
            model = open_trained(path)
        except UserError as error:
            if damaged is None:
                raise
            damaged.append(str(error))
        else:
            yield epoch, model


def dials_of_run(folder: str | Path, damaged: list[str] | None = None) -> Trajectory:
    """Gates, centres and spans along a run, from its folder: at every epoch that `keep_every` kept, and now.

    `damaged` as in `kept_models`.

    Raises: UserError when the folder holds no checkpoint, or no model in it has a gated layer.
    """
    return dials_along(kept_models(folder, damaged))
