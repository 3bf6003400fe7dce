"""Quantise a model to 8-bit integers, as an ONNX file that runs without isomorph."""

import copy
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from isomorph.checkpoints.files import write_atomically
from isomorph.deployment.artefact import load_artefact
from isomorph.deployment.export import ATOL, Progress, check_destination, encode
from isomorph.deployment.extra import require_packages
from isomorph.deployment.metadata import describe
from isomorph.deployment.onnx_model import add_metadata, check_onnx_size, check_opset, convert
from isomorph.deployment.program import prepare, trace
from isomorph.deployment.quantize_graph import (
    layer_nodes,
    layer_of,
    quantize_activations,
    quantize_weights,
    weight_of,
)
from isomorph.deployment.quantize_report import QuantizeReport, describe_layers, float_operators, sqnr
from isomorph.deployment.shapes import ExportShapes, plan_shapes
from isomorph.errors import UserError
from isomorph.evaluation import measure_speeds
from isomorph.surgery.recast import check_model
from isomorph.surgery.record import unwrap_compiled
from isomorph.surgery.verify import verify
from isomorph.surgery.where import nearest_names

if TYPE_CHECKING:
    from onnx import ModelProto

_SPEED_IMAGES = 8
"""Images of a batch whose speed is measured."""


def quantize(
    model: nn.Module,
    calibration_loader: Iterable[Any],
    path: str | Path,
    *,
    weights_only: bool = False,
    float_layers: str | Sequence[str] = (),
    weight_bits: int | None = None,
    dynamic: str | Iterable[str] = "batch",
    opset: int | None = None,
    overwrite: bool = False,
    progress: Progress = lambda step: None,
) -> QuantizeReport:
    """Quantise a model to 8-bit integers: a smaller and mostly faster ONNX file that `isomorph evaluate` opens.

    The model is fused and exported in float32; then convolutions and linear layers get int8 weights, with one scale for
    each output channel, and activations get the range that they have on the calibration images. Norms, softmax and
    products of two activations stay in float; the report names them.

    Args:
        calibration_loader: Normalised images (B, C, H, W), or (images, labels), as from `iso.data.eval_loader`; 128 to
            512 training images are enough.
        path: File ending in .onnx.
        weights_only: Keep activations in float: a small file that computes as fast as float, not faster.
        float_layers: Glob or globs over names of layers that stay in float.
        weight_bits: 7 or 8. With 7, sums of products also fit into 16 bits, as processors without VNNI add them; it is
            the default, and 8 with `weights_only`, where nothing is added in integers.
        dynamic: Axes that stay open: "batch", "batch,size" (also height and width) or "none".
        opset: ONNX operator set, 18 to 23.
        overwrite: Replace an existing file.
        progress: Called with the name of each step.

    Raises: UserError when a package is missing, the images do not fit the model, a glob matches no layer, the model
        cannot be exported, or the file exists or cannot be written.

    Example:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
        >>> images = torch.randn(4, 3, 32, 32)
        >>> report = iso.quantize(vit, [images], "int8.onnx", weights_only=True, float_layers=["head"])
        >>> report.layers[-1].name, report.layers[-1].precision
        ('head', 'float')
        >>> iso.deployment.open_artefact("int8.onnx")(images).shape
        torch.Size([4, 1000])
    """
    path = Path(path)
    bits = _check_options(path, weights_only, weight_bits)
    check_destination(path, overwrite)
    require_packages()
    check_model(model)
    check_onnx_size(model := unwrap_compiled(model))
    progress("fusing")
    prepared, shapes = _prepare(model, dynamic, opset)
    progress("reading calibration images")
    batches = calibration_batches(calibration_loader, shapes)
    verify(copy.deepcopy(model).cpu(), prepared, batches[0][:2], ATOL)
    float_layers = [float_layers] if isinstance(float_layers, str) else float_layers
    check_globs(float_layers, [name for name, _ in prepared.named_modules() if name])
    progress("converting to onnx")
    before = convert(trace(prepared, shapes), shapes, check_opset(opset))
    add_metadata(before, describe(model, shapes))
    kept = kept_nodes(before, float_layers)
    progress("rounding" if weights_only else f"calibrating on {sum(map(len, batches))} images")
    after = _round(before, None if weights_only else batches, list(kept), bits)
    progress("comparing")
    graphs = Graphs(before, after, kept, prepared)
    report = _report(graphs, batches, shapes, path=str(path), weight_bits=bits)
    progress("writing")
    write_atomically(path, lambda file: file.write_bytes(after.SerializeToString()))
    return report


def _round(before: "ModelProto", batches: list[Tensor] | None, kept: Sequence[str], bits: int) -> "ModelProto":
    """Return the graph with rounded weights, and rounded activations if there are batches to calibrate on."""
    mode = "weights" if batches is None else "static"
    after = (
        quantize_weights(before, kept, bits) if batches is None else quantize_activations(before, batches, kept, bits)
    )
    add_metadata(after, {"quantization": f"int8 {mode}"})
    return after


class Graphs(NamedTuple):
    """A model before and after rounding, the nodes that stay in float with the reason, and the model itself."""

    before: "ModelProto"
    after: "ModelProto"
    kept: dict[str, str]
    model: nn.Module


def _report(graphs: Graphs, batches: list[Tensor], shapes: ExportShapes, **options: Any) -> QuantizeReport:
    """Compare a quantised graph with the model, in outputs, size and speed.

    Raises: UserError if an output is not finite.
    """
    before, after, kept, model = graphs
    both = {name: load_artefact(g.SerializeToString(), "onnx") for name, g in (("float", before), ("int8", after))}
    agreement, noise = _compare(model, both["int8"], batches)
    speed = measure_speeds(both, shapes.checks[0][1:], _SPEED_IMAGES if "batch" in shapes.dynamic else 1, seconds=0.2)
    return QuantizeReport(
        mode=both["int8"].metadata["quantization"].removeprefix("int8 "),
        images=sum(map(len, batches)),
        megabytes=after.ByteSize() / 1e6,
        float_megabytes=before.ByteSize() / 1e6,
        images_per_second=speed["int8"].median,
        float_images_per_second=speed["float"].median,
        agreement=agreement,
        output_sqnr=noise,
        layers=describe_layers(before, after, kept),
        float_operators=float_operators(after),
        **options,
    )


@torch.no_grad()
def _compare(model: nn.Module, artefact: nn.Module, batches: Sequence[Tensor]) -> tuple[float, float]:
    """Return in percent how often two models predict the same class, and the SQNR of the second one's outputs.

    Raises: UserError if an output is not finite.
    """
    exact, rounded = (torch.cat([run(batch) for batch in batches]) for run in (model, artefact))
    if not rounded.isfinite().all():
        raise UserError("the quantised model has outputs that are not finite; keep layers in float with float_layers")
    same = (exact.argmax(1) == rounded.argmax(1)).double().mean().item()
    return 100 * same, sqnr(exact, rounded)


def _check_options(path: Path, weights_only: bool, bits: int | None) -> int:
    """Return the bits of a weight. Raises: UserError for another ending than .onnx, or another number of bits."""
    if path.suffix != ".onnx":
        raise UserError(f"{path} must end in .onnx, the format of quantised models")
    if bits not in (None, 7, 8):
        raise UserError(f"weight_bits={bits} is not possible; give 7 or 8")
    return bits or (8 if weights_only else 7)


def _prepare(model: nn.Module, dynamic: str | Iterable[str], opset: int | None) -> tuple[nn.Module, ExportShapes]:
    """Return the fused model, and the shapes that its graph is right for. Raises: UserError as `encode`."""
    prepared, shapes = prepare(model), plan_shapes(model, dynamic)
    right: Any = encode(prepared, model, "onnx", shapes, opset)[0] if shapes.near else shapes
    return prepared, right


def calibration_batches(loader: Iterable[Any], shapes: ExportShapes) -> list[Tensor]:
    """Return the images of a loader, batch by batch.

    Raises: UserError if there are none, or they are not normalised images of the size that the model takes.
    """
    if isinstance(loader, Tensor):
        raise UserError("calibration_loader is one tensor; give a list of batches, or a loader")
    batches: list[Tensor] = []
    for batch in loader:
        images = batch[0] if isinstance(batch, tuple | list) else batch
        _check_images(images, shapes)
        if len(images):
            batches.append(images.detach().cpu().float())
    if not batches:
        raise UserError("there are no calibration images; give a loader with at least one batch")
    if "batch" not in shapes.dynamic:
        return [image for batch in batches for image in batch.split(1)]
    return batches


def _check_images(images: object, shapes: ExportShapes) -> None:
    """Raise UserError for a batch that the model cannot be calibrated on."""
    _, channels, height, width = shapes.checks[0]
    wanted = f"B x {channels} x {height} x {width}"
    if not isinstance(images, Tensor):
        raise UserError(f"calibration images are {type(images).__name__}; give tensors of {wanted}")
    given, multiple = "x".join(map(str, images.shape)), shapes.size_multiple or 1
    if not images.is_floating_point():
        raise UserError(f"calibration images are {images.dtype}; give normalised float images, as eval_loader makes")
    sides = zip(images.shape[2:], (height, width), strict=False)
    any_size = "size" in shapes.dynamic
    if (
        images.ndim != 4
        or images.shape[1] != channels
        or any((side - own) % multiple if any_size else side != own for side, own in sides)
    ):
        steps, more = f", or heights and widths in steps of {multiple}", '; give dynamic="batch,size" for other sizes'
        raise UserError(f"calibration images have shape {given}, the model takes {wanted}{steps if any_size else more}")
    if not images.isfinite().all():
        raise UserError("calibration images have values that are not finite")


def check_globs(float_layers: Sequence[str], names: Sequence[str]) -> None:
    """Raise UserError for a glob in `float_layers` that matches none of the names."""
    for glob in float_layers:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UserError(f"{glob!r} in float_layers matches no layer{nearest_names(glob, names)}")


def kept_nodes(proto: "ModelProto", float_layers: Sequence[str]) -> dict[str, str]:
    """Return the nodes that stay in float, with the reason. Raises: UserError for a glob that matches no layer."""
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    nodes = layer_nodes(proto)
    check_globs(float_layers, list(dict.fromkeys(layer_of(name) for name in nodes)))
    kept = {}
    for name, node in nodes.items():
        if any(fnmatchcase(layer_of(name), glob) for glob in float_layers):
            kept[name] = "chosen by float_layers"
        elif weight_of(node, weights) is None:
            kept[name] = "a product of two activations"
    return kept
