"""Further inputs for models that are equal on one image: what one image cannot show.

On a small map a convolution with dilation reads one position, poolings are alike, and so are ways to enlarge it; small
numbers do not reach a bound; one image does not show what depends on the others of its batch.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isomorph.surgery.calls import (
    Inputs,
    describe_shape,
    first_of,
    with_other_count,
    with_other_lengths,
)

# Sides up to which images are enlarged to about twice the size; larger ones by a step.
_LARGEST_DOUBLED = 64
# Most examples of the given batch that are compared.
_MOST = 8
# What the numbers of the first and of the last image are multiplied by.
_SCALES = {
    "255 times as large and negative": (255.0, -3.0),
    "three times as large and negative": (3.0, -1.0),
    "as given": (1.0, 1.0),
}


@dataclass(frozen=True)
class FurtherInputs:
    """Inputs on which models were compared too, and the largest relative difference of an output in float64."""

    inputs: str
    difference: float

    def __str__(self) -> str:
        return f"also on {self.inputs}: relative difference {self.difference:.2g}"


@dataclass(frozen=True)
class Further:
    """On which further inputs models were compared, why not on others, and the first on which their outputs part."""

    compared: tuple[FurtherInputs, ...] = ()
    remarks: tuple[str, ...] = ()
    parts_on: Inputs | None = None


def given_inputs(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Yield the inputs given, where they have more than one example."""
    given = inputs[:_MOST] if isinstance(inputs, Tensor) and inputs.ndim else inputs
    if describe_shape(given) != describe_shape(first_of(inputs)):
        yield "the inputs given", given


def further_inputs(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Yield descriptions and further inputs, the most telling first; the first that both models run on is enough."""
    if isinstance(inputs, Tensor) and inputs.is_floating_point() and inputs.ndim > 1:
        yield from _further_images(inputs)
        return
    if not isinstance(inputs, Tensor) and any(map(_are_images, inputs.values())):
        for scaling, scales in _SCALES.items():
            yield f"two examples, their images of another size, {scaling}", _by_name(inputs, scales)
    for length, changed in with_other_lengths(with_other_count(first_of(inputs))):
        yield f"two sequences with {length}", changed
    yield "another number of examples", with_other_count(first_of(inputs))


def _are_images(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 4


def _further_images(images: Tensor) -> Iterator[tuple[str, Inputs]]:
    size = _larger(images)
    for scaling, scales in _SCALES.items():
        pair = _pair_of(images, scales)
        if size is not None:
            yield f"two images of another size, {scaling}", F.interpolate(pair, size)
        yield f"two images, {scaling}", pair


def odd_inputs(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Yield an image of odd sides, for which many models are not made: a difference there is a note."""
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        size = _larger(inputs)
        if size is not None:
            odd = tuple(side + 1 - side % 2 for side in size)
            yield "an image of odd sides", F.interpolate(inputs[:1], odd)


def _pair_of(inputs: Tensor, scales: tuple[float, float]) -> Tensor:
    """Return the first image and the last one turned round, times numbers."""
    return torch.cat([scales[0] * inputs[:1], scales[1] * inputs[-1:].flip(-1)])


def _by_name(inputs: Mapping[str, Any], scales: tuple[float, float]) -> Inputs:
    """Return two examples, images among them of another size, other values as they are."""
    two = with_other_count(first_of(inputs))
    assert not isinstance(two, Tensor)
    other = dict(two)
    for name, x in two.items():
        if _are_images(x):
            pair = _pair_of(x, scales)
            other[name] = F.interpolate(pair, _larger(pair))
    return other


def _larger(inputs: Tensor) -> tuple[int, ...] | None:
    """Return a larger size of the same factors up to 64, None for inputs that are not images, volumes or signals."""
    if not 3 <= inputs.ndim <= 5:
        return None
    sides = inputs.shape[2:]
    step = math.gcd(*sides, 64)
    if max(sides) > _LARGEST_DOUBLED:
        return tuple(side + (i + 1) * step for i, side in enumerate(sides))
    return tuple(2 * side + i * step for i, side in enumerate(sides))
