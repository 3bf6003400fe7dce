"""Recipes, the loop that runs them, and checkpoints."""

from isomorph.checkpoints.model import load, load_weights, save
from isomorph.training.history import dials_of_run, kept_models
from isomorph.training.recipe.recipe import Recipe
from isomorph.training.run.guards import Diverged, Stopped
from isomorph.training.run.loop import Result, train

__all__ = [
    "Diverged",
    "Recipe",
    "Result",
    "Stopped",
    "dials_of_run",
    "kept_models",
    "load",
    "load_weights",
    "save",
    "train",
]
