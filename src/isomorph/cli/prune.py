"""The prune command."""

from pathlib import Path
from typing import Any

import isomorph as iso
from isomorph.cli.options import (
    CheckpointOptions,
    Json,
    Overwrite,
    WholeNumber,
    check_out,
    command,
    loading,
    out_next_to,
)
from isomorph.cli.output import show, spinner
from isomorph.errors import UserError


@command
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
        Largest difference of the outputs allowed, relative to the largest output; by default ten times the tolerance,
        as what the heads leave out adds up, and at most 0.1.
    data
        Compare on test images of this data source or folder instead of random inputs.
    root
        Folder of the data.
    batch
        Number of images to compare on.
    """
    if root and not data:
        raise UserError("--root is the folder of --data; give both")
    out = out or out_next_to(model, "-pruned.safetensors")
    check_out(out, overwrite, model)
    with loading():
        from isomorph.cli.open_models import comparison_inputs, open_given_checkpoint
        from isomorph.evaluation.cost import count_macs, count_parameters
        from isomorph.evaluation.input_sizes import training_config
        from isomorph.surgery import NotEqual, compare_outputs, prunable_layers
    with spinner("prune") as show_step:
        show_step(f"loading {model}")
        net = open_given_checkpoint(model, checkpoint)
        forms = prunable_layers(net, tolerance, where or "*")
        pruned = iso.prune(net, tolerance, where or "*")
        show_step("comparing the outputs of both models in float32 and float64")
        report = compare_outputs(net, pruned, comparison_inputs(net, data, root, batch), atol=atol)
        if not report.passed:
            raise NotEqual(report, "; give a smaller --tolerance, or a larger --atol")
        show_step("counting parameters and multiply-accumulates")
        macs = [count_macs(each, training_config(net)["input_size"]) for each in (net, pruned)]
    iso.save(pruned, out)
    parameters = {name: [count_parameters(each.get_submodule(name)) for each in (net, pruned)] for name in forms}
    _show_layers(json_, out, forms, parameters, macs, report)


def _show_layers(
    json_: bool, out: Path, forms: dict[str, str], parameters: dict[str, list[int]], macs: list[int], report: Any
) -> None:
    """Print what every pruned layer becomes, with its parameters, and the operations of both models."""
    layers = [{"layer": name, "becomes": form, "parameters": parameters[name]} for name, form in forms.items()]
    rows = [[name, form, *(f"{count:,}" for count in parameters[name])] for name, form in forms.items()]
    show(
        json_,
        {"out": str(out), "layers": layers, "macs": macs, "report": report.as_dict()},
        [["layer", "becomes", "parameters before", "parameters after"], *rows],
        f"{len(forms)} layers pruned; {macs[0] / 1e6:,.1f} M MACs an image before, {macs[1] / 1e6:,.1f} after",
        f"{report}\nwrote {out}",
    )
