"""Opening the models that a command names."""

import sys
from pathlib import Path

from torch import nn

from isomorph.checkpoints import ModelOptions, open_model, open_trained
from isomorph.cli.options import CheckpointOptions
from isomorph.models.model_kwargs import parse_model_kwargs
from isomorph.surgery import notes


def open_given(
    name: str,
    checkpoint: CheckpointOptions,
    weights: Path | None = None,
    pretrained: bool = True,
) -> nn.Module:
    """Open a model by its name in timm, its checkpoint or its run, and print which of several weights were taken."""
    return _print_notes(open_model(name, weights, pretrained, library_options(checkpoint)))


def open_given_checkpoint(path: Path, checkpoint: CheckpointOptions, averaged: bool) -> nn.Module:
    """Open a checkpoint or the current model of a run, and print which of several weights were taken."""
    return _print_notes(open_trained(path, averaged, library_options(checkpoint)))


def library_options(given: CheckpointOptions) -> ModelOptions:
    """Return the options as the library takes them. Raises: UserError for --model-kwargs that are not NAME=VALUE."""
    return ModelOptions(given.arch, given.num_classes, parse_model_kwargs(given.model_kwargs or []), given.ema)


def _print_notes(model: nn.Module) -> nn.Module:
    for note in notes(model):
        print(f"isomorph: {note}", file=sys.stderr)
    return model
