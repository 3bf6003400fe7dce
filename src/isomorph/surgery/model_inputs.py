"""Inputs of a model: one tensor, or several by name."""

from collections.abc import Mapping
from types import UnionType
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import DoesNotRun, UserError

Inputs = Tensor | Mapping[str, Any]
"""A batch of images or other tensor, or the keyword arguments of a model."""


def run_model(model: nn.Module, inputs: Inputs) -> Any:
    """Return the output of a model for a tensor, or for keyword arguments.

    Raises: UserError for anything else, and DoesNotRun if the model cannot read them.
    """
    check_inputs(inputs)
    try:
        return model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        text = str(error).strip()
        if isinstance(error, UserError | torch.OutOfMemoryError) or "can't allocate memory" in text:
            raise
        reason = text.splitlines()[0][:200].rstrip(".") if text else type(error).__name__
        raise DoesNotRun(f"the model does not run on {_describe(inputs)}: {reason}") from error


def _describe(inputs: Inputs) -> str:
    """Return shape and dtype of the inputs, and what a batch of images should be if they are none."""
    if not isinstance(inputs, Tensor):
        return f"these inputs ({', '.join(inputs)})"
    shape, dtype = " x ".join(map(str, inputs.shape)), str(inputs.dtype).removeprefix("torch.")
    wanted = (
        "" if inputs.ndim == 4 and inputs.is_floating_point() else ", not a batch of normalised images (B, C, H, W)"
    )
    return f"an input of shape {shape} in {dtype}{wanted}"


def check_inputs(inputs: object, kinds: UnionType | type = Tensor | Mapping) -> None:
    """Raise UserError for anything but one batch: a tensor, or where it is allowed a dictionary of arguments."""
    if not isinstance(inputs, kinds):
        raise UserError(
            f"give a batch as the model reads it, like a tensor of images (B, C, H, W), not a {type(inputs).__name__}; "
            "of a loader, give the images of one batch: next(iter(loader))[0]"
        )
