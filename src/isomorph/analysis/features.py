"""The layers whose features are compared, and their features."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.analysis.capture import run_with_hooks
from isomorph.errors import UserError
from isomorph.surgery.where import Where, matches_where, nearest_names


def feature_layers(model: nn.Module, where: Where | None, least: int = 2) -> dict[str, nn.Module]:
    """The modules whose outputs are the features: those that timm names for the model, or those selected.

    Raises: UserError when there are fewer than `least`.
    """
    modules = dict(model.named_modules())
    if where is None:
        names = [info["module"] for info in getattr(model, "feature_info", [])]
        found = {name: modules[name] for name in names if name in modules}
    else:
        found = {name: module for name, module in modules.items() if name and matches_where(where, name, module)}
    if len(found) < least == 1:
        hint = nearest_names(where, list(modules)) if where else "; give where, like 'blocks.?' or 'layer?'"
        raise UserError(f"no layer of the model is selected to give features{hint}")
    if len(found) < least:
        raise UserError(f"features of {len(found)} layers do not evolve; give where, like 'blocks.?' or 'layer?'")
    return found


def _vectors(output: Tensor) -> Tensor:
    """Every image as one vector. Shape: -> (B, features)"""
    return output.flatten(1).float()


def _channels_second(model: nn.Module, layer: nn.Module, output: Tensor) -> Tensor:
    """A picture-like output as (B, C, H, W), though the model's layers give (B, H, W, C), as timm says of Swin's."""
    last = output.ndim == 4 and getattr(model, "output_fmt", "") == "NHWC" and not isinstance(layer, nn.Conv2d)
    return output.movedim(-1, 1) if last else output


@torch.no_grad()
def features(
    model: nn.Module, batch: Tensor, layers: dict[str, nn.Module], read: Callable[[Tensor], Tensor] = _vectors
) -> dict[str, Tensor]:
    """What is read from what each layer gives, at once, in eval mode; pictures as (B, C, H, W).

    Shape: -> {name: (B, features)}
    """
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(layer: nn.Module, _: Any, output: Any) -> None:
            seen[name] = read(_channels_second(model, layer, output[0] if isinstance(output, tuple) else output))

        return hook

    run_with_hooks(model, batch, [layer.register_forward_hook(keep(name)) for name, layer in layers.items()])
    return {name: seen[name] for name in layers if name in seen}
