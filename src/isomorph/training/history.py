"""The models that a run has left behind, one after the other: what looks along a training reads them here."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from isomorph.analysis import Trajectory, along, gating_along
from isomorph.checkpoints.open import open_trained
from isomorph.checkpoints.snapshot import newest_snapshot
from isomorph.data.loaders import eval_loader
from isomorph.data.sources import Source
from isomorph.errors import UserError
from isomorph.evaluation.cost import count_macs, count_parameters
from isomorph.evaluation.input_sizes import evaluation_config
from isomorph.suites.test_data import images_on_device


def saved_models(folder: str | Path, damaged: list[str] | None = None) -> Iterator[tuple[float, nn.Module]]:
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
    found = newest_snapshot(folder)
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


def gating_history(folder: str | Path, damaged: list[str] | None = None) -> Trajectory:
    """Gates, centres and spans along a run, from its folder: at every epoch that `keep_every` kept, and now.

    `damaged` as in `saved_models`.

    Raises: UserError when the folder holds no checkpoint, or no model in it has a gated layer.
    """
    return gating_along(saved_models(folder, damaged))


AttentionMeasure = Callable[[nn.Module, Any], dict[str, Tensor]]
"""A number for each head of each attention layer: (model, loader) -> {layer: (heads,)}."""


def attention_history(
    folder: str | Path,
    measures: Mapping[str, AttentionMeasure],
    source: Source,
    device: str = "cpu",
    damaged: list[str] | None = None,
) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """Measures of attention along a run, from its folder, on some images: nonlocality, entropy.

    `damaged` as in `saved_models`.

    Shape: -> moments (T,), {measure: {layer: (T, heads)}}, NaN before a layer was there
    Raises: UserError when the folder holds no checkpoint, or no model in it has attention.
    """

    def look(model: nn.Module) -> dict[tuple[str, str], Tensor]:
        loader = eval_loader(source, evaluation_config(model.to(device)), 32)
        found = {key: measure(model, images_on_device(loader, model)) for key, measure in measures.items()}
        return {(key, layer): heads.cpu() for key, layers in found.items() for layer, heads in layers.items()}

    moments, values = along(saved_models(folder, damaged), look)
    return moments, {key: {layer: heads for (kind, layer), heads in values.items() if kind == key} for key in measures}


def run_cost(folder: str | Path) -> dict[str, int]:
    """MACs of an image and parameters of a run's model as it is now, at the size that it is tested at.

    Raises: UserError when the folder holds no model that can be read.
    """
    model = open_trained(Path(folder))
    return {"macs": count_macs(model, evaluation_config(model)["input_size"]), "parameters": count_parameters(model)}
