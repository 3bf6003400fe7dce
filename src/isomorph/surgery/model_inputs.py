"""Inputs of a model: one tensor, or several by name."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

Inputs = Tensor | Mapping[str, Any]
"""A batch of images or other tensor, or the keyword arguments of a model."""


def run_model(model: nn.Module, inputs: Inputs) -> Any:
    """Return the output of a model for a tensor, or for keyword arguments."""
    return model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
