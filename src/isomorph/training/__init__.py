"""Recipes, the loop that runs them, and checkpoints."""

from isomorph.checkpoints.model import load, load_weights, save
from isomorph.training.history import gating_history, saved_models
from isomorph.training.recipe.recipe import Recipe
from isomorph.training.run.guards import Diverged, Stopped
from isomorph.training.run.loop import Result, train

__all__ = [
    "Diverged",
    "Recipe",
    "Result",
    "Stopped",
    "gating_history",
    "load",
    "load_weights",
    "save",
    "saved_models",
    "train",
]
