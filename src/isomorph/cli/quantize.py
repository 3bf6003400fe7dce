"""The quantize command."""

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from isomorph.cli.app import app, loading
from isomorph.cli.json_output import print_json
from isomorph.cli.options import (
    CheckpointOptions,
    Json,
    MaxImages,
    Model,
    Overwrite,
    Pretrained,
    Root,
    Weights,
    WholeNumber,
    check_limits,
    check_out,
    out_next_to,
)
from isomorph.errors import UserError
from isomorph.terminal_tables import metric_table, print_table


@app.command
@check_limits
def quantize(
    model: Model,
    /,
    *,
    data: str | None = None,
    root: Root = None,
    images: WholeNumber = 512,
    weights_only: Annotated[bool, Parameter(negative="")] = False,
    float_layers: Annotated[list[str] | None, Parameter(negative="")] = None,
    weight_bits: Literal[7, 8] | None = None,
    dynamic: Literal["batch", "batch,size", "size", "none"] = "batch",
    opset: Literal[18, 19, 20, 21, 22, 23] | None = None,
    max_images: MaxImages = None,
    batch_size: WholeNumber = 100,
    out: Path | None = None,
    weights: Weights = None,
    checkpoint: CheckpointOptions = CheckpointOptions(),  # noqa: B008 (cyclopts takes its fields for options)
    pretrained: Pretrained = True,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Quantise a model to 8-bit integers, as an ONNX file; calibrate it on training images, and test it.

    The model is fused first. Printed are the layers with their precision, top-1 before and after on test images, the
    signal-to-noise ratio of the outputs, size and speed. `isomorph evaluate` opens the file.

    Example: isomorph quantize runs/tdrl --images 512 --out thin-int8.onnx

    Parameters
    ----------
    data
        Data source or folder, with training images to calibrate on and test images; by default the one the model was
        trained on.
    images
        Number of training images to calibrate on.
    weights_only
        Only weights are 8-bit integers, activations stay in float: a small file that computes in float.
    float_layers
        Globs over names of layers that stay in float; may be given several times.
    weight_bits
        Bits of weights. 7, the default, is exact on every processor; 8 needs one that multiplies 8-bit integers
        without overflow (VNNI, ARM), and is the default with --weights-only.
    dynamic
        What stays open: the number of images (batch), their height and width (size), both, or nothing (none).
    opset
        Operator set of the ONNX file; by default 20.
    batch_size
        Images per batch.
    out
        File to write; by default NAME-int8.onnx in the folder of MODEL.
    """
    if images < 1 or batch_size < 1:
        raise UserError("--images and --batch-size must be at least 1")
    path = out or out_next_to(model, "-int8.onnx")
    check_out(path, overwrite, Path(model), (".onnx",))
    with loading():
        from isomorph.cli.open_models import open_classifier
        from isomorph.cli.quantize_run import open_images, quantize_and_test
        from isomorph.deployment.export import check_destination
        from isomorph.deployment.extra import require_packages
    require_packages()
    check_destination(path, overwrite)
    net = open_classifier(model, checkpoint, weights, pretrained, "cpu")
    loaders = open_images(net, data, root, images, max_images, batch_size if "batch" in dynamic else 1)
    chosen: dict[str, Any] = dict(weights_only=weights_only, float_layers=float_layers or (), weight_bits=weight_bits)
    results = quantize_and_test(net, *loaders, path, dynamic=dynamic, opset=opset, overwrite=overwrite, **chosen)
    _print_results(*results, json_)


def _print_results(report: Any, accuracy: dict[str, dict[str, float]], json_: bool) -> None:
    """Print the report, and the accuracy of the float model and of the quantised one."""
    if json_:
        print_json(report.as_dict() | {"accuracy": accuracy})
        return
    print(report)
    before, after = (metric_table(name, row) for name, row in accuracy.items())
    print_table([[*left, right] for left, (_, right) in zip(before, after, strict=True)])
    print(f"wrote {report.path}")
