"""Opening the models that a command names."""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isomorph.checkpoints.foreign import ModelOptions
from isomorph.checkpoints.hub import local_file
from isomorph.checkpoints.open import check_pretrained_option, needs_options, open_model, open_trained
from isomorph.checkpoints.paths import parse_hub_name
from isomorph.cli.options import CheckpointOptions
from isomorph.deployment.artefact import is_artefact, open_image_artefact
from isomorph.errors import UserError
from isomorph.evaluation.suites.test_data import record_root
from isomorph.report.page_models import find_recipe
from isomorph.surgery import notes
from isomorph.training.recipe.read import parse_value
from isomorph.training.task import task_of, task_record


def open_given(
    name: str,
    checkpoint: CheckpointOptions,
    weights: Path | None = None,
    pretrained: bool = True,
    among: Sequence[str] = (),
) -> nn.Module:
    """Open a model by its name in timm, its checkpoint or its run, and print which of several weights were taken.

    `among` are all models of the command: if some are checkpoints of other programs, the options are about these alone.

    Raises: UserError when there is no such model, file or folder.
    """
    if is_artefact(name):
        raise UserError(f"{name} is an exported model, which only evaluate and robustness take; give its checkpoint")
    if "/" in name and ":" not in name and not Path(name).exists():
        raise UserError(f"there is no file or folder {name}")
    name, among = _on_disk(name), [_on_disk(other) for other in among]
    if not needs_options(name) and any(map(needs_options, among)):
        checkpoint = CheckpointOptions(ema=checkpoint.ema)
    model = _print_notes(open_model(name, weights, pretrained, library_options(checkpoint)))
    if recipe := _recipe_of(name):
        record_root(model, recipe)
    return model


def _recipe_of(name: str) -> dict[str, Any] | None:
    """Return the recipe of a run, or of the run of a checkpoint, or None."""
    path = Path(name)
    return find_recipe(path) if path.exists() else None


@functools.cache
def _on_disk(name: str) -> str:
    """Return the name of a model; of one on the hub, the path of its file, which is downloaded once."""
    return str(local_file(name)) if parse_hub_name(name) else name


def open_classifier(
    name: str,
    checkpoint: CheckpointOptions,
    weights: Path | None = None,
    pretrained: bool = True,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Open a model as `open_given` does, or an exported one, to measure its accuracy on a device.

    Raises: UserError for --no-pretrained with weights, or a run of masked pre-training, whose classifier is not
        trained.
    """
    if is_artefact(name):
        return _open_exported(name, weights, pretrained)
    check_pretrained_option([name], weights, pretrained)
    recipe = _recipe_of(name)
    if recipe and recipe.get("mask"):
        raise UserError(
            f"{name} is a run of masked pre-training: its classifier is not trained; fine-tune it first, with its "
            "model.safetensors as --model.weights of `isomorph train`"
        )
    return open_given(name, checkpoint, weights, pretrained).to(device)


def require_classifier(model: nn.Module, name: str) -> None:
    """Raise UserError for a model that was trained for another task than image classification."""
    if task_of(model):
        kind = task_record(model)["name"]
        raise UserError(f"{name} was trained for {kind}; this command is for image classifiers, see isomorph evaluate")


def _open_exported(name: str, weights: Path | None, pretrained: bool) -> nn.Module:
    """Open a .onnx or .pt2 file. Raises: UserError for options that are about weights, which it has."""
    if weights or not pretrained:
        raise UserError(f"{name} has its weights; leave out --weights and --no-pretrained")
    return open_image_artefact(name)


def open_given_checkpoint(path: Path, checkpoint: CheckpointOptions) -> nn.Module:
    """Open a checkpoint or the current model of a run, and print which of several weights were taken."""
    return _print_notes(open_trained(path, library_options(checkpoint)))


def library_options(given: CheckpointOptions) -> ModelOptions:
    """Return the options as the library takes them. Raises: UserError for --model-kwargs that are not NAME=VALUE."""
    return ModelOptions(given.arch, given.num_classes, _parse_model_kwargs(given.model_kwargs or []), given.ema)


def _parse_model_kwargs(assignments: Sequence[str]) -> dict[str, Any]:
    """Return arguments from assignments such as `img_size=96` or `img_size=[96,128]`. Raises: UserError without `=`."""
    arguments = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--model-kwargs {assignment!r} must be NAME=VALUE, for example img_size=96")
        arguments[name] = parse_value(text)
    return arguments


def _print_notes(model: nn.Module) -> nn.Module:
    for note in notes(model):
        print(f"isomorph: {note}", file=sys.stderr)
    return model
