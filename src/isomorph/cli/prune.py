"""The prune command."""

from pathlib import Path

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
from isomorph.terminal_tables import print_table


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

    A layer whose gates are all closed loses its queries and keys, or becomes a convolution if its heads all stand on
    taps; one whose gates are all open becomes plain attention.

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
        from isomorph.evaluation.cost import count_macs, count_parameters
        from isomorph.evaluation.input_sizes import training_config
        from isomorph.surgery import compare_outputs, prunable_layers
    with spinner("prune") as show_step:
        show_step(f"loading {model}")
        net = open_given_checkpoint(model, checkpoint)
        forms = prunable_layers(net, tolerance, where or "*")
        pruned = iso.prune(net, tolerance, where or "*")
        show_step("comparing the outputs of both models in float32 and float64")
        report = compare_outputs(net, pruned, comparison_inputs(net, data, root, batch), atol=atol)
        if not report.passed:
            raise UserError(f"{str(report).splitlines()[0]}; give a smaller --tolerance, or a larger --atol")
        show_step("counting parameters and multiply-accumulates")
        parameters = {name: [count_parameters(each.get_submodule(name)) for each in (net, pruned)] for name in forms}
        macs = [count_macs(each, training_config(net)["input_size"]) for each in (net, pruned)]
    iso.save(pruned, out)
    if json_:
        rows = [{"layer": name, "becomes": form, "parameters": parameters[name]} for name, form in forms.items()]
        print_json({"out": str(out), "layers": rows, "macs": macs, "report": report.as_dict()})
    else:
        _print_layers(forms, parameters, macs)
        print(f"{report}\nwrote {out}")


def _print_layers(forms: dict[str, str], parameters: dict[str, list[int]], macs: list[int]) -> None:
    """Print what every pruned layer becomes, with its parameters, and the operations of both models."""
    rows = [[name, form, *(f"{count:,}" for count in parameters[name])] for name, form in forms.items()]
    print_table([["layer", "becomes", "parameters before", "parameters after"], *rows])
    print(f"{len(forms)} layers pruned; {macs[0] / 1e6:,.1f} M MACs an image before, {macs[1] / 1e6:,.1f} after")


def _check_values(tolerance: float, batch: int, root_alone: bool) -> None:
    """Raise UserError for values out of range, and for --root without --data."""
    if tolerance < 0:
        raise UserError(f"--tolerance {tolerance:g} is out of range; give a share of attention from 0 to 0.5")
    if batch < 1:
        raise UserError(f"--batch {batch} must be at least 1")
    if root_alone:
        raise UserError("--root is the folder of --data; give both")
