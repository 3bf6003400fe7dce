"""Iterate over the batches of a tensor, of arguments by name or of a loader, and average over their images."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.operations import unwrap
from isomorph.surgery.calls import Inputs, batches_of, map_tensors, to_model

# One batch as the model reads it, a tensor or its arguments by name, or a loader of batches.
Data = Inputs | Iterable[Any]


def batches(data: Data) -> Iterator[Inputs]:
    """Yield the inputs of a batch, or of each batch of a loader, with or without labels. Raises: as `batches_of`."""
    return batches_of(data, of_loader=True)


def images_of(batch: Inputs) -> Tensor:
    """Return the images of a batch; of arguments by name, those with four axes, else the first that are not integers.

    Raises: UserError without a tensor.
    """
    if isinstance(batch, Tensor):
        return batch
    tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.ndim]
    if not tensors:
        raise UserError("the batch has no tensors; give the inputs of the model by name")
    floating = [value for value in tensors if value.is_floating_point()]
    maps = [value for value in floating if value.ndim == 4]
    return [*maps, *floating, *tensors][0]


def count_images(batch: Inputs) -> int:
    """Return the number of images in a batch."""
    return len(images_of(batch))


def some_images(batch: Inputs, start: int, stop: int) -> Inputs:
    """Return images start to stop of a batch, with these rows of every input that has one row an image."""
    count = count_images(batch)

    def part(value: Tensor) -> Tensor:
        return value[start:stop] if value.ndim and len(value) == count else value

    return map_tensors(batch, part)


def single_images(data: Data) -> Iterator[Inputs]:
    """Yield the images of all batches, one at a time."""
    for batch in batches(data):
        for index in range(count_images(batch)):
            yield some_images(batch, index, index + 1)


def mean_over(
    model: nn.Module,
    data: Data,
    measure: Callable[[Inputs], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Return the mean over all images of `measure(batch)`, which is a mean over a batch; summed in float64."""
    model = unwrap(model, to_copy=False)
    sums: dict[str, Tensor] = {}
    images: Counter[str] = Counter()  # a layer may run for some batches only
    dtypes: dict[str, torch.dtype] = {}
    for batch in batches(data):
        count = count_images(batch)
        for name, value in measure(to_model(batch, model)).items():
            dtypes[name] = value.dtype
            zero = torch.zeros_like(value, dtype=torch.float64)
            sums[name] = sums.get(name, zero) + value.double() * count
            images[name] += count
    return {name: (total / images[name]).to(dtypes[name]) for name, total in sums.items()}
