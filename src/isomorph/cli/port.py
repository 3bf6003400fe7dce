"""The port command."""

from pathlib import Path

import isomorph as iso
from isomorph.cli import options as opt
from isomorph.cli.output import show, spinner


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
        The model that gets them: its own weights do not matter.
    partial
        Save the target with what could be carried even if the models are not equal.
    """
    opt.check_out(out, overwrite, Path(source))
    with opt.loading():
        from isomorph.checkpoints.open import check_pretrained_option
        from isomorph.cli.open_models import open_given
        from isomorph.models.input_sizes import random_inputs
        from isomorph.surgery import NotPorted
    check_pretrained_option([source], opening.weights, opening.pretrained)
    with spinner("port") as show_step:
        show_step(f"loading {source} and {target}")
        first = open_given(source, opening)
        second = open_given(target, opt.CheckpointOptions(), pretrained=False)
        show_step("comparing what both compute")
        report = iso.port_weights(first, second, random_inputs(2, first, size), partial=True)
    is_written = report.equal or partial
    if is_written:
        iso.save(report.model, out)
    written = f"\nwrote {out}" if is_written else ""
    found = {"out": str(out) if is_written else None, "report": report.as_dict()}
    show(json_, found, f"{report}{written}")
    if not is_written:
        raise NotPorted(report, "; --partial saves the target with what could be carried")
