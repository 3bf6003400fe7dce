"""A training run: its state, steps and epochs, monitoring, logs, and the checks before it starts."""

from isomorph.training.run.guards import Diverged, Stopped
from isomorph.training.run.loop import Result, train

__all__ = ["Diverged", "Result", "Stopped", "train"]
