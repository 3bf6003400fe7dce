"""Gates, centres and spans of the layers that mix content and position: of a model, and along its training."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import GPSA, GPSA2d


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


def along(
    models: Iterable[tuple[float, nn.Module]], look: Callable[[nn.Module], dict[str, Tensor]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """What `look(model)` gives at each moment, by layer; NaN at moments without the layer. One model at a time is held.

    `models`: moments (epochs, say) and the model then, which may be read from disk one by one.

    Shape: {name: (...)} of each model -> moments (T,), {name: (T, ...)}
    Raises: UserError when no model has anything to look at, or a layer's shape changes.
    """
    moments, seen = list[float](), list[dict[str, Tensor]]()
    for moment, model in models:
        moments.append(moment)
        try:
            seen.append(look(model))
        except UserError as error:
            seen.append({})
            problem = error
    like = {name: value for found in seen for name, value in found.items()}
    if not like:
        raise problem if moments else UserError("there is nothing to follow: no model was given")
    empty = {name: torch.full_like(value, torch.nan) for name, value in like.items()}
    return torch.tensor(moments), {name: torch.stack([f.get(name, empty[name]) for f in seen]) for name in like}
