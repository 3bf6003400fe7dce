"""The inputs of an export: which of their sizes are dynamic, and the examples to trace and check a model on."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import ImageSize, evaluation_config, input_size_problem
from isomorph.surgery.model_inputs import Inputs

DYNAMIC = ("batch", "size")
"""What may be dynamic: the number of images, and their height and width."""
INPUT = "images"
"""Name of the input of networks of images."""
_STEPS = (1, 2, 4, 7, 8, 14, 16, 28, 32, 64)
"""Differences to the model's own height and width to try, ascending."""
_TRACE_STEP = 32
"""Least difference of height and width in the traced images, so that the tracer does not take them for one size."""
_MAX_LENGTH = 512
"""Length of the sequences of a text network without dynamic size, if it takes more."""
NamedTensors = dict[str, Tensor]


@dataclass(frozen=True)
class ExportShapes:
    """The inputs to trace and check an export on, by name, and the names of their dynamic axes.

    `named`: the model takes them by name. `size_multiple`: height and width differ from the model's own by multiples of
    it. The last `near` checks are on sizes that a smaller multiple would not include.
    """

    dynamic: tuple[str, ...]
    checks: tuple[NamedTensors, ...]
    axes: dict[str, dict[int, str]]
    output: str = "logits"
    size_multiple: int | None = None
    near: int = 0
    named: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the inputs, in order."""
        return tuple(self.checks[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first input at the model's own size, without the batch."""
        return tuple(self.checks[0][self.names[0]].shape[1:])

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments to trace a model on."""
        return ((), self.checks[1]) if self.named else (tuple(self.checks[1].values()), {})

    def examples(self) -> list[tuple[str, Inputs]]:
        """Return inputs to check a model on, each with the shape of the first in words."""
        first = self.names[0]
        shapes = ("x".join(map(str, inputs[first].shape)) for inputs in self.checks)
        return [(s, inputs if self.named else inputs[first]) for s, inputs in zip(shapes, self.checks, strict=True)]


def _open_axes(dynamic: tuple[str, ...], sides: dict[int, str]) -> dict[int, str]:
    """Return the dynamic axes of an input by number, with their names: the batch, and the given sides."""
    return ({0: "batch"} if "batch" in dynamic else {}) | (sides if "size" in dynamic else {})


def _batch_sizes(dynamic: tuple[str, ...]) -> tuple[int, int, int]:
    """Return the numbers of examples in the checks; the second is traced."""
    return (1, 2, 5) if "batch" in dynamic else (1, 1, 1)


def parse_dynamic(dynamic: str | Iterable[str]) -> tuple[str, ...]:
    """Return what is dynamic, from "batch", "batch,size", "none" or a sequence. Raises: UserError for another word."""
    words = dynamic.split(",") if isinstance(dynamic, str) else list(dynamic)
    given = [word.strip() for word in words if word.strip() not in ("", "none")]
    if unknown := [word for word in given if word not in DYNAMIC]:
        raise UserError(f"dynamic {','.join(unknown)} is unknown; give batch, size (height and width), both, or none")
    return tuple(name for name in DYNAMIC if name in given)


def plan_shapes(
    model: nn.Module, dynamic: str | Iterable[str] = "batch", size: ImageSize | None = None, least_multiple: int = 1
) -> ExportShapes:
    """Choose the inputs to trace and check a model on: images at the given size (height, width) or the model's own.

    For a network with `example_inputs` they are texts, where dynamic size is the length of the sequences (else they
    have the network's greatest length, at most 512), or images with time steps.

    Raises: UserError when the model does not take that size, or is to take any size and takes only one.
    """
    names = parse_dynamic(dynamic)
    if hasattr(model, "example_inputs"):
        return (_plan_denoiser if getattr(model, "time_steps", None) else _plan_text)(model, names, size)
    channels, height, width = evaluation_config(model, size)["input_size"]
    if problem := input_size_problem(model, (channels, height, width)):
        raise UserError(f"the model takes no images of {height} x {width}: {problem}")
    axes = {INPUT: _open_axes(names, {2: "height", 3: "width"})}
    batches = _batch_sizes(names)
    if "size" not in names:
        return ExportShapes(names, _images([(batch, channels, height, width) for batch in batches]), axes, named=False)
    multiple, step = _size_steps(model, channels, height, width, least_multiple)
    sides = ((height, width), (height, width + step), (height + step, width))
    near = _near_sizes(model, channels, height, width, multiple, step)
    shapes = [(batch, channels, *hw) for batch, hw in zip(batches, sides, strict=True)]
    checks = _images([*shapes, *((batches[1], *other) for other in near)])
    return ExportShapes(names, checks, axes, size_multiple=multiple, near=len(near), named=False)


def _images(shapes: Iterable[tuple[int, ...]]) -> tuple[NamedTensors, ...]:
    """Return standard normal noise of each shape, the same at every call."""
    seeded = ((shape, torch.Generator().manual_seed(seed)) for seed, shape in enumerate(shapes))
    return tuple({INPUT: torch.randn(shape, generator=generator)} for shape, generator in seeded)


def _near_sizes(
    model: nn.Module, channels: int, height: int, width: int, multiple: int, far: int
) -> list[tuple[int, int, int]]:
    """Return a larger and a smaller size that differ from the model's own by odd multiples, those that it takes.

    The traced graph has no branches: where a network pads maps of odd size, it is right for even ones alone.
    """
    if multiple == far:
        return []
    sizes = [(channels, height + way, width + way) for way in (multiple, multiple - far)]
    return [size for size in sizes if min(size) > 0 and not input_size_problem(model, size)]


def _size_steps(model: nn.Module, channels: int, height: int, width: int, least: int) -> tuple[int, int]:
    """Return the smallest step between sizes that the model takes, and the step for traced images, a multiple of it.

    Raises: UserError when the model takes only its own size.
    """
    problem = "the exported graph would be wrong for other sizes"
    for step in (each for each in _steps(model) if each >= least):
        far = step * -(-_TRACE_STEP // step)
        sizes = [(channels, height, width + step), (channels, height + far, width), (channels, height, width + far)]
        problem = next(filter(None, (input_size_problem(model, other) for other in sizes)), "")
        if not problem:
            return step, far
    raise UserError(
        f"the model takes images of {height} x {width} only ({problem}); give dynamic batch, without size, or create "
        "the model so that it takes any size (dynamic_img_size=True for ViTs of timm)"
    )


def _steps(model: nn.Module) -> tuple[int, ...]:
    """Return the steps between sizes to try: that of the patches, where the model or its backbone has plain ones."""
    embed = getattr(getattr(model, "backbone", model), "patch_embed", None)
    if isinstance(embed, PatchEmbed) and not embed.dynamic_img_pad:
        return (max(embed.patch_size),)
    return _STEPS


def _plan_text(model: Any, names: tuple[str, ...], size: ImageSize | None) -> ExportShapes:
    """Return sequences of unequal lengths, with padding in every batch, and the types of their tokens if they count."""
    if size:
        raise UserError("--size is for images; leave it out for a text network")
    longest = min(int(model.max_length), _MAX_LENGTH)
    lengths = (longest // 2, longest // 3, longest - 1) if "size" in names else (longest,) * 3
    checks = tuple(_text(model, b, n) for b, n in zip(_batch_sizes(names), lengths, strict=True))
    axes = _open_axes(names, {1: "length"})
    return ExportShapes(names, checks, dict.fromkeys(checks[0], axes))


def _text(model: Any, batch: int, length: int) -> NamedTensors:
    """Return random sequences; the second half of each is a second text. Shape: -> (batch, length) each"""
    inputs: NamedTensors = model.example_inputs(batch, (1, length))
    if getattr(model.body.config, "type_vocab_size", 0) > 1:
        second = (torch.arange(length) >= length // 2).long()
        inputs["token_type_ids"] = (second * inputs["attention_mask"]).clone()
    return inputs


def _plan_denoiser(model: Any, names: tuple[str, ...], size: ImageSize | None) -> ExportShapes:
    """Return images with time steps from the first to the last."""
    height, width = size or model.pretrained_cfg["input_size"][-2:]
    step = 2 ** (len(model.channels) - 1)
    if height % step or width % step:
        raise UserError(f"the model takes no images of {height} x {width}: sides must be multiples of {step}")
    far = step * -(-32 // step) if "size" in names else 0
    sizes = ((height, width), (height, width + far), (height + far, width))
    checks = tuple(model.example_inputs(b, hw) for b, hw in zip(_batch_sizes(names), sizes, strict=True))
    axes = {"x": _open_axes(names, {2: "height", 3: "width"}), "t": _open_axes(names, {})}
    return ExportShapes(names, checks, axes, "noise", step if far else None)
