"""Inputs of a model: one tensor, or several by name."""

from collections.abc import Mapping
from types import UnionType
from typing import Any

from torch import Tensor, nn

from isomorph.errors import UserError

Inputs = Tensor | Mapping[str, Any]
"""A batch of images or other tensor, or the keyword arguments of a model."""


def run_model(model: nn.Module, inputs: Inputs) -> Any:
    """Return the output of a model for a tensor, or for keyword arguments.

    Raises: UserError for anything else.
    """
    check_inputs(inputs)
    return model(inputs) if isinstance(inputs, Tensor) else model(**inputs)


def check_inputs(inputs: object, kinds: UnionType | type = Tensor | Mapping) -> None:
    """Raise UserError for anything but one batch: a tensor, or where it is allowed a dictionary of arguments."""
    if not isinstance(inputs, kinds):
        raise UserError(
            f"give a batch as the model reads it, like a tensor of images (B, C, H, W), not a {type(inputs).__name__}; "
            "of a loader, give the images of one batch: next(iter(loader))[0]"
        )
