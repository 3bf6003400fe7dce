"""The port and resize commands."""

from contextlib import suppress
from typing import Annotated

from cyclopts import Parameter

import isomorph as iso
from isomorph.cli import options as opt
from isomorph.cli.output import show, spinner
from isomorph.errors import UnknownModel, UserError


@opt.command
def port(
    source: opt.Model,
    target: opt.Model,
    /,
    *,
    out: opt.Out,
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    size: opt.Size = None,
    partial: bool = False,
    overwrite: opt.Overwrite = False,
    json_: opt.Json = False,
) -> None:
    """Carry the weights of SOURCE to TARGET, another implementation of the same function; verify and save it.

    Names play no part: layers are brought together by what they compute. Both models are compared in float64; if they
    are not equal, the places where they part are printed, and settings that are not weights, such as eps.

    Example: isomorph port their_package.models:vit vit_tiny_patch16_224 --out vit.safetensors

    Parameters
    ----------
    source
        The model with the weights; --arch, --weights and --ema are about it.
    target
        The model that gets them: its own weights do not matter. A model of timm, which gets as many classes as the
        source has, a file that says what it is, or package.module:function.
    partial
        Save the target with what could be carried even if the models are not equal.
    """
    opt.check_out(out, overwrite, source)
    with opt.loading():
        from torch import Tensor

        from isomorph.cli.open_models import open_given, open_without_weights
        from isomorph.lab.evaluation.classes import class_count
        from isomorph.models.input_sizes import input_size_problem, random_inputs
        from isomorph.surgery import NotPorted
    with spinner("port") as show_step:
        show_step(f"loading {source} and {target}")
        first = open_given(source, opening)
        classes = None
        with suppress(UserError):  # the source is not a classifier
            classes = class_count(first, size)
        try:
            second = open_without_weights(target, classes)
        except UnknownModel as error:
            raise UserError(
                f"{target} does not say what model it is, and its weights are not read: give a model of timm or "
                "package.module:function as TARGET"
            ) from error
        show_step("comparing what both compute")
        inputs = random_inputs(2, first, size)
        if (
            size is None
            and isinstance(inputs, Tensor)
            and input_size_problem(first, inputs.shape[1:])
        ):
            inputs = random_inputs(2, second)
        report = iso.port_weights(first, second, inputs, partial=True)
    is_written = report.equal or partial
    if is_written:
        iso.save(report.model, out)
    written = f"\nwrote {out}" if is_written else ""
    found = {"out": str(out) if is_written else None, "report": report.as_dict()}
    show(json_, found, f"{report}{written}")
    if not is_written:
        raise NotPorted(report, "; --partial saves the target with what could be carried")


@opt.command
def resize(
    model: opt.Model,
    /,
    *,
    out: opt.Out,
    patch: Annotated[
        opt.Size,
        Parameter(help="Height and width of a patch, as in 8 or 8x16; by default the model's own."),
    ] = None,
    size: opt.Size = None,
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    images: opt.DataOptions = opt.DataOptions(),  # noqa: B008
    batch: opt.BatchSize = 2,
    overwrite: opt.Overwrite = False,
    json_: opt.Json = False,
) -> None:
    """Fit a vision transformer of timm to other patches or images; say what is exact and how far outputs move; save it.

    Patch filters are resized by the pseudo-inverse, positions interpolated. The inputs are random, or with --data
    evenly spaced test images, by default as many as --batch says.

    Example: isomorph resize vit_tiny_patch16_224 --patch 8 --size 128 --out vit8.safetensors --data photos
    """
    images.check()
    opt.check_out(out, overwrite, model)
    with opt.loading():
        from isomorph.cli.open_models import comparison_inputs, open_given
        from isomorph.models.input_sizes import training_config
    with spinner("resize") as show_step:
        show_step(f"loading {model}")
        net = open_given(model, opening)
        height, width = training_config(net)["input_size"][-2:]
        largest = max(height, (size or (0, 0))[0]), max(width, (size or (0, 0))[1])
        show_step("comparing both models on images")
        count = images.max_images or batch  # one batch, however many
        inputs = comparison_inputs(net, images, count, [largest])[0]
        report = iso.resize_patches(net, inputs, patch, size)  # type: ignore[arg-type]  # images
    iso.save(report.model, out)
    show(json_, {"out": str(out), "report": report.as_dict()}, f"{report}\nwrote {out}")
