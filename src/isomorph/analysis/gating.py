"""Gates, centres and attention spans of gated layers, gammas of inserted blocks; in one model, or along training."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers import GPSA, GatedMap, PositionalAttention
from isomorph.layers.gated.tap_heads import TapHeads
from isomorph.layers.map_attention import InsertedBlock
from isomorph.operations import unwrap
from isomorph.surgery.modules import outermost_modules, parent_name

_GATED = (TapHeads, GPSA, PositionalAttention, GatedMap)


def _gated_attention_layers(model: nn.Module) -> dict[str, Any]:
    layers = outermost_modules(
        unwrap(model, to_copy=False), lambda module: isinstance(module, _GATED)
    )
    if not layers:
        raise UserError(
            "the model has no gated attention layer; recast it (inserted blocks: iso.analysis.gammas)",
        )
    named = {}
    for name, layer in layers.items():
        if isinstance(layer, GatedMap):  # a child of the attention layer
            name = parent_name(name)
        named[name] = layer
    return named


def gates(model: nn.Module) -> dict[str, Tensor]:
    """Return the weight of positional attention in every head: sigmoid(gate), 1 for position only, 0 for content only.

    Shape: -> {name: (heads,)}
    Source: ConViT eq. 7
    Raises: UserError if the model has no gated attention layer.

    >>> tcnn = iso.recast(timm.create_model("cifar_resnet20"), iso.ConvToGPSA(init="paper"), where="layer3.0.conv1")
    >>> round(iso.gates(tcnn)["layer3.0.conv1"][0].item(), 3)
    0.731
    """
    return {
        name: layer.position_share.detach()
        for name, layer in _gated_attention_layers(model).items()
    }


def gammas(model: nn.Module) -> dict[str, Tensor]:
    """Return the gamma of every channel of inserted blocks: x + gamma * block(x), 0 before training.

    Shape: -> {name: (channels,)}
    Raises: UserError if the model has no inserted block.

    >>> cnn = timm.create_model("resnet18").eval()
    >>> iso.analysis.gammas(iso.insert(cnn, iso.layers.MapAttention, after="layer3.1"))["layer3.1"].shape
    torch.Size([256])
    """
    modules = unwrap(model, to_copy=False).named_modules()
    blocks = {name: module for name, module in modules if isinstance(module, InsertedBlock)}
    if not blocks:
        raise UserError("the model has no inserted block; insert one with iso.insert")
    values = {}
    for name, block in blocks.items():
        values[name.removesuffix(".inserted")] = block.gamma.detach().clone()
    return values


def attention_spans(model: nn.Module) -> dict[str, Tensor]:
    """Return the attention span of every head, 1 / locality; NaN if it is not positive: the head has no centre then.

    Shape: -> {name: (heads,)}
    Source: T-CNN Fig. 4B
    Raises: UserError if the model has no gated attention layer.

    >>> tcnn = iso.recast(timm.create_model("cifar_resnet20"), iso.ConvToGPSA(locality=4.0), where="layer3.0.conv1")
    >>> iso.analysis.attention_spans(tcnn)["layer3.0.conv1"][0].item()
    0.25
    """
    spans = {}
    for name, layer in _gated_attention_layers(model).items():
        locality = layer.locality.detach()
        spans[name] = torch.where(locality > 0, 1 / locality, torch.nan)
    return spans


def centres(model: nn.Module) -> dict[str, Tensor]:
    """Return the centre of positional attention of every head, as a (row, column) offset from the query.

    Shape: -> {name: (heads, 2)}
    Source: ConViT eq. 5
    Raises: UserError if the model has no gated attention layer.

    >>> tcnn = iso.recast(timm.create_model("cifar_resnet20"), iso.ConvToGPSA(), where="layer3.0.conv1")
    >>> iso.analysis.centres(tcnn)["layer3.0.conv1"][0].tolist()
    [-1.0, -1.0]
    """
    return {
        name: layer.centre.detach().clone()
        for name, layer in _gated_attention_layers(model).items()
    }


# What a `GatingHistory` follows.
_GATING = {"gates": gates, "centres": centres, "spans": attention_spans}

Key = TypeVar("Key")


def track(
    models: Iterable[tuple[float, nn.Module]], measure: Callable[[nn.Module], dict[Key, Tensor]]
) -> tuple[Tensor, dict[Key, Tensor]]:
    """Return `measure(model)` at several epochs, stacked by layer; NaN where a model does not have the layer.

    `models`: pairs of an epoch and the model at that epoch; an iterator may load them one by one.

    Shape: {name: (...)} of each model -> epochs (T,), {name: (T, ...)}
    Raises: UserError if there is no model, or `measure` raises it for every model.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(), where="layer3.0.conv1")
    >>> epochs, gates = iso.analysis.track([(0, cnn), (10, tcnn)], iso.gates)
    >>> epochs.tolist(), tuple(gates["layer3.0.conv1"].shape)
    ([0, 10], (2, 9))
    """
    epochs: list[float] = []
    measured: list[dict[Key, Tensor]] = []
    problem = UserError("no model was given; give at least one pair of an epoch and a model")
    for epoch, model in models:
        epochs.append(epoch)
        try:
            measured.append(measure(model))
        except UserError as error:  # a CNN that is recast during training has no gates before that
            measured.append({})
            problem = error
    last_values: dict[Key, Tensor] = {}
    for values in measured:
        last_values |= values
    if not last_values:
        raise problem
    stacked = {}
    for name, value in last_values.items():
        nan = torch.full_like(value, torch.nan)
        stacked[name] = torch.stack([values.get(name, nan) for values in measured])
    return torch.tensor(epochs), stacked


class GatingHistory(NamedTuple):
    """Gates, centres and spans at several epochs, by layer; NaN where a model does not have the layer.

    Shape: epochs (T,), gates and spans {name: (T, heads)}, centres {name: (T, heads, 2)}

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(), where="layer3.0.conv1")
    >>> tuple(iso.analysis.track_gating([(0, cnn), (10, tcnn)]).centres["layer3.0.conv1"].shape)
    (2, 9, 2)
    """

    epochs: Tensor
    gates: dict[str, Tensor]
    centres: dict[str, Tensor]
    spans: dict[str, Tensor]


def track_gating(models: Iterable[tuple[float, nn.Module]]) -> GatingHistory:
    """Return gates, centres and spans at several epochs, of pairs of an epoch and a model as in `track`.

    Raises: UserError if no model has a gated attention layer.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> tcnn = iso.recast(cnn, iso.ConvToGPSA(), where="layer3.0.conv1")
    >>> tuple(iso.analysis.track_gating([(0, cnn), (10, tcnn)]).gates["layer3.0.conv1"].shape)
    (2, 9)
    """

    def measure(model: nn.Module) -> dict[tuple[str, str], Tensor]:
        values: dict[tuple[str, str], Tensor] = {}
        for kind, measured in _GATING.items():
            for name, value in measured(model).items():
                values[kind, name] = value.cpu()
        return values

    epochs, tracked = track(models, measure)
    history: dict[str, dict[str, Tensor]] = {kind: {} for kind in _GATING}
    for (kind, name), value in tracked.items():
        history[kind][name] = value
    return GatingHistory(epochs, **history)
