"""Rescale channels between layers so that 8-bit rounding loses less; the function stays the same to the last bit."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.eval_mode import eval_mode
from isomorph.surgery.channel_groups import ChannelGroup, channel_groups
from isomorph.surgery.compiled import copy_model
from isomorph.surgery.quantization_noise import apply_layer, round_activation, round_weight

STRENGTHS = (0.25, 0.5, 0.75, 1.0)
"""Shares of the spread of activations that move into weights, to choose from."""
_LEAST_GAIN = 0.05
"""Part of the error that rescaling must remove."""
_SAMPLE = 8
"""Images on which the errors are compared."""


def equalize(model: nn.Module, batches: Iterable[Any], activations: bool = True, bits: int = 8) -> nn.Module:
    """Return a copy of the model whose channels are rescaled where 8-bit rounding then loses less.

    A channel i of a norm, convolution or linear layer is divided by s_i, and the weights that read it are multiplied by
    s_i. Only norms, ReLU and pooling may be in between, which commute with positive factors. They are

        s_i = max|x_i|^a / max|w_i|^(1 - a), rounded to a power of two

    with the channel's activations x_i and the weights w_i that read it. Of several strengths a, and no change, the one
    with the least error of the readers' outputs on some of the images is taken, for each group of layers on its own.
    Powers of two change no digits: in float32 the outputs are equal to the last bit.

    Fuse the model first. Layers whose output is also added or multiplied stay as they are.

    Args:
        model: a model that torch.export can trace.
        batches: images (B, C, H, W), or (images, labels), as from a loader.
        activations: whether activations will be rounded, or only weights.
        bits: bits of the rounded weights.

    Source: SmoothQuant equations 3 and 4; cross-layer equalisation, Data-Free Quantization section 4.1; differs: the
        strength is chosen by the error, and factors are powers of two.
    Raises: UserError if there is no batch, or torch.export cannot trace the model.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20").eval()
        >>> images = torch.randn(4, 3, 32, 32)
        >>> even = iso.surgery.equalize(cnn, [images])
        >>> iso.verify(cnn, even, images).fp32
        0.0
    """
    return equalize_channels(model, batches, activations, bits)[0]


@torch.no_grad()
def equalize_channels(
    model: nn.Module, batches: Iterable[Any], activations: bool = True, bits: int = 8
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a copy of the model as `equalize` does, and the names of the layers whose outputs were rescaled."""
    if isinstance(batches, Tensor):
        raise UserError("equalize takes a list of batches or a loader, not one tensor; give [images]")
    model = copy_model(model)
    groups: tuple[ChannelGroup, ...] | None = None
    inputs: dict[str, _Inputs] = {}
    with eval_mode(model):
        for batch in batches:
            images = batch if isinstance(batch, Tensor) else batch[0]
            if groups is None:
                groups = channel_groups(model, images[:1].repeat(2, 1, 1, 1))
                inputs = {name: _Inputs() for group in groups for name in group.consumers}
            with _recording(model, inputs):
                model(images)
    if groups is None:
        raise UserError("equalize needs at least one batch")
    return model, tuple(group.producer for group in groups if _rescale(model, group, inputs, activations, bits))


@dataclass
class _Inputs:
    """What a layer receives: max|x| of every channel over all images, and the first images themselves."""

    largest: Tensor | None = None
    sample: Tensor | None = field(default=None, repr=False)

    def add(self, x: Tensor, axis: int) -> None:
        largest = x.movedim(axis, -1).flatten(0, -2).abs().amax(0)
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self.sample = x[:_SAMPLE].clone() if self.sample is None else self.sample


@contextmanager
def _recording(model: nn.Module, inputs: dict[str, _Inputs]) -> Iterator[None]:
    """Record what the named layers receive within the block."""

    def hook(record: _Inputs, axis: int) -> Any:
        return lambda module, args: record.add(args[0], axis)

    layers = {name: model.get_submodule(name) for name in inputs}
    handles = [
        layer.register_forward_pre_hook(hook(inputs[name], _channel_axis(layer))) for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _channel_axis(layer: nn.Module) -> int:
    return 1 if isinstance(layer, nn.Conv2d) else -1


def _rescale(model: nn.Module, group: ChannelGroup, inputs: dict[str, _Inputs], activations: bool, bits: int) -> bool:
    """Rescale the channels of a group with the strength that has the least error; return whether anything changed."""
    producer = model.get_submodule(group.producer)
    readers = [(model.get_submodule(name), inputs[name]) for name in group.consumers]
    known = all(isinstance(layer, nn.Linear | nn.Conv2d) and record.sample is not None for layer, record in readers)
    if not known:  # the model applies a weight itself, without calling the layer
        return False
    ones = torch.ones_like(readers[0][1].largest)  # type: ignore[arg-type]
    candidates = [_factors(readers, strength) for strength in STRENGTHS]
    errors = [_error(readers, factors, activations, bits) for factors in [ones, *candidates]]
    best = min(range(len(errors)), key=errors.__getitem__)
    if best == 0 or not errors[best] < (1 - _LEAST_GAIN) * errors[0]:
        return False
    factors = candidates[best - 1]
    for parameter in (producer.weight, producer.bias):
        if isinstance(parameter, Tensor):
            parameter.div_(factors.view(-1, *[1] * (parameter.ndim - 1)))
    for layer, _ in readers:
        layer.weight.mul_(_by_column(layer, factors))  # type: ignore[operator]
    return True


_Readers = Sequence[tuple[nn.Module, _Inputs]]


def _factors(readers: _Readers, strength: float) -> Tensor:
    """Return s of every channel as powers of two around 1. Shape: -> (C,)"""
    x = torch.stack([record.largest for _, record in readers]).amax(0)  # type: ignore[misc]
    w = torch.stack([_largest_by_column(layer) for layer, _ in readers]).amax(0)
    used = (x > 0) & (w > 0)
    exponents = strength * x.clamp(min=1e-30).log2() - (1 - strength) * w.clamp(min=1e-30).log2()
    exponents = exponents - exponents[used].mean() if used.any() else exponents
    return torch.where(used, exponents.round().clamp(-16, 16).exp2(), torch.ones_like(x))


def _largest_by_column(layer: nn.Module) -> Tensor:
    """Return max|w| of the weights that read each input channel. Shape: -> (C,)"""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    groups = getattr(layer, "groups", 1)
    return weight.abs().view(groups, weight.shape[0] // groups, weight.shape[1], -1).amax((1, 3)).flatten()


def _by_column(layer: nn.Module, factors: Tensor) -> Tensor:
    """Return the factors of input channels in a shape that multiplies the layer's weight."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    groups = getattr(layer, "groups", 1)
    rows = factors.view(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1).flatten(0, 1)  # (out, C / groups)
    return rows.view(*rows.shape, *[1] * (weight.ndim - 2))


def _error(readers: _Readers, factors: Tensor, activations: bool, bits: int) -> float:
    """Return the relative squared error of the readers' outputs with rounded weights and activations."""
    total = 0.0
    for layer, record in readers:
        x, weight = record.sample, layer.weight
        assert isinstance(x, Tensor)
        assert isinstance(weight, Tensor)
        exact = apply_layer(layer, x, weight)
        scaled = x / (factors.view(-1, *[1] * (x.ndim - 2)) if _channel_axis(layer) == 1 else factors)
        scaled = round_activation(scaled) if activations else scaled
        rounded = apply_layer(layer, scaled, round_weight(weight * _by_column(layer, factors), bits))
        power = float(exact.square().sum())
        total += float((rounded - exact).square().sum()) / power if power else 0.0
    return total if math.isfinite(total) else math.inf
