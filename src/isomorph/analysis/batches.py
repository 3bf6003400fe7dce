"""Iterate over the batches of a tensor or a loader, and average over their images."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.surgery.calls import to_model


def batches(data: Tensor | Iterable[Any]) -> Iterator[Tensor]:
    """Yield the images of a batch, or of each batch of a loader, with or without labels.

    Raises: UserError if there is no batch.
    """
    empty = True
    for batch in [data] if isinstance(data, Tensor) else data:
        empty = False
        images = batch[0] if isinstance(batch, tuple | list) else batch
        if not isinstance(images, Tensor):
            raise UserError(f"a batch is a {type(images).__name__}; give a tensor of images, or a loader of them")
        yield images
    if empty:
        raise UserError("no batch was given; give a batch of images, or a loader with at least one")


def mean_over(
    model: nn.Module, data: Tensor | Iterable[Any], measure: Callable[[Tensor], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the mean over all images of `measure(batch)`, which is a mean over a batch; summed in float64."""
    sums, images = dict[str, Tensor](), Counter[str]()  # a layer may run for some batches only
    dtypes = dict[str, torch.dtype]()
    for batch in batches(data):
        for name, value in measure(to_model(batch, model)).items():
            dtypes[name] = value.dtype
            sums[name] = sums.get(name, torch.zeros_like(value, dtype=torch.float64)) + value.double() * len(batch)
            images[name] += len(batch)
    return {name: (total / images[name]).to(dtypes[name]) for name, total in sums.items()}
