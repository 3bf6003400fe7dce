"""Exports of networks with several inputs by name: text networks, and denoisers of images at time steps."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.deployment.shapes import batch_sizes, open_axes, parse_dynamic
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import ImageSize
from isomorph.surgery.model_inputs import Inputs

NamedTensors = dict[str, Tensor]

_MAX_LENGTH = 512
"""Length of the sequences of a text network without dynamic size, if it takes more."""


@dataclass(frozen=True)
class NamedShapes:
    """The inputs to trace and check an export on, by name.

    `axes` are the dynamic axes of each input with their names. `size_multiple`: height and width are multiples of it.
    """

    dynamic: tuple[str, ...]
    trace: NamedTensors
    checks: tuple[NamedTensors, ...]
    axes: dict[str, dict[int, str]]
    output: str
    size_multiple: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the inputs, in order."""
        return tuple(self.trace)

    def data(self) -> dict[str, Any]:
        """Return what the inputs are: the images' size, or the length of sequences that have one length."""
        first = self.trace[self.names[0]]
        if first.ndim == 4:
            return {"input_size": tuple(self.checks[0][self.names[0]].shape[1:])}
        return {} if "size" in self.dynamic else {"length": first.shape[1]}

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments to trace a model on."""
        return (), self.trace

    def examples(self) -> list[tuple[str, Inputs]]:
        """Return inputs to check a model on, each with the shape of the first in words."""
        return [("x".join(map(str, next(iter(inputs.values())).shape)), inputs) for inputs in self.checks]


def plan_inputs(model: Any, dynamic: str | Iterable[str], size: ImageSize | None = None) -> NamedShapes:
    """Choose the inputs to trace and check a network with `example_inputs` on.

    For text, dynamic size is the length of the sequences; else they have the network's greatest length, at most 512.

    Raises: UserError for a size of text, or one that a denoiser does not take.
    """
    names = parse_dynamic(dynamic)
    plan = _plan_images if getattr(model, "time_steps", None) else _plan_text
    return plan(model, names, size)


def _plan_text(model: Any, names: tuple[str, ...], size: ImageSize | None) -> NamedShapes:
    """Return sequences of unequal lengths, with padding in every batch, and the types of their tokens if they count."""
    if size:
        raise UserError("--size is for images; leave it out for a text network")
    longest = min(int(model.max_length), _MAX_LENGTH)
    lengths = (longest // 2, longest // 3, longest - 1) if "size" in names else (longest,) * 3
    checks = tuple(_text(model, b, n) for b, n in zip(batch_sizes(names), lengths, strict=True))
    axes = open_axes(names, {1: "length"})
    return NamedShapes(names, checks[1], checks, dict.fromkeys(checks[0], axes), "logits")


def _text(model: Any, batch: int, length: int) -> NamedTensors:
    """Return random sequences; the second half of each is a second text. Shape: -> (batch, length) each"""
    inputs: NamedTensors = model.example_inputs(batch, (1, length))
    if getattr(model.body.config, "type_vocab_size", 0) > 1:
        second = (torch.arange(length) >= length // 2).long()
        inputs["token_type_ids"] = (second * inputs["attention_mask"]).clone()
    return inputs


def _plan_images(model: Any, names: tuple[str, ...], size: ImageSize | None) -> NamedShapes:
    """Return images with time steps from the first to the last."""
    height, width = size or model.pretrained_cfg["input_size"][-2:]
    step = 2 ** (len(model.channels) - 1)
    if height % step or width % step:
        raise UserError(f"the model takes no images of {height} x {width}: sides must be multiples of {step}")
    far = step * -(-32 // step) if "size" in names else 0
    sizes = ((height, width), (height, width + far), (height + far, width))
    checks = tuple(model.example_inputs(b, hw) for b, hw in zip(batch_sizes(names), sizes, strict=True))
    axes = {"x": open_axes(names, {2: "height", 3: "width"}), "t": open_axes(names, {})}
    return NamedShapes(names, checks[1], checks, axes, "noise", step if far else None)


def takes_named_inputs(model: nn.Module) -> bool:
    """True for a network whose inputs are several tensors by name, which it gives examples of."""
    return hasattr(model, "example_inputs")
