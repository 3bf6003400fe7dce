"""Checks before a run starts, when nothing is written yet."""

import copy
from typing import Any

from torch import nn

from isomorph.analysis import logit_stats
from isomorph.checkpoints.hub import local_file
from isomorph.errors import UserError
from isomorph.evaluation.cost import has_pyramids
from isomorph.surgery.anneal import annealed_layers
from isomorph.training.build import apply_surgery
from isomorph.training.classification import recipe_task
from isomorph.training.recipe.recipe import Recipe


def check_files(recipe: Recipe) -> None:
    """Raise UserError without a model, or for a file that does not exist; names the run that makes it, if known."""
    if recipe.model.name is None and recipe.model.weights is None:
        raise UserError(f"{recipe.name} has no model; give --model.weights FILE, or a timm model as --model.name NAME")
    given = {"model.weights": recipe.model.weights and local_file(recipe.model.weights)}
    given |= {"mask.teacher": recipe.mask.teacher} if recipe.mask else {}
    given |= {"distill.weights": recipe.distill.weights} if recipe.distill else {}
    for field, path in given.items():
        if path and not path.is_file():
            if path.is_dir():
                raise UserError(
                    f"{field}: {path} is a folder; give a checkpoint in it, like {path / 'model.safetensors'}"
                )
            hint = (
                f"; `isomorph train {path.parts[1]}` creates it" if path.parts[0] == "runs" and path.parts[1:] else ""
            )
            raise UserError(f"{field}: {path} does not exist{hint}")


def check_start(recipe: Recipe) -> None:
    """Raise UserError when a recipe that requires trained weights is given none."""
    model = recipe.model
    if model.start == "weights" and not (model.weights or model.pretrained):
        raise UserError(
            f"{recipe.name} requires trained weights; give --model.weights FILE or --model.pretrained true "
            "(--model.start random starts from random weights)"
        )


def check_classes_and_surgery(recipe: Recipe, model: nn.Module, classes: int, recast: bool) -> None:
    """Raise UserError when the model has too few classes, or a later recast would fail."""
    if not recast:
        apply_surgery(copy.deepcopy(model), recipe.model)
    if getattr(model, "num_classes", classes) < classes:
        raise UserError(
            f"the data has {classes} classes, but model.num_classes is {model.num_classes}; raise it or leave it out"
        )


def check_attention(recipe: Recipe, model: nn.Module, config: dict[str, Any], recast: bool) -> None:
    """Raise UserError when there are no layers to anneal, or no attention to monitor, even after a late recast."""
    if recipe.anneal and recast:
        annealed_layers(model)
    if recipe.monitor_every:
        device, inputs = next(model.parameters()).device, recipe_task(recipe).attention_inputs(config)
        if inputs is None:
            raise UserError("monitor_every is for models of images; leave it out")
        monitored = model if recast else apply_surgery(copy.deepcopy(model), recipe.model)
        if not has_pyramids(monitored):  # their branches are monitored without attention too
            logit_stats(monitored, inputs.to(device))
