"""Recipes, the loop that runs them, and checkpoints."""

from isomorph.training.checkpoint import load, load_weights, save
from isomorph.training.kept import dials_of_run, kept_models
from isomorph.training.loop import Result, train
from isomorph.training.recipe import Recipe
from isomorph.training.watch import Diverged, Stopped

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
