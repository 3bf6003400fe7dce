"""Random images as input of a model."""

import torch
from torch import nn

from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import training_config


def random_images(batch: int, model: nn.Module, size: tuple[int, int] | None = None) -> torch.Tensor:
    """Return standard normal noise at the given height and width or the model's own. Shape: -> (B, C, H, W)"""
    shape = training_config(model, size)["input_size"]
    if batch < 1:
        raise UserError(f"a batch of {batch} has no images; give at least 1")
    return torch.randn((batch, *shape), generator=torch.Generator().manual_seed(0))
