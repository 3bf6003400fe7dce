"""The export command."""

from pathlib import Path
from typing import Any, Literal

from isomorph.cli.app import app, loading
from isomorph.cli.json_output import print_json
from isomorph.cli.options import (
    CheckpointOptions,
    Json,
    Model,
    Overwrite,
    Pretrained,
    Weights,
    check_limits,
    check_out,
    out_next_to,
)
from isomorph.cli.sizes import Size
from isomorph.errors import UserError

SUFFIXES = (".onnx", ".pt2")


@app.command
@check_limits
def export(
    model: Model,
    /,
    *,
    format_: Literal["onnx", "pt2"] | None = None,
    dynamic: Literal["batch", "batch,size", "size", "none"] = "batch",
    opset: Literal[18, 19, 20, 21, 22, 23] | None = None,
    out: Path | None = None,
    size: Size | None = None,
    atol: float = 1e-4,
    weights: Weights = None,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    pretrained: Pretrained = True,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Export a model as an ONNX file or a PyTorch program that runs without isomorph; fuse it first, and check it.

    The exported file is run on random images of several shapes and compared with the model in float32 and float64. It
    is written only if it agrees. `isomorph evaluate` measures the accuracy of an exported classifier of images.

    Example: isomorph export runs/tdrl --format onnx --dynamic batch,size

    Parameters
    ----------
    format_
        onnx (onnxruntime and other programs run it) or pt2 (PyTorch runs it, with torch.export.load); by default that
        of --out, else onnx.
    dynamic
        What stays open: the number of images (batch), their height and width (size), both, or nothing (none); of texts
        their number and length.
    opset
        Operator set of the ONNX file; by default 20.
    out
        File to write; by default the name of MODEL, with .onnx or .pt2, in its folder.
    size
        Height and width of the images; by default the model's own.
    atol
        Largest difference from the model's outputs, relative to the largest output where that is above 1.
    """
    if Path(model).suffix in SUFFIXES:
        raise UserError(f"{model} is an exported model; give the checkpoint that it was made from")
    path = _choose_path(model, format_, out)
    if opset and path.suffix == ".pt2":
        raise UserError("--opset is for ONNX files; leave it out, or give --format onnx")
    if not atol > 0:
        raise UserError(f"--atol {atol:g} must be above 0")
    check_out(path, overwrite, Path(model), SUFFIXES)
    with loading():
        from isomorph.cli.open_models import open_classifier
        from isomorph.cli.progress import spinner
        from isomorph.deployment.export import check_destination
        from isomorph.deployment.extra import require_packages
    if path.suffix == ".onnx":
        require_packages()
    check_destination(path, overwrite)
    with spinner("export") as show_step:
        show_step(f"loading {model}")
        net = open_classifier(model, checkpoint, weights, pretrained)
        given = {"dynamic": dynamic, "size": size, "opset": opset, "atol": atol, "overwrite": overwrite}
        report = _export(net, path, **given, progress=show_step)
    if json_:
        print_json(report.as_dict())
    else:
        print(f"{report}\nwrote {path}")


def _export(model: Any, path: Path, **given: Any) -> Any:
    """Export a model, and return the report. Raises: UserError of one line when the file deviates."""
    from isomorph.deployment.export import export
    from isomorph.surgery import NotEqual

    try:
        return export(model, path, **given)
    except NotEqual as error:
        raise UserError(f"{str(error.report).splitlines()[0]}; no file was written (see --atol)") from None


def _choose_path(model: str, format_: str | None, out: Path | None) -> Path:
    """Return the file to write. Raises: UserError when --out has another ending than --format."""
    if out is None:
        return out_next_to(model, f".{format_ or 'onnx'}")
    if format_ and out.suffix != f".{format_}":
        raise UserError(f"--out {out} must end in .{format_}, or leave --format out")
    return out
