"""The verify, fuse and revert commands."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import isomorph as iso
from isomorph.cli.options import (
    CheckpointOptions,
    Json,
    MaxImages,
    OpenOptions,
    Overwrite,
    Sizes,
    WholeNumber,
    app,
    check_out,
    command,
    loading,
    out_next_to,
)
from isomorph.cli.output import show
from isomorph.errors import UserError

app.command(
    "isomorph.cli.recast:recast",
    name="recast",
    help="Recast modules of a model as gated attention, refined attention or pyramids; verify and save the new model."
    '\n\nExample: isomorph recast resnet18 --where "layer4.*.conv2" --out t.safetensors',
)


@command
def verify(
    original: str,
    other: str,
    /,
    *,
    opening: OpenOptions = OpenOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    size: Sizes = None,
    batch: WholeNumber = 2,
    seeds: list[WholeNumber] | None = None,
    data: str | None = None,
    root: Path | None = None,
    max_images: MaxImages = None,
    atol: float | None = None,
    thorough: bool = False,
    json_: Json = False,
) -> None:
    """Compare the outputs of two models on the same inputs, in float32 and float64; exit with 2 if they differ.

    Example: isomorph verify resnet18 t.safetensors --size 224

    Parameters
    ----------
    original
        A timm model, a checkpoint of isomorph or of another program, or the folder of a run.
    other
        The model made from it.
    size
        Height and width of the inputs; may be given several times. By default the model's own.
    batch
        Images per input.
    seeds
        Seeds of additional standard normal inputs, one input for each size and seed; by default 1.
    data
        Compare on test images of this data source or folder instead of random inputs; by default on --batch images,
        evenly spaced over the classes.
    root
        Folder of the data.
    atol
        Largest difference allowed, relative to the largest output; by default that of the rule that made OTHER.
    thorough
        Try also other sizes and batches, negative inputs, a second call, lower precision and train mode.
    """
    with loading():
        from isomorph.checkpoints.open import check_pretrained_option
        from isomorph.cli.open_models import comparison_inputs, open_given
        from isomorph.surgery import NotEqual, compare_outputs
    both = [original, other]
    check_pretrained_option(both, opening.weights, opening.pretrained)
    first, second = (open_given(name, opening, among=both) for name in both)
    inputs = comparison_inputs(first, data, root, batch, max_images, size or ())
    what = f"images of {data}" if data else "random"
    report = compare_outputs(first, second, inputs, atol, seeds or [1], what, thorough)
    details = "" if report.passed else str(report).partition("\n")[2]
    show(json_, report.as_dict(), details or str(report))
    if not report.passed:
        raise NotEqual(report, "")


@command
def fuse(
    model: Path,
    /,
    *,
    out: Path | None = None,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    recalibrate: WholeNumber = 0,
    data: str | None = None,
    root: Path | None = None,
    batch_size: WholeNumber = 128,
    norms: bool = True,
    affine: bool = False,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Merge the branches, norms and scales of a trained model into its layers; verify and save it, to run or fine-tune.

    Printed are what was merged, what was left and why, parameters and MACs before and after, and the largest
    difference in float64.

    Example: isomorph fuse runs/tdrl --out thin.safetensors

    Parameters
    ----------
    model
        A checkpoint of isomorph or of another program, or the folder of a run, finished or not.
    out
        File for the fused checkpoint; by default NAME-fused.safetensors in the same folder.
    recalibrate
        Number of batches of training images to measure BatchNorm statistics on again before fusing; 0 for none.
    data
        Data source of these images; by default the one the model was trained on.
    root
        Folder of the data.
    batch_size
        Images per batch.
    norms
        Merge norms, scales and branches that have no fused form of their own too; --no-norms keeps them.
    affine
        Move the weights and biases of LayerNorm, RMSNorm and GroupNorm into the layers that read them.
    """
    if batch_size < 2:
        raise UserError(f"--batch-size {batch_size} must be at least 2")
    if (data or root) and not recalibrate:
        raise UserError("--data and --root need --recalibrate, the number of batches to measure on")
    out = out or out_next_to(model, "-fused.safetensors")
    check_out(out, overwrite, model)
    with loading():
        from isomorph.cli.open_models import open_given_checkpoint
        from isomorph.evaluation.input_sizes import random_inputs
        from isomorph.surgery import fuse_with_report
    net = open_given_checkpoint(model, checkpoint)
    if recalibrate:
        net = _recalibrate(net, data, root, recalibrate, batch_size)
    fused, report = fuse_with_report(net, random_inputs(1, net), norms, affine)
    if not (report.fused or report.merged):
        raise UserError(
            f"{model} has nothing to fuse: no layer with a fused form, such as a pyramid, and no norm, scale or branch "
            "that a layer next to it could take"
        )
    _write_converted(net, fused, out, "fusing", json_, merged=report)


def _recalibrate(net: Any, data: str | None, root: Path | None, batches: int, batch_size: int) -> Any:
    """Return a copy with BatchNorm statistics of random training images, by default of the model's own data source."""
    from isomorph.data.loaders import eval_loader
    from isomorph.evaluation.input_sizes import training_config
    from isomorph.evaluation.model_data import images_on_device, open_split, sample_images

    source = sample_images(open_split(net, "train", data, root), batches * batch_size)
    images = images_on_device(eval_loader(source, training_config(net), batch_size), net)
    return iso.recalibrate(net, images, keep_function=False)


@command
def revert(
    model: Path,
    /,
    *,
    where: list[str] | None = None,
    atol: float = 1e-3,
    out: Path | None = None,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Convert recast layers back to convolutions or plain attention, verify and save the model.

    This needs layers that still compute the same function: their gates have not opened, their heads are on their taps.
    For pyramids, use isomorph fuse.

    Example: isomorph revert tcnn.safetensors --out cnn.safetensors

    Parameters
    ----------
    model
        A checkpoint of isomorph or of another program, or the folder of a run, finished or not.
    where
        Glob over the names of layers to convert; may be given several times. By default all recast layers.
    atol
        Largest difference of a layer's outputs allowed, relative to the largest output.
    out
        File for the new checkpoint; by default NAME-reverted.safetensors in the same folder.
    """
    out = out or out_next_to(model, "-reverted.safetensors")
    check_out(out, overwrite, model)
    with loading():
        from isomorph.cli.open_models import open_given_checkpoint
    net = open_given_checkpoint(model, checkpoint)
    reverted = iso.revert(net, where or "*", atol)
    _write_converted(net, reverted, out, "reverting", json_, atol=max(1e-4, 10 * atol))


def _write_converted(
    before: Any, after: Any, out: Path, what: str, json_: bool, atol: float | None = None, merged: Any = None
) -> None:
    """Compare a model with what `what` has made of it, save that, and print both.

    Raises: NotEqual if the outputs differ by more than `atol`, by default that of the rule.
    """
    from isomorph.evaluation.cost import count_parameters
    from isomorph.evaluation.input_sizes import random_inputs
    from isomorph.surgery import NotEqual, compare_outputs

    report = compare_outputs(before, after, [random_inputs(1, before)], atol=atol)
    if not report.passed:
        raise NotEqual(report, "")
    iso.save(after, out)
    counts = {"before": count_parameters(before), "after": count_parameters(after)}
    told = merged or f"{counts['before']:,} parameters before, {counts['after']:,} after {what}"
    facts = {"out": str(out), **counts, "report": report.as_dict()} | ({"fuse": asdict(merged)} if merged else {})
    show(json_, facts, f"{report}\n{told}\nwrote {out}")
