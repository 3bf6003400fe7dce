"""What is found out before a run begins, and anything is written."""

import copy
from typing import Any

import torch
from torch import nn

from isomorph.analysis import logit_stats
from isomorph.errors import UserError
from isomorph.surgery import annealed_layers
from isomorph.training.build import apply_surgery
from isomorph.training.recipe.recipe import Recipe


def check_files(recipe: Recipe) -> None:
    """Raises: UserError naming the field whose file is not there, and the run that makes it where that is known."""
    given = {"model.weights": recipe.model.weights}
    given |= {"mask.teacher": recipe.mask.teacher} if recipe.mask else {}
    given |= {"distill.weights": recipe.distill.weights} if recipe.distill else {}
    for field, path in given.items():
        if path and not path.is_file():
            if path.is_dir():
                raise UserError(
                    f"{field}: {path} is a folder; give a checkpoint in it, like {path / 'model.safetensors'}"
                )
            hint = f"; `isomorph train {path.parts[1]}` makes it" if path.parts[0] == "runs" and path.parts[1:] else ""
            raise UserError(f"{field}: no checkpoint {path}{hint}")


def check_start(recipe: Recipe) -> None:
    """Raises: UserError when a recipe that starts from trained weights is given none."""
    model = recipe.model
    if model.start == "weights" and not (model.weights or model.pretrained):
        raise UserError(
            f"{recipe.name} starts from trained weights; give --model.weights FILE or --model.pretrained true "
            "(--model.start random trains from random ones)"
        )


def check_classes_and_surgery(recipe: Recipe, model: nn.Module, classes: int, recast: bool) -> None:
    """Raises: UserError when the model has too few classes, or cannot be recast later: said now, not in mid-run."""
    if not recast:
        apply_surgery(copy.deepcopy(model), recipe.model)
    if getattr(model, "num_classes", classes) < classes:
        raise UserError(f"the data has {classes} classes, model.num_classes is {model.num_classes}")


def check_attention(recipe: Recipe, model: nn.Module, config: dict[str, Any], recast: bool) -> None:
    """Raises: UserError when there is nothing to anneal, or no attention to watch, now or after a late recast."""
    if recipe.anneal and recast:
        annealed_layers(model)
    if recipe.monitor_every:
        device = next(model.parameters()).device
        watched = model if recast else apply_surgery(copy.deepcopy(model), recipe.model)
        logit_stats(watched, torch.zeros(1, *config["input_size"], device=device))
