"""The sizes that an exported model takes: which of them are dynamic, and the shapes to trace and check it on."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from timm.layers import PatchEmbed
from torch import nn

from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import ImageSize, evaluation_config, input_size_problem
from isomorph.surgery.model_inputs import Inputs

DYNAMIC = ("batch", "size")
"""What may be dynamic: the number of images, and their height and width."""
_STEPS = (1, 2, 4, 7, 8, 14, 16, 28, 32, 64)
"""Differences to the model's own height and width to try, ascending."""
_TRACE_STEP = 32
"""Least difference of height and width in the traced images, so that the tracer does not take them for one size."""

Shape = tuple[int, int, int, int]
"""Images, channels, height and width."""


@dataclass(frozen=True)
class ExportShapes:
    """The shapes of an export. `size_multiple`: height and width differ from the model's own by multiples of it.

    The last `near` checks are on sizes that a smaller multiple would not include.
    """

    dynamic: tuple[str, ...]
    trace: Shape
    checks: tuple[Shape, ...]
    size_multiple: int | None = None
    near: int = 0
    names: ClassVar[tuple[str, ...]] = ("images",)
    output: ClassVar[str] = "logits"

    @property
    def axes(self) -> dict[str, dict[int, str]]:
        """The dynamic axes of the images, and their names."""
        return {"images": open_axes(self.dynamic, {2: "height", 3: "width"})}

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments to trace a model on."""
        return (random_images(self.trace, 0),), {}

    def examples(self) -> list[tuple[str, Inputs]]:
        """Return inputs to check a model on, each with its shape in words."""
        return [("x".join(map(str, shape)), random_images(shape, seed)) for seed, shape in enumerate(self.checks)]


def random_images(shape: Shape, seed: int) -> torch.Tensor:
    """Return standard normal noise, the same for every call with a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def open_axes(dynamic: tuple[str, ...], sides: dict[int, str]) -> dict[int, str]:
    """Return the dynamic axes of an input by number, with their names: the batch, and the given sides."""
    return ({0: "batch"} if "batch" in dynamic else {}) | (sides if "size" in dynamic else {})


def batch_sizes(dynamic: tuple[str, ...]) -> tuple[int, int, int]:
    """Return the numbers of examples in the checks; the second is that of the traced inputs."""
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
    """Choose the shapes to trace and check a model on, at the given size (height, width) or its own.

    Raises: UserError when the model does not take that size, or is to take any size and takes only one.
    """
    names = parse_dynamic(dynamic)
    if inputs := getattr(model, "example_inputs", None):
        raise UserError(f"the model takes {' and '.join(inputs(1))}, not images alone; give a network of images")
    channels, height, width = evaluation_config(model, size)["input_size"]
    if problem := input_size_problem(model, (channels, height, width)):
        raise UserError(f"the model takes no images of {height} x {width}: {problem}")
    batches = batch_sizes(names)
    if "size" not in names:
        checks = tuple((batch, channels, height, width) for batch in batches)
        return ExportShapes(names, checks[1], checks)
    multiple, step = _size_steps(model, channels, height, width, least_multiple)
    sides = ((height, width), (height, width + step), (height + step, width))
    shapes = tuple((batch, channels, *hw) for batch, hw in zip(batches, sides, strict=True))
    near = _near_sizes(model, channels, height, width, multiple, step)
    checks = shapes + tuple((batches[1], *size) for size in near)
    return ExportShapes(names, shapes[1], checks, multiple, len(near))


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
