"""Checkpoints of models and snapshots of training runs."""

from isomorph.checkpoints.foreign import ModelOptions
from isomorph.checkpoints.load import load
from isomorph.checkpoints.model import load_weights, save
from isomorph.checkpoints.open import open_model, open_trained

__all__ = ["ModelOptions", "load", "load_weights", "open_model", "open_trained", "save"]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
