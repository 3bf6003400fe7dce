"""What the attention layers look at, by layer name."""

from collections.abc import Callable
from inspect import ismethod
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import GPSA, GPSA2d
from isomorph.layers.mode import eval_mode


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that can hand out their map (a method `attention`), by name.

    Raises: UserError when the model has none.
    """
    found = {name: module for name, module in model.named_modules() if ismethod(getattr(module, "attention", None))}
    if not found:
        raise UserError("the model has no attention layer of isomorph; recast it first")
    return found


@torch.no_grad()
def visit(model: nn.Module, batch: Tensor, look: Callable[..., Tensor]) -> dict[str, Tensor]:
    """What `look(layer, *arguments)` gives for each attention layer, on the arguments that it really receives."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name] = look(layer, *args, **kwargs)

        return hook

    layers = attention_layers(model).items()
    handles = [layer.register_forward_pre_hook(keep(name), with_kwargs=True) for name, layer in layers]
    try:
        with eval_mode(model):
            model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def attention_maps(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """The attention map of each layer, from the input that the layer really receives, in eval mode.

    Shape: batch (B, C, H, W) -> {name: (B, heads, queries, keys)}
    """
    return visit(model, batch, lambda layer, *args, **kwargs: layer.attention(*args, **kwargs))


def looks(model: nn.Module, batch: Tensor, place: tuple[float, float] = (0.5, 0.5)) -> dict[str, Tensor]:
    """What every head of each GPSA2d looks at from one place, as a picture on the layer's own map, its padding cut off.

    `place`: row and column of the query, as shares of height and width.

    Shape: batch (B, C, H, W) -> {name: (B, heads, h, w)}
    """

    def look(layer: Any, x: Tensor) -> Tensor:
        H, W = x.shape[-2:]
        Hq, Wq = layer.query_grid(H, W)
        row, column = (min(int(share * size), size - 1) for share, size in zip(place, (Hq, Wq), strict=True))
        ph, pw = layer.padding
        picture = layer.attention(x)[:, :, row * Wq + column].unflatten(-1, (H + 2 * ph, W + 2 * pw))
        return picture[..., ph : ph + H, pw : pw + W]

    return visit(model, batch, look)


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
