"""A model at another image size than its own."""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from timm.data import resolve_data_config
from torch import nn

from isomorph.errors import UserError
from isomorph.layers.mode import eval_mode


def evaluation_config(model: nn.Module, size: tuple[int, int] | None = None) -> dict[str, Any]:
    """The data config to test a model with: input size (height, width) as given or its own, mean, std, crop.

    Raises: UserError for a size without a pixel.
    """
    if size and min(size) < 1:
        raise UserError(f"a size of {size[0]} x {size[1]} has no pixel; give positive sizes")
    return resolve_data_config({"input_size": (3, *size)} if size else {}, model=model, use_test_size=True)


def at_size(model: nn.Module, size: tuple[int, int]) -> nn.Module:
    """The model itself if it takes images of this size (height, width), else a copy that timm has fitted to it.

    A ViT's position embedding is resampled, as `set_input_size` does; the weights stay as they are.

    Raises: UserError when the model takes no such images.
    """
    problem = refusal(model, (channels(model), *size))
    if problem and hasattr(model, "set_input_size"):
        model = copy.deepcopy(model)
        try:
            with warnings.catch_warnings(action="ignore"):  # timm's interpolation of relative positions
                model.set_input_size(img_size=size)  # type: ignore[operator]
            problem = refusal(model, (channels(model), *size))
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            problem = " ".join(str(error).split())
    if problem:
        raise UserError(f"the model takes no images of {size[0]} x {size[1]}: {problem}")
    return model


@torch.no_grad()
def refusal(model: nn.Module, size: Sequence[int]) -> str:
    """What the model says against one image of this size (channels, height, width); nothing where it takes it."""
    parameter = next(model.parameters())
    try:
        with eval_mode(model):
            model(torch.zeros(1, *size, device=parameter.device, dtype=parameter.dtype))
    except (RuntimeError, AssertionError, ValueError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def channels(model: nn.Module) -> int:
    """Channels of the model's images."""
    return getattr(model, "in_chans", None) or (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3,))[0]
