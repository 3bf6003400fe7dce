"""Images in the normalisation of one model, for another model such as a teacher."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def renormalisation(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return scale and shift from images in one normalisation to another: std / std', (mean - mean') / std'.

    Both are data configs with `mean` and `std`. Shape: -> (C, 1, 1) each
    """
    (mean, std), (their_mean, their_std) = (
        [torch.tensor(config[key]).view(-1, 1, 1) for key in ("mean", "std")] for config in (own, theirs)
    )
    return std / their_std, (mean - their_mean) / their_std
