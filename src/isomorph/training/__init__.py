"""Recipes, and the runs that train models from them."""

from isomorph.training.classification import Classification
from isomorph.training.dry_run.rehearsal import DryRun, dry_run
from isomorph.training.history import gating_history, saved_models
from isomorph.training.optim import parameter_groups
from isomorph.training.recipe.recipe import Recipe
from isomorph.training.recipe.tasks import register_task
from isomorph.training.run.guards import Diverged, Stopped
from isomorph.training.run.loop import Result, train
from isomorph.training.task import EvaluationOptions, Objective, Task

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
]
__all__ += ["gating_history", "parameter_groups", "register_task", "saved_models", "train"]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
