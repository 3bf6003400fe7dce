"""Recipes, the loop that runs them, and checkpoints."""

from isomorph.training.checkpoint import load, load_weights, save
from isomorph.training.loop import Result, train
from isomorph.training.recipe import Recipe
from isomorph.training.watch import Diverged, Stopped

__all__ = ["Diverged", "Recipe", "Result", "Stopped", "load", "load_weights", "save", "train"]
