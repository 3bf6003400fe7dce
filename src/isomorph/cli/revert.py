"""The revert command."""

import json
from pathlib import Path

import isomorph as iso
from isomorph.cli.app import app, loading
from isomorph.cli.options import CheckpointOptions, Json, Overwrite, check_limits, check_out, out_next_to
from isomorph.errors import UserError


@app.command
@check_limits
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
    if not atol >= 0:
        raise UserError(f"--atol {atol:g} must be at least 0")
    out = out or out_next_to(model, "-reverted.safetensors")
    check_out(out, overwrite, model)
    with loading():
        from isomorph.cli.open_models import open_given_checkpoint
        from isomorph.evaluation.cost import count_parameters
        from isomorph.evaluation.random_inputs import random_inputs
        from isomorph.surgery import compare_outputs
    net = open_given_checkpoint(model, checkpoint)
    reverted = iso.revert(net, where or "*", atol)
    report = compare_outputs(net, reverted, [random_inputs(1, net)], atol=max(1e-4, 10 * atol))
    if not report.passed:
        raise UserError(str(report).splitlines()[0])
    iso.save(reverted, out)
    before, after = count_parameters(net), count_parameters(reverted)
    if json_:
        print(json.dumps({"out": str(out), "before": before, "after": after, "report": report.as_dict()}))
    else:
        print(f"{report}\n{before:,} parameters before, {after:,} afterwards\nwrote {out}")
