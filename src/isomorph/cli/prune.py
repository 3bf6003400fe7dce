"""The prune command."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import isomorph as iso
from isomorph.cli.app import app, loading
from isomorph.cli.json_output import print_json
from isomorph.cli.options import (
    CheckpointOptions,
    Json,
    Overwrite,
    WholeNumber,
    check_limits,
    check_out,
    out_next_to,
)
from isomorph.errors import UserError

if TYPE_CHECKING:
    from isomorph.evaluation.pruning_cost import LayerSaving
    from isomorph.surgery import Head


@app.command
@check_limits
def prune(
    model: Path,
    /,
    *,
    tolerance: float = 0.01,
    where: list[str] | None = None,
    out: Path | None = None,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    atol: float | None = None,
    data: str | None = None,
    root: Path | None = None,
    batch: WholeNumber = 2,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Remove what trained gated attention no longer uses, verify and save the model, which can be trained further.

    A head whose gate is closed loses its queries and keys, one whose gate is open its position. A layer whose heads all
    stand on taps becomes a convolution.

    Example: isomorph prune runs/tcnn --tolerance 0.01 --out pruned.safetensors

    Parameters
    ----------
    model
        A checkpoint of isomorph or of another program, or the folder of a run, finished or not.
    tolerance
        Share of a head's attention that may be left out, from 0 to 0.5.
    where
        Glob over the names of layers to prune; may be given several times. By default all layers with gates.
    out
        File for the pruned checkpoint; by default NAME-pruned.safetensors in the same folder.
    atol
        Largest difference of the outputs allowed, relative to the largest output where that is above 1; by default ten
        times the tolerance, as what the heads leave out adds up, and at most 0.1.
    data
        Compare on test images of this data source or folder instead of random inputs.
    root
        Folder of the data.
    batch
        Number of images to compare on.
    """
    _check_values(tolerance, batch, root is not None and data is None)
    out = out or out_next_to(model, "-pruned.safetensors")
    check_out(out, overwrite, model)
    with loading():
        from isomorph.cli.comparison_inputs import comparison_inputs
        from isomorph.cli.open_models import open_given_checkpoint
        from isomorph.cli.progress import spinner
        from isomorph.evaluation.input_sizes import training_config
        from isomorph.evaluation.pruning_cost import pruning_savings
        from isomorph.surgery import compare_outputs, prunable_heads
    with spinner("prune") as show_step:
        show_step(f"loading {model}")
        net = open_given_checkpoint(model, checkpoint)
        heads = prunable_heads(net, tolerance, where or "*")
        pruned = iso.prune(net, tolerance, where or "*")
        show_step("comparing the outputs of both models in float32 and float64")
        report = compare_outputs(net, pruned, comparison_inputs(net, data, root, batch), atol=atol)
        if not report.passed:
            raise UserError(f"{str(report).splitlines()[0]}; give a smaller --tolerance, or a larger --atol")
        show_step("counting parameters and multiply-accumulates")
        names = dict.fromkeys(head.layer for head in heads)
        savings = pruning_savings(net, pruned, names, training_config(net)["input_size"])
    iso.save(pruned, out)
    if json_:
        print_json({"out": str(out), "layers": _as_plain(heads, savings), "report": report.as_dict()})
    else:
        _print_savings(heads, savings)
        print(f"{report}\nwrote {out}")


def _check_values(tolerance: float, batch: int, root_alone: bool) -> None:
    """Raise UserError for values out of range, and for --root without --data."""
    if tolerance < 0:
        raise UserError(f"--tolerance {tolerance:g} is out of range; give a share of attention from 0 to 0.5")
    if batch < 1:
        raise UserError(f"--batch {batch} must be at least 1")
    if root_alone:
        raise UserError("--root is the folder of --data; give both")


def _as_plain(heads: "list[Head]", savings: "list[LayerSaving]") -> list[dict[str, Any]]:
    """Return the pruned layers with their heads as plain values."""
    return [
        {
            **saving._asdict(),
            "heads": [
                {key: value for key, value in head._asdict().items() if key != "layer"}
                for head in heads
                if head.layer == saving.layer
            ],
        }
        for saving in savings
    ]


def _print_savings(heads: "list[Head]", savings: "list[LayerSaving]") -> None:
    """Print a row for every pruned head, with its equal part of what its layer saves, and the sums of all layers."""
    from isomorph.terminal_tables import print_table

    rows = [["layer", "head", "position share", "attends by", "parameters saved", "M MACs saved"]]
    for saving in savings:
        own = [head for head in heads if head.layer == saving.layer]
        parameters, macs = ((before - after) / len(own) for before, after in (saving.parameters, saving.macs))
        each = [f"{parameters:,.0f}", f"{macs / 1e6:,.3f}"]
        rows += [[head.layer, str(head.number), f"{head.position_share:.4f}", head.becomes, *each] for head in own]
    print_table(rows)
    before, after = ([sum(s.parameters[i] for s in savings), sum(s.macs[i] for s in savings)] for i in (0, 1))
    print(
        f"{len(heads)} heads in {len(savings)} layers pruned; these layers have {before[0]:,} parameters before, "
        f"{after[0]:,} after, and {before[1] / 1e6:,.1f} M MACs an image before, {after[1] / 1e6:,.1f} after"
    )
