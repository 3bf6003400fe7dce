"""Gates, centres and spans of the layers that mix content and position: of a model, and along its training."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import GPSA, GPSA2d


def _gated_attention_layers(model: nn.Module) -> dict[str, GPSA | GPSA2d]:
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
    return {name: torch.sigmoid(layer.gate.detach()) for name, layer in _gated_attention_layers(model).items()}


def attention_spans(model: nn.Module) -> dict[str, Tensor]:
    """Attention span 1 / locality of each head (T-CNN Fig. 4B); NaN where a head has lost its centre (locality <= 0).

    Shape: -> {name: (heads,)}
    """
    found = {name: layer.locality.detach() for name, layer in _gated_attention_layers(model).items()}
    return {name: torch.where(locality > 0, 1 / locality, torch.nan) for name, locality in found.items()}


def centres(model: nn.Module) -> dict[str, Tensor]:
    """Where each head's position looks, (row, column) steps from the query (ConViT eq. 5).

    Shape: -> {name: (heads, 2)}
    """
    return {name: layer.centre.detach().clone() for name, layer in _gated_attention_layers(model).items()}


Key = TypeVar("Key")


def track(
    models: Iterable[tuple[float, nn.Module]], look: Callable[[nn.Module], dict[Key, Tensor]]
) -> tuple[Tensor, dict[Key, Tensor]]:
    """What `look(model)` gives at each moment, by layer; NaN at moments without the layer. One model at a time is held.

    `models`: moments (epochs, say) and the model then, which may be read from disk one by one.

    Shape: {name: (...)} of each model -> moments (T,), {name: (T, ...)}
    Raises: UserError when no model has anything to look at.
    """
    moments, seen = list[float](), list[dict[Key, Tensor]]()
    problem = UserError("there is nothing to follow: no model was given")
    for moment, model in models:
        moments.append(moment)
        try:
            seen.append(look(model))
        except UserError as error:  # a CNN that is recast later has no gates yet
            seen.append({})
            problem = error
    like = {name: value for found in seen for name, value in found.items()}
    if not like:
        raise problem
    empty = {name: torch.full_like(value, torch.nan) for name, value in like.items()}
    return torch.tensor(moments), {name: torch.stack([f.get(name, empty[name]) for f in seen]) for name in like}


class GatingHistory(NamedTuple):
    """Dials at each moment of a training, by layer; NaN before a layer was there.

    Shape: moments (T,), gates and spans {name: (T, heads)}, centres {name: (T, heads, 2)}
    """

    moments: Tensor
    gates: dict[str, Tensor]
    centres: dict[str, Tensor]
    spans: dict[str, Tensor]


def track_gating(models: Iterable[tuple[float, nn.Module]]) -> GatingHistory:
    """Gates, centres and spans at each moment. Arguments and errors as `track`."""
    kinds = {"gates": gates, "centres": centres, "spans": attention_spans}

    def look(model: nn.Module) -> dict[tuple[str, str], Tensor]:
        return {(kind, name): value.cpu() for kind, of in kinds.items() for name, value in of(model).items()}

    moments, found = track(models, look)
    return GatingHistory(moments, *({name: v for (k, name), v in found.items() if k == kind} for kind in kinds))
