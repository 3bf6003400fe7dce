"""Further inputs for models that are equal on one image: what one image cannot show.

On a small map a convolution with dilation reads one position, poolings are alike, and so are ways to enlarge it; small
numbers do not reach a bound; one image does not show what depends on the others of its batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from isomorph.surgery.calls import Inputs, first_of, with_other_count, with_other_size

# Sides up to which images are enlarged to about twice the size; larger ones by a step.
_LARGEST_DOUBLED = 128
# What the numbers of the first image are multiplied by.
_SCALE = 3.0


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


def further_inputs(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Yield descriptions and further inputs, the most telling first; the first that both models run on is enough."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim < 2:
        yield "another number of examples", with_other_count(first_of(inputs))
        return
    first = inputs[:1]
    last = inputs[-1:]
    large = torch.cat([_SCALE * first, -last])
    as_given = torch.cat([first, last.flip(-1)])
    for values, pair in (
        ("three times as large and negative", large),
        ("as given and flipped", as_given),
    ):
        other = _resized(pair)
        if other is not None:
            yield f"two images of another size, {values}", other
        yield f"two images, {values}", pair


def _resized(images: Tensor) -> Tensor | None:
    """Return images of another size, None for other inputs."""
    other = with_other_size(images)
    if other is None or max(images.shape[-2:]) > _LARGEST_DOUBLED:
        return other
    height, width = images.shape[-2:]
    return F.interpolate(images, (2 * height, width + other.shape[-1]))
