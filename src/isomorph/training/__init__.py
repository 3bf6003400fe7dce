"""Recipes, and the runs that train models from them."""

from isomorph.training.history import gating_history, saved_models
from isomorph.training.optim import parameter_groups
from isomorph.training.recipe.recipe import Recipe
from isomorph.training.run.guards import Diverged, Stopped
from isomorph.training.run.loop import Result, train

__all__ = ["Diverged", "Recipe", "Result", "Stopped", "gating_history", "parameter_groups", "saved_models", "train"]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
