"""The verify, fuse, revert, insert and prune commands."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import isomorph as iso
from isomorph.cli import options as opt
from isomorph.cli.output import show, spinner
from isomorph.errors import UserError
from isomorph.terminal_tables import count_of

opt.app.command(
    "isomorph.cli.recast:recast",
    name="recast",
    help="Recast modules of a model as gated attention, refined attention or pyramids; verify and save the new model."
    '\n\nExample: isomorph recast resnet18 --where "layer4.*.conv2" --out t.safetensors',
)


@opt.command
def verify(
    original: opt.Model,
    other: opt.Model,
    /,
    *,
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    size: opt.Sizes = None,
    batch: opt.BatchSize = 2,
    images: opt.DataOptions = opt.DataOptions(),  # noqa: B008
    atol: opt.Atol | None = None,
    thorough: bool = False,
    json_: opt.Json = False,
) -> None:
    """Compare the outputs of two models on the same inputs, in float32 and float64; exit with 2 if they differ.

    The inputs are random, or with --data evenly spaced test images, by default as many as --batch says, of the model's
    image size or that of an exported file. An int8 file is
    compared on 100 test images of --data with how close it was to its model when it was made. If the models differ, the
    first operation after which they do is named, by module, also of a .onnx or .pt2 file.

    Example: isomorph verify resnet18 t.safetensors --size 224

    Parameters
    ----------
    other
        The model made from ORIGINAL, or a file that it was exported to.
    atol
        Largest difference of a tensor allowed, relative to its largest value; by default that of the rule that made
        OTHER, or 1e-5, as for an exported file.
    thorough
        Try the first input a second time too, with the other sign, 100 times as large, as zeros, at other sizes of
        images or numbers of tokens and another batch size, in float16, under autocast to bfloat16, and in
        channels_last.
    """
    images.check()
    with opt.loading():
        from isomorph.cli.open_models import comparison_inputs, open_given
        from isomorph.deployment.artefact import as_exported, open_artefact
        from isomorph.surgery import NotEqual, compare_outputs
    both = [original, other]
    first = open_given(original, opening, among=both)
    if Path(other).suffix in opt.EXPORTED:
        second: Any = open_artefact(other, to_compare=True)
        if second.own_size:
            first = as_exported(first, second)
            size = size or [second.own_size]
    else:
        second = open_given(other, opening, among=both)
    if atol is None and getattr(second, "fidelity", None) is not None:
        images = _calibrated_images(other, images)
    inputs = comparison_inputs(first, images, batch, size or ())
    what = f"images of {images.data}" if images.data else "random"
    report = compare_outputs(first, second, inputs, atol, [1], what, thorough)
    text = str(report)
    if report.passed:
        show(json_, report.as_dict(), text)
        return
    details = text.partition("\n")[2]  # the first line is that of the error
    show(json_, report.as_dict(), details or text)
    raise NotEqual(report, "")


def _calibrated_images(path: str, images: opt.DataOptions) -> opt.DataOptions:
    """Return the images to compare an int8 file on, 100 if no number is given. Raises: UserError without --data."""
    if not images.data:
        raise UserError(
            f"{path} is an int8 file, calibrated on images; give --data, images like those, or --atol for the largest "
            "difference allowed"
        )
    return replace(images, max_images=images.max_images or 100)


@opt.command
def fuse(
    model: opt.Model,
    /,
    *,
    out: opt.Out,
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    size: opt.Size = None,
    norms: bool = True,
    affine: bool = False,
    across: bool = True,
    overwrite: opt.Overwrite = False,
    json_: opt.Json = False,
) -> None:
    """Merge the branches, norms and scales of a trained model into its layers; verify and save it, to run or fine-tune.

    Printed are what was merged, what was left and why, parameters before and after, and the largest
    difference in float64.

    Example: isomorph fuse runs/tdrl --out thin.safetensors

    Parameters
    ----------
    norms
        Merge norms, scales and branches that have no fused form of their own too; --no-norms keeps them.
    affine
        Move the weights and biases of LayerNorm, RMSNorm and GroupNorm into the layers that read them.
    across
        Merge across modules too; --no-across keeps what every other module gets and gives, for code that taps it.
    """
    opt.check_out(out, overwrite, model)
    with opt.loading():
        from isomorph.cli.open_models import open_given
        from isomorph.models.input_sizes import random_inputs
        from isomorph.surgery import fuse_with_report
    net = open_given(model, opening)
    fused, report = fuse_with_report(net, random_inputs(1, net, size), norms, affine, across)
    if not (report.fused or report.merged):
        raise UserError(
            f"{model} has nothing to fuse: no layer with a fused form, such as a pyramid, and no norm, scale or branch "
            "that a layer next to it could take"
        )
    _write_converted(net, fused, out, "fusing", json_, merged=report, size=size)


@opt.command
def revert(
    model: opt.Checkpoint,
    /,
    *,
    out: opt.Out,
    where: list[str] | None = None,
    atol: opt.Atol = 1e-3,
    checkpoint: opt.CheckpointOptions = opt.CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    overwrite: opt.Overwrite = False,
    json_: opt.Json = False,
) -> None:
    """Convert recast layers back to convolutions or plain attention, verify and save the model.

    This needs layers that still compute the same function: their gates have not opened, their heads are on their taps,
    the gamma of an inserted block is 0. --atol 1 removes inserted blocks whatever their gamma. For pyramids, use
    isomorph fuse.

    Example: isomorph revert tcnn.safetensors --out cnn.safetensors

    Parameters
    ----------
    where
        Globs over the names of layers to convert; by default all recast layers.
    atol
        Largest difference of a layer's outputs allowed, relative to the largest output; of the model's ten times that.
    """
    opt.check_out(out, overwrite, model)
    with opt.loading():
        from isomorph.cli.open_models import open_given_checkpoint
    net = open_given_checkpoint(model, checkpoint)
    reverted = iso.revert(net, where or "*", atol)
    _write_converted(net, reverted, out, "reverting", json_, atol=max(1e-4, 10 * atol))


@opt.command
def insert(
    model: opt.Model,
    /,
    *,
    after: list[str],
    out: opt.Out,
    opening: opt.OpenOptions = opt.OpenOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    size: opt.Size = None,
    overwrite: opt.Overwrite = False,
    json_: opt.Json = False,
) -> None:
    """Insert attention over the positions of a map after modules of a network, with equal outputs; save it to train.

    Attention is added times gamma, which starts at 0. Blocks of your own are inserted in Python, by iso.insert.

    Example: isomorph insert resnet18 --after layer3.1 --out new.safetensors

    Parameters
    ----------
    after
        Glob over names of modules; several may be given.
    """
    opt.check_out(out, overwrite, model)
    with opt.loading():
        from isomorph.cli.open_models import open_given
        from isomorph.models.input_sizes import random_inputs
        from isomorph.surgery import edits_since
    net = open_given(model, opening)
    example = random_inputs(1, net, size)
    new = iso.insert(net, iso.layers.MapAttention, after if len(after) > 1 else after[0], example)
    places = sum(len(edit.names) for edit in edits_since(new, net))
    _write_converted(net, new, out, f"inserting {count_of(places, 'block')}", json_, size=size)


def _write_converted(
    before: Any,
    after: Any,
    out: opt.Out,
    done: str,
    json_: bool,
    atol: float | None = None,
    merged: Any = None,
    size: opt.Size = None,
) -> None:
    from isomorph.analysis.cost import count_parameters
    from isomorph.models.input_sizes import random_inputs
    from isomorph.surgery import NotEqual, compare_outputs

    report = compare_outputs(before, after, [random_inputs(1, before, size)], atol=atol)
    if not report.passed:
        raise NotEqual(report, "")
    iso.save(after, out)
    count_before = count_parameters(before)
    count_after = count_parameters(after)
    facts = {
        "out": str(out),
        "before": count_before,
        "after": count_after,
        "report": report.as_dict(),
    }
    summary: Any = f"{count_before:,} parameters before, {count_after:,} after {done}"
    if merged is not None:
        facts["fuse"] = asdict(merged)
        summary = merged
    show(json_, facts, f"{report}\n{summary}\nwrote {out}")


@opt.command
def prune(
    model: opt.Checkpoint,
    /,
    *,
    out: opt.Out,
    tolerance: Annotated[float, opt.real(0, 0.5)] = 0.01,
    where: list[str] | None = None,
    checkpoint: opt.CheckpointOptions = opt.CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    atol: opt.Atol | None = None,
    images: opt.DataOptions = opt.DataOptions(),  # noqa: B008
    batch: opt.BatchSize = 2,
    overwrite: opt.Overwrite = False,
    json_: opt.Json = False,
) -> None:
    """Remove what trained attention no longer uses, verify and save the model, which can be trained further.

    A layer whose gates are all closed loses its queries and keys, or becomes a convolution if its heads all stand on
    taps; one whose gates are all open becomes plain attention. Windows that an anneal has closed are computed alone.

    Example: isomorph prune runs/tcnn --tolerance 0.01 --out pruned.safetensors

    Parameters
    ----------
    tolerance
        Share of a head's attention that may be left out, from 0 to 0.5.
    where
        Globs over the names of layers to prune; by default all with gates or windows.
    atol
        Largest difference of the outputs allowed, relative to the largest output; by default ten times the tolerance,
        as what the heads leave out adds up, and at most 0.1.
    batch
        Number of images to compare on: random ones, or test images of --data.
    """
    images.check()
    opt.check_out(out, overwrite, model)
    with opt.loading():
        from isomorph.analysis.cost import count_macs, count_parameters
        from isomorph.cli.open_models import comparison_inputs, open_given_checkpoint
        from isomorph.models.input_sizes import training_config
        from isomorph.surgery import NotEqual, compare_outputs, prunable_layers
    with spinner("prune") as show_step:
        show_step(f"loading {model}")
        net = open_given_checkpoint(model, checkpoint)
        forms = prunable_layers(net, tolerance, where or "*")
        pruned = iso.prune(net, tolerance, where or "*")
        show_step("comparing the outputs of both models in float32 and float64")
        report = compare_outputs(net, pruned, comparison_inputs(net, images, batch), atol=atol)
        if not report.passed:
            raise NotEqual(report, "; give a smaller --tolerance, or a larger --atol")
        show_step("counting parameters and multiply-accumulates")
        image = training_config(net)["input_size"]
        before = count_macs(net, image)
        after = count_macs(pruned, image)
    iso.save(pruned, out)
    layers = []
    table = [["layer", "becomes", "parameters before", "parameters after"]]
    for name, form in forms.items():
        earlier = count_parameters(net.get_submodule(name))
        later = count_parameters(pruned.get_submodule(name))
        layers.append({"layer": name, "becomes": form, "parameters": [earlier, later]})
        table.append([name, form, f"{earlier:,}", f"{later:,}"])
    cost = f"{before / 1e6:,.1f} M MACs an image before, {after / 1e6:,.1f} after"
    facts = {"out": str(out), "layers": layers, "macs": [before, after], "report": report.as_dict()}
    show(json_, facts, table, f"{len(forms)} layers pruned; {cost}", f"{report}\nwrote {out}")
