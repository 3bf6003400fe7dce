"""What the attention layers look at, by layer name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import GPSA, GPSA2d


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that can hand out their map, by name.

    Raises: UserError when the model has none.
    """
    found = {name: module for name, module in model.named_modules() if callable(getattr(module, "attention", None))}
    if not found:
        raise UserError("the model has no attention layer of isomorph; recast it first")
    return found


@torch.no_grad()
def attention_maps(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """The attention map of each layer, from the input that the layer really receives, in eval mode.

    Shape: batch (B, C, H, W) -> {name: (B, heads, queries, keys)}
    """
    maps: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Any, tuple[Any, ...]], None]:
        def hook(layer: Any, args: tuple[Any, ...]) -> None:
            maps[name] = layer.attention(*args)

        return hook

    training = model.training
    handles = [layer.register_forward_pre_hook(keep(name)) for name, layer in attention_layers(model).items()]
    try:
        model.eval()(batch)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return maps


def gates(model: nn.Module) -> dict[str, Tensor]:
    """How much each head looks at places: sigma(gate), 1 for position only, 0 for content only.

    Shape: -> {name: (heads,)}
    """
    layers = {name: layer for name, layer in attention_layers(model).items() if isinstance(layer, GPSA | GPSA2d)}
    return {name: torch.sigmoid(layer.gate.detach()) for name, layer in layers.items()}


def spans(model: nn.Module) -> dict[str, Tensor]:
    """Attention span 1 / locality of each head (T-CNN Fig. 4B); not positive where a GPSA head has lost its centre.

    Shape: -> {name: (heads,)}
    """
    found: dict[str, Tensor] = {}
    for name, layer in attention_layers(model).items():
        if isinstance(layer, GPSA2d):
            found[name] = 1 / layer.locality.detach()
        elif isinstance(layer, GPSA):
            found[name] = -1 / layer.position.detach()[:, 2]
    return found
