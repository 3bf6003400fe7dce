"""What the attention layers look at, by layer name: ours, timm's plain attention, and that of its CoAtNets, MaxViTs."""

from collections.abc import Callable, Mapping, Sequence
from inspect import ismethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from isomorph.analysis.places import image_grid, places
from isomorph.analysis.scores import SCORED, scores
from isomorph.errors import UserError
from isomorph.layers import GPSA, GPSA2d
from isomorph.layers.mode import eval_mode

IMAGES_AT_ONCE = 8
"""Images whose maps are held at the same time where only a summary of them is wanted."""


def hands_out_map(layer: nn.Module) -> bool:
    """Whether the layer has a method `attention`."""
    return ismethod(getattr(layer, "attention", None))


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers whose map is known, by name: those with a method `attention`, or with known scores.

    Raises: UserError when the model has none.
    """
    named = model.named_modules()
    found = {name: m for name, m in named if isinstance(m, SCORED) or hands_out_map(m)}
    if not found:
        raise UserError("the model has no attention layer whose map is known; recast it first")
    return found


def attention_map(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The map that the layer's forward applies. Shape: -> (B, heads, queries, keys)"""
    if hands_out_map(layer):
        return layer.attention(x, *args, **kwargs)
    return scores(layer, x, *args, **kwargs).map()


@torch.no_grad()
def run_hooked(model: nn.Module, batch: Tensor, handles: Sequence[RemovableHandle]) -> None:
    """Runs the model in eval mode, and takes the hooks off it again."""
    try:
        with eval_mode(model):
            model(batch)
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def visit(
    model: nn.Module, batch: Tensor, look: Callable[..., Tensor], layers: Mapping[str, nn.Module] | None = None
) -> dict[str, Tensor]:
    """What `look(layer, *arguments)` gives for each layer, on the arguments that it really receives, in eval mode.

    By default for the attention layers.
    """
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name] = look(layer, *args, **kwargs)

        return hook

    layers = attention_layers(model) if layers is None else layers
    handles = [layer.register_forward_pre_hook(keep(name), with_kwargs=True) for name, layer in layers.items()]
    run_hooked(model, batch, handles)
    return seen


def attention_maps(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """The attention map of each layer, from the input that the layer really receives, in eval mode.

    Shape: batch (B, C, H, W) -> {name: (B, heads, queries, keys)}
    """
    return visit(model, batch, attention_map)


def looks(model: nn.Module, batch: Tensor, place: tuple[float, float] = (0.5, 0.5)) -> dict[str, Tensor]:
    """What every head looks at from one place, as a picture on the layer's grid without padding and prefix tokens.

    `place`: row and column of the query, as shares of height and width.

    Shape: batch (B, C, H, W) -> {name: (B, heads, h, w)}
    """
    grid = image_grid(model, batch)

    def look(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return places(layer, x, *args, grid=grid, **kwargs).picture(attention_map(layer, x, *args, **kwargs), place)

    return visit(model, batch, look)


def nonlocality(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """How far each head looks: sum over keys of attention times distance, mean over queries and images.

    From the map that each layer really applies to what it really receives, in steps of its grid (in patches, for a
    ViT). Tokens without a place (class token, registers) are no queries, and attention to them counts as distance 0.

    Shape: batch (B, C, H, W) -> {name: (heads,)}
    Source: ConViT eq. 8; differs: the authors' code feeds the patch embedding to every layer
    """
    grid = image_grid(model, batch)

    def look(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        where = places(layer, x, *args, grid=grid, **kwargs)
        distances = where.distances(x.device).to(torch.promote_types(x.dtype, torch.float32))
        sums: list[Tensor] = []
        for part in x.split(IMAGES_AT_ONCE):
            maps = attention_map(layer, part, *args, **kwargs)[:, :, where.prefix :, where.prefix :]
            sums.append(torch.einsum("bhqk,qk->h", maps.to(distances.dtype), distances))
        return torch.stack(sums).sum(0) / (len(x) * len(distances))

    return visit(model, batch, look)


def gated_layers(model: nn.Module) -> dict[str, GPSA | GPSA2d]:
    """Layers that mix content and position, by name.

    Raises: UserError when the model has none.
    """
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, GPSA | GPSA2d)}
    if not found:
        raise UserError("the model has no gated attention layer; recast it first")
    return found


def gates(model: nn.Module) -> dict[str, Tensor]:
    """How much each head looks at places: sigma(gate), 1 for position only, 0 for content only.

    Shape: -> {name: (heads,)}
    """
    return {name: torch.sigmoid(layer.gate.detach()) for name, layer in gated_layers(model).items()}


def spans(model: nn.Module) -> dict[str, Tensor]:
    """Attention span 1 / locality of each head (T-CNN Fig. 4B); not positive where a GPSA head has lost its centre.

    Shape: -> {name: (heads,)}
    """
    return {name: 1 / layer.locality.detach() for name, layer in gated_layers(model).items()}


def centres(model: nn.Module) -> dict[str, Tensor]:
    """Where each head's position looks, (row, column) steps from the query (ConViT eq. 5).

    Shape: -> {name: (heads, 2)}
    """
    return {name: layer.centre.detach().clone() for name, layer in gated_layers(model).items()}
