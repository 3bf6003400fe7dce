"""Recipes, the loop that runs them, and checkpoints."""

from isomorph.training.checkpoint import load, load_weights, save
from isomorph.training.loop import Diverged, Result, train
from isomorph.training.recipe import Recipe

__all__ = ["Diverged", "Recipe", "Result", "load", "load_weights", "save", "train"]
