"""Outputs of two models next to each other: the largest difference, and what they consist of."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from isomorph.errors import UserError


def max_or_inf(values: Iterable[float]) -> float:
    """Return the largest value, infinity if one is NaN, 0 without any."""
    return max((math.inf if value != value else value for value in values), default=0.0)


def relative(difference: float, scale: float) -> float:
    """Return a difference as a share of the largest value."""
    return difference / scale if difference and scale else difference


def leaves(output: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what an output consists of, by name: a tensor, or the items of dicts, lists and data classes."""
    parts: Any = None
    if isinstance(output, Mapping):
        parts = output.items()
    elif isinstance(output, list | tuple):
        parts = enumerate(output)
    elif is_dataclass(output):
        parts = [(field.name, getattr(output, field.name)) for field in fields(output)]
    if parts is None:
        yield path, output
    for name, part in parts or ():
        yield from leaves(part, f"{path}.{name}")


def _full(x: Tensor) -> Tensor:
    x = x if x.layout == torch.strided else x.to_dense()
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def largest_difference(output: Any, other: Any) -> tuple[float, float]:
    """Return the largest difference of two outputs, and the largest finite value of the first.

    They are those of the tensor that differs most, relative to its values. Identical infinities are equal, NaN never.

    Raises: UserError if the outputs have different shapes, or no tensors.
    """
    tensors, others = ({n: x for n, x in leaves(y) if isinstance(x, Tensor)} for y in (output, other))
    shapes, other_shapes = ({name: tuple(x.shape) for name, x in both.items()} for both in (tensors, others))
    if shapes != other_shapes:
        if set(shapes) == set(other_shapes) == {""}:
            shapes, other_shapes = shapes[""], other_shapes[""]  # type: ignore[assignment]
        raise UserError(f"the outputs of the models have different shapes: {shapes} and {other_shapes}")
    if not tensors:
        raise UserError(f"the output of the model has no tensors: {type(output).__name__}")
    found = [(0.0, 0.0)]
    for y, z in ((_full(x), _full(others[name])) for name, x in tensors.items() if x.numel()):
        difference = (y - z).abs().masked_fill(y == z, 0).max().item()
        found.append((max_or_inf([difference]), y.abs().nan_to_num(0, 0, 0).max().item()))
    return max(found, key=lambda pair: (relative(*pair), pair[1]))


def noise_of(output: Any, other: Any) -> float:
    """Return the difference of two outputs of one model, 0 where it is not finite or they have different shapes."""
    try:
        difference = largest_difference(output, other)[0]
    except UserError:
        return 0.0
    return difference if math.isfinite(difference) else 0.0
