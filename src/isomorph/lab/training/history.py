"""The saved models of a run, and measures of its attention along the training."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isomorph.analysis import GatingHistory, track, track_gating
from isomorph.analysis.cost import count_macs, count_parameters
from isomorph.checkpoints.foreign import NO_OPTIONS, ModelOptions
from isomorph.errors import UserError
from isomorph.json_values import JsonObject
from isomorph.lab.data.loaders import eval_loader
from isomorph.lab.data.sources import Source
from isomorph.lab.training.open import needs_options, open_trained
from isomorph.lab.training.run.log import read_log
from isomorph.lab.training.run.snapshot import newest_snapshot
from isomorph.models.input_sizes import evaluation_config
from isomorph.terminal_tables import Rows


def saved_models(
    folder: str | Path, damaged: list[str] | None = None, options: ModelOptions = NO_OPTIONS
) -> Iterator[tuple[float, nn.Module]]:
    """Yield epoch and model of every checkpoint that `keep_every` saved, then of the newest snapshot of the run.

    Models are read one at a time, in eval mode. With a list `damaged`, unreadable checkpoints are skipped, and their
    error messages are appended to it. `options` say how to build a model that is not timm's.

    Raises: UserError when `folder` is not a folder or has no checkpoint.

    >>> data = {"source": "digits", "fraction": 0.02, "size": [8, 8]}
    >>> recipe = iso.Recipe(model={"name": "cifar_resnet20"}, data=data, epochs=1, keep_every=1)
    >>> result = iso.train(recipe, show=False)
    >>> [epoch for epoch, model in iso.training.saved_models(result.folder)]
    [1]

    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the folder of a run")
    epochs: list[tuple[float, Path]] = []
    for path in folder.iterdir():
        match = re.fullmatch(r"epoch-(\d+)\.safetensors", path.name)
        if match:
            epochs.append((int(match[1]), path))
    epochs.sort()
    snapshot = newest_snapshot(folder)
    last = epochs[-1][0] if epochs else 0
    reached = _reached_epoch(snapshot.values) if snapshot else 0
    if reached > last:
        epochs.append((reached, folder))
    if not epochs:
        raise UserError(
            f"{folder} has no checkpoint of a run; train with keep_every=1 to save one per epoch"
        )
    for epoch, path in epochs:
        try:
            model = _open(path, options)
        except UserError as error:
            if damaged is None:
                raise
            damaged.append(str(error))
        else:
            yield epoch, model


def _reached_epoch(values: JsonObject) -> float:
    """Return the epoch after which a snapshot was saved, a fraction within an epoch."""
    progress = values["progress"]
    steps = values["data"]["steps"]
    closed = progress["closed"]
    # the last epoch of a run of `iterations` may be short
    if progress["step"] <= closed * steps:
        return closed
    return progress["step"] / steps


def _open(path: Path, options: ModelOptions) -> nn.Module:
    return open_trained(path, options if needs_options(str(path)) else NO_OPTIONS)


def gating_history(
    folder: str | Path, damaged: list[str] | None = None, options: ModelOptions = NO_OPTIONS
) -> GatingHistory:
    """Return gates, centres and spans of a run, before training and after every epoch, as its log.jsonl has them.

    Without such a log they are those of the saved models; with a list `damaged`, unreadable ones are skipped, and their
    error messages are appended to it. `options` are as in `saved_models`.

    Raises: UserError when the folder has neither, or no model in it has a gated layer.

    >>> model = {"name": "cifar_resnet20", "recast": {"where": "layer3.2.conv2"}}
    >>> data = {"source": "digits", "fraction": 0.02, "size": [8, 8]}
    >>> result = iso.train(iso.Recipe(model=model, data=data, epochs=1), show=False)
    >>> iso.training.gating_history(result.folder).gates["layer3.2.conv2"].shape  # (epochs, heads)
    torch.Size([2, 9])
    """
    rows = [row for row in read_log(Path(folder) / "log.jsonl") if row.get("gating")]
    if not rows:
        return track_gating(saved_models(folder, damaged, options))

    return GatingHistory(
        epochs=torch.tensor([float(row["epoch"]) for row in rows]),
        gates=_logged_gating(rows, "gates"),
        centres=_logged_gating(rows, "centres"),
        spans=_logged_gating(rows, "spans"),
    )


def _logged_gating(rows: Rows, measure: str) -> dict[str, Tensor]:
    """Return a measure of every layer over the epochs of a log; NaN where it has null, or lacks the layer."""
    values: dict[str, np.ndarray] = {}
    for number, row in enumerate(rows):
        for layer, measures in row["gating"].items():
            logged = np.array(measures[measure], np.float32)
            if layer not in values:
                values[layer] = np.full((len(rows), *logged.shape), np.nan, np.float32)
            values[layer][number] = logged
    return {layer: torch.from_numpy(array) for layer, array in values.items()}


# One number for each head of each attention layer: (model, loader) -> {layer: (heads,)}.
MeasureHeads = Callable[[nn.Module, Any], dict[str, Tensor]]


def attention_history(
    folder: str | Path,
    measures: Mapping[str, MeasureHeads],
    source: Source,
    device: str = "cpu",
    damaged: list[str] | None = None,
    options: ModelOptions = NO_OPTIONS,
) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """Measure attention (nonlocality, entropy) on some images at every saved epoch of a run.

    With a list `damaged`, unreadable checkpoints are skipped, and their error messages are appended to it.

    Shape: -> epochs (T,), {measure: {layer: (T, heads)}}, NaN where a model lacks a layer
    Raises: UserError when the folder has no checkpoint, or no model in it has attention.
    """

    def measure_heads(model: nn.Module) -> dict[tuple[str, str], Tensor]:
        loader = eval_loader(source, evaluation_config(model.to(device)), 32)
        heads_of = {}
        for name, measure in measures.items():
            for layer, heads in measure(model, loader).items():
                heads_of[name, layer] = heads.cpu()
        return heads_of

    epochs, values = track(saved_models(folder, damaged, options), measure_heads)
    by_measure: dict[str, dict[str, Tensor]] = {name: {} for name in measures}
    for (name, layer), heads in values.items():
        by_measure[name][layer] = heads
    return epochs, by_measure


def run_cost(folder: str | Path, options: ModelOptions = NO_OPTIONS) -> dict[str, int]:
    """Return MACs per image, at the test size, and parameters of the newest model. Raises: UserError without one."""
    model = _open(Path(folder), options)
    return {
        "macs": count_macs(model, evaluation_config(model)["input_size"]),
        "parameters": count_parameters(model),
    }
