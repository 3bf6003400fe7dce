"""Recipes, and the runs that train models from them."""

from isomorph.errors import Stopped
from isomorph.lab.training.classification import Classification
from isomorph.lab.training.dry_run.rehearsal import DryRun, dry_run
from isomorph.lab.training.history import gating_history, saved_models
from isomorph.lab.training.optim import parameter_groups
from isomorph.lab.training.recipe.recipe import Recipe
from isomorph.lab.training.recipe.tasks import register_task
from isomorph.lab.training.run.guards import Diverged
from isomorph.lab.training.run.loop import Result, train
from isomorph.lab.training.task import EvaluationOptions, Objective, Task

__all__ = [
    "Classification",
    "Diverged",
    "DryRun",
    "EvaluationOptions",
    "Objective",
    "Recipe",
    "Result",
    "Stopped",
    "Task",
    "dry_run",
    "gating_history",
    "parameter_groups",
    "register_task",
    "saved_models",
    "train",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
