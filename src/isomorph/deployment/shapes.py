"""The inputs of an export: which of their sizes are dynamic, and the examples to trace and check a model on."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.models.input_sizes import (
    ImageSize,
    evaluation_config,
    fit_to_size,
    image_size,
    input_size_problem,
    knows_size,
)
from isomorph.surgery.calls import Inputs, describe_shape, own_inputs

# What may be dynamic: the number of images, their height and width (of texts their length), both,
# or nothing.
DYNAMIC = ("batch", "batch,size", "size", "none")
INPUT = "images"
# differences to the model's own height and width to try, ascending
_STEPS: tuple[int, ...] = (1, 2, 4, 7, 8, 12, 14, 16, 28, 32, 64)
# least difference of the traced heights and widths, else the tracer takes them for one
_TRACE_STEP = 32
# length of the sequences of a text network without dynamic size, if it takes more
_MAX_LENGTH = 512
NamedTensors = dict[str, Tensor]


@dataclass(frozen=True)
class ExportShapes:
    """The inputs to trace and check an export on, by name, and the names of their dynamic axes.

    `named`: the model takes them by name. `size_multiple`: height and width differ from the model's own by multiples of
    it. The last `near` checks are on sizes that a smaller multiple would not include.
    """

    dynamic: str
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

    def examples(self) -> list[tuple[str, Inputs]]:
        """Return inputs to check a model on, each with the shape of the first in words; the second is traced."""
        examples: list[tuple[str, Inputs]] = []
        for inputs in self.checks:
            first = inputs[self.names[0]]
            examples.append((describe_shape(first), inputs if self.named else first))
        return examples


def plan_export(
    model: nn.Module,
    dynamic: str,
    size: int | ImageSize | None,
) -> tuple[nn.Module, ExportShapes]:
    """Return the model, fitted to a size of images if one is given, and its shapes. Raises: as `plan_shapes`."""
    sides = None if size is None else image_size(size)
    if sides and not hasattr(model, "example_inputs"):
        model = fit_to_size(model, sides)
    return model, plan_shapes(model, dynamic, sides)


def plan_shapes(
    model: Any,
    dynamic: str,
    size: ImageSize | None = None,
    least_multiple: int = 1,
) -> ExportShapes:
    """Choose the inputs to trace and check a model on: images at the given size (height, width) or the model's own.

    A network with `example_inputs` takes texts or images with time steps. Of texts, dynamic size is the length of the
    sequences; without it they have the network's greatest length, at most 512. `least_multiple` is the least step
    between sizes that the exported graph is to be right for.

    Raises: UserError for a `dynamic` that is none of DYNAMIC, for a detector, without a size if the model says none,
        and when the model does not take the size, or is to take any size and takes only one.
    """
    if dynamic not in DYNAMIC:
        raise UserError(
            f"dynamic {dynamic} is unknown; give one of {', '.join(map(repr, DYNAMIC))}",
        )
    if hasattr(model, "detect"):
        raise UserError(
            "a detector cannot be exported: the number of its boxes depends on the image; use model.detect",
        )
    batches = (1, 1, 1)  # of three examples, of which the second is traced
    axes: dict[int, str] = {}
    if "batch" in dynamic:
        batches = (1, 2, 5)
        axes[0] = "batch"
    if hasattr(model, "max_length"):
        return _plan_text(model, dynamic, size, batches, axes)
    if "size" in dynamic:
        axes |= {2: "height", 3: "width"}
    if getattr(model, "time_steps", None):
        return _plan_denoiser(model, dynamic, size, batches, axes)
    if size is None and not knows_size(model):
        raise UserError(
            "the model does not say which size of images it takes; give size=224, or size=(224, 160) for height and "
            "width"
        )
    channels, height, width = evaluation_config(model, size)["input_size"]
    problem = input_size_problem(model, (channels, height, width))
    if problem:
        raise UserError(f"the model takes no images of {height} x {width}: {problem}")
    if "size" not in dynamic:
        checks = _random_images(channels, zip(batches, [(height, width)] * 3, strict=True))
        return ExportShapes(dynamic, checks, {INPUT: axes}, named=False)
    size_step = _size_step(model, (channels, height, width), least_multiple)
    trace_step = _trace_step(size_step)
    others = _sizes_between(model, (channels, height, width), size_step)
    sizes = [(height, width), (height, width + trace_step), (height + trace_step, width), *others]
    all_batches = [*batches, *[batches[1]] * len(others)]
    checks = _random_images(channels, zip(all_batches, sizes, strict=True))
    return ExportShapes(
        dynamic, checks, {INPUT: axes}, size_multiple=size_step, near=len(others), named=False
    )


def _sizes_between(model: nn.Module, own_size: tuple[int, int, int], step: int) -> list[ImageSize]:
    """Return sizes that differ from the model's own by one step, and from a traced one, as far as the model takes them.

    A traced graph has no branches: where a network pads maps of odd size, one that was traced at even sizes is wrong
    for odd ones, which these sizes show.
    """
    channels, height, width = own_size
    trace_step = _trace_step(step)
    sizes: list[ImageSize] = []
    if step == trace_step:  # the traced sizes are that close
        return sizes
    for difference in (step, step - trace_step):
        sides = (height + difference, width + difference)
        if min(sides) > step and not input_size_problem(model, (channels, *sides)):
            sizes.append(sides)
    return sizes


def _random_images(
    channels: int, sizes: Iterable[tuple[int, ImageSize]]
) -> tuple[NamedTensors, ...]:
    """Return batches of images for numbers of images and their sizes; the same in every process."""
    checks = []
    for seed, (batch, sides) in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn((batch, channels, *sides), generator=generator, device="cpu")
        checks.append({INPUT: images})
    return tuple(checks)


def _plan_denoiser(
    model: Any, dynamic: str, size: ImageSize | None, batches: tuple[int, ...], axes: dict[int, str]
) -> ExportShapes:
    """Return images with time steps, of the model's size and of larger ones if sizes are to be dynamic."""
    height, width = size or model.pretrained_cfg["input_size"][-2:]
    step = 2 ** (len(model.channels) - 1)
    if height % step or width % step:
        raise UserError(
            f"the model takes no images of {height} x {width}: sides must be multiples of {step}",
        )
    trace_step = 0
    multiple = None
    if "size" in dynamic:
        trace_step = _trace_step(step)
        multiple = step
    sizes = ((height, width), (height, width + trace_step), (height + trace_step, width))
    checks: Any = tuple(
        own_inputs(model, batch, sides) for batch, sides in zip(batches, sizes, strict=True)
    )
    of_steps = {axis: name for axis, name in axes.items() if axis == 0}
    return ExportShapes(dynamic, checks, {"x": axes, "t": of_steps}, "noise", multiple)


def _trace_step(step: int) -> int:
    """Return the step between the traced images: a multiple of the step between sizes."""
    return step * math.ceil(_TRACE_STEP / step)


def _size_step(model: nn.Module, own_size: tuple[int, int, int], minimum: int) -> int:
    """Return the smallest step between sizes that the model takes, that of its patches where it has plain ones.

    Raises: UserError when the model takes only its own size, or its graph is right for no step of at least `minimum`.
    """
    channels, height, width = own_size
    embed = getattr(getattr(model, "backbone", model), "patch_embed", None)
    steps = _STEPS
    if isinstance(embed, PatchEmbed) and not embed.dynamic_img_pad:
        steps = (max(embed.patch_size),)
    problem = ""
    for step in steps:
        trace_step = _trace_step(step)
        for sides in (
            (height, width + step),
            (height + trace_step, width),
            (height, width + trace_step),
        ):
            problem = input_size_problem(model, (channels, *sides))
            if problem:
                break
        if not problem and step >= minimum:
            return step
    if problem:
        raise UserError(
            f"the model takes images of {height} x {width} only; give dynamic batch, without size, or create the model "
            "so that it takes any size (dynamic_img_size=True for ViTs of timm)"
        )
    raise UserError(
        f"the exported graph is right for images of {height} x {width} only; give dynamic batch, not size"
    )


def _plan_text(
    model: Any,
    dynamic: str,
    size: ImageSize | None,
    batches: tuple[int, ...],
    batch_axis: dict[int, str],
) -> ExportShapes:
    """Return sequences, those of later batches with padding, and the types of their tokens if they count."""
    if size:
        raise UserError("`size` is for images; leave it out for a text network")
    longest = min(int(model.max_length), _MAX_LENGTH)
    lengths = (longest, longest, longest)
    axes = dict(batch_axis)
    if "size" in dynamic:
        lengths = (longest // 2, longest // 3, longest - 1)
        axes[1] = "length"
    checks = []
    for extra, (batch, N) in enumerate(zip(batches, lengths, strict=True)):
        model_inputs: Any = own_inputs(model, batch + extra, (1, N))
        # the first sequences have the least padding
        inputs = {name: x[extra:] for name, x in model_inputs.items()}
        if getattr(model.body.config, "type_vocab_size", 0) > 1:
            second_half = (torch.arange(N) >= N // 2).long()
            inputs["token_type_ids"] = second_half * inputs["attention_mask"]  # (batch, N)
        checks.append(inputs)
    return ExportShapes(dynamic, tuple(checks), dict.fromkeys(checks[0], axes))
