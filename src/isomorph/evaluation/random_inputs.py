"""Random inputs of a model: images, or what the model itself gives as an example of its inputs."""

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import training_config
from isomorph.surgery.model_inputs import Inputs


def random_images(batch: int, model: nn.Module, size: tuple[int, int] | None = None) -> Tensor:
    """Return standard normal noise at the given height and width or the model's own. Shape: -> (B, C, H, W)"""
    shape = training_config(model, size)["input_size"]
    if batch < 1:
        raise UserError(f"a batch of {batch} has no images; give at least 1")
    return torch.randn((batch, *shape), generator=torch.Generator().manual_seed(0))


def random_inputs(batch: int, model: nn.Module, size: tuple[int, int] | None = None) -> Inputs:
    """Return inputs that the model takes: its own `example_inputs(batch, size)` if it has them, else random images."""
    own = getattr(model, "example_inputs", None)
    if own is None:
        return random_images(batch, model, size)
    if batch < 1:
        raise UserError(f"a batch of {batch} has no inputs; give at least 1")
    return own(batch, size)


def inputs_like(model: nn.Module, batch: int, input_size: tuple[int, ...], device: torch.device | str) -> Inputs:
    """Return inputs for timing and counting, of the model's dtype, on a device.

    Shape: input_size is (channels, height, width)
    """
    dtype = next(model.parameters()).dtype
    own = getattr(model, "example_inputs", None)
    if own is None:
        images = torch.empty if torch.device(device).type == "meta" else torch.randn
        return images(batch, *input_size, device=device, dtype=dtype)
    pairs = own(batch, tuple(input_size[-2:])).items()
    return {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in pairs}
