"""Batches of a tensor or a loader, and means over them: what is kept does not grow with the number of images."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from isomorph.errors import UserError


def batches(data: Tensor | Iterable[Any]) -> Iterator[Tensor]:
    """The images of one batch, or of a loader whose batches may hold labels too.

    Raises: UserError when there is none.
    """
    empty = True
    for given in [data] if isinstance(data, Tensor) else data:
        empty = False
        yield given[0] if isinstance(given, tuple | list) else given
    if empty:
        raise UserError("there is nothing to look at: no batch was given")


def mean_over(data: Tensor | Iterable[Any], look: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean over all images of what `look(batch)` gives as a mean over a batch's, summed in float64 at least."""
    sums, images = dict[str, Tensor](), 0
    dtypes = dict[str, torch.dtype]()
    for batch in batches(data):
        for name, value in look(batch).items():
            dtypes[name] = value.dtype
            sums[name] = sums.get(name, torch.zeros_like(value, dtype=torch.float64)) + value.double() * len(batch)
        images += len(batch)
    return {name: (total / images).to(dtypes[name]) for name, total in sums.items()}
