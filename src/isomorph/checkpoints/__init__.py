"""Files of models, snapshots of runs, and opening what the user named."""

from isomorph.checkpoints.model import load, load_weights, save
from isomorph.checkpoints.open import open_model, open_trained

__all__ = ["load", "load_weights", "open_model", "open_trained", "save"]
