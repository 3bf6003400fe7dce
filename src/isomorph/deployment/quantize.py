"""Quantise a model to 8-bit integers, as an ONNX file that runs without isomorph."""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isomorph.checkpoints.files import write_atomically
from isomorph.deployment.artefact import describe, load_artefact, require_packages
from isomorph.deployment.export import ATOL, Progress, check_destination, encode
from isomorph.deployment.onnx_model import add_metadata, check_onnx_size, check_opset, convert
from isomorph.deployment.program import prepare, trace
from isomorph.deployment.quantize_graph import (
    LAYER_OPERATORS,
    layer_nodes,
    layer_of,
    quantize_activations,
    quantize_weights,
    weight_of,
)
from isomorph.deployment.shapes import ExportShapes, plan_shapes
from isomorph.errors import UserError
from isomorph.evaluation import measure_speeds
from isomorph.surgery.recast import check_model
from isomorph.surgery.verify import verify
from isomorph.surgery.where import nearest_names

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_BOOKKEEPING = {
    *("QuantizeLinear", "DequantizeLinear", "Constant", "Shape", "Gather", "Slice", "Split", "Expand", "Cast"),
    *("Identity", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Flatten", "Concat", "Pad", "Range", "Where"),
}
"""Operators that compute nothing, or only move values."""
_SPEED_IMAGES = 8
"""Images of a batch whose speed is measured."""


@dataclass(frozen=True)
class QuantizedLayer:
    """A convolution or matrix product with its precision: "int8", "int8 w" (weights alone), or "float" and the reason.

    Example:
        >>> iso.deployment.QuantizedLayer("blocks.0.attn", "MatMul", "float", "a product of two activations").reason
        'a product of two activations'
    """

    name: str
    operator: str
    precision: str
    reason: str = ""


@dataclass(frozen=True, repr=False)
class QuantizeReport:
    """Result of `quantize`: the file, its size and speed next to the float model's as ONNX, and every layer.

    `agreement` is the share of calibration images, in percent, of which both models predict the same class, and
    `output_sqnr` the signal-to-quantisation-noise ratio of the outputs in decibels: 6 dB are one bit.
    `images_per_second` are measured with onnxruntime, on as many threads as torch has.

    Example:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
        >>> report = iso.quantize(vit, [torch.randn(4, 3, 32, 32)], "int8.onnx", weights_only=True)
        >>> report.mode, round(report.float_megabytes / report.megabytes, 1)
        ('weights', 3.8)
    """

    path: str
    mode: str
    weight_bits: int
    images: int
    megabytes: float
    float_megabytes: float
    images_per_second: float
    float_images_per_second: float
    agreement: float
    output_sqnr: float
    layers: tuple[QuantizedLayer, ...]
    float_operators: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rounded = [layer for layer in self.layers if layer.precision != "float"]
        lines = [_layer_table(self.layers)] if self.layers else []
        kind = "weights" if self.mode == "weights" else "weights and activations"
        lines.append(
            f"{len(rounded)} of {len(self.layers)} layers have {kind} in int8 ({self.weight_bits}-bit weights)"
        )
        lines += [f"  float: {name} ({reason})" for name, reason in self._kept()]
        if self.float_operators:
            lines.append("  float: " + ", ".join(f"{n} {name}" for name, n in self.float_operators.items()))
        ratio = self.float_megabytes / self.megabytes
        lines.append(
            f"{self.megabytes:.2f} MB, {ratio:.1f} times smaller than in float ({self.float_megabytes:.2f} MB)"
        )
        lines.append(
            f"same class as the float model on {self.agreement:.1f}% of {self.images} calibration images; "
            f"outputs at {self.output_sqnr:.1f} dB"
        )
        return "\n".join(lines)

    __repr__ = __str__

    def _kept(self) -> list[tuple[str, str]]:
        """Return the layers in float by reason, several of one kind in one row."""
        by_reason: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.precision == "float":
                by_reason.setdefault(layer.reason, []).append(layer.name)
        return [(", ".join(dict.fromkeys(names)), reason) for reason, names in by_reason.items()]


def _layer_table(layers: Sequence[QuantizedLayer]) -> str:
    width = max(len(layer.name) for layer in layers)
    rows = [f"{layer.name:<{width}}  {layer.operator:<8}  {layer.precision}" for layer in layers]
    return "\n".join([f"{'layer':<{width}}  operator  precision", *rows])


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
    bits, opset = _check_bits(path, weights_only, weight_bits), check_opset(opset)
    check_destination(path, overwrite)
    require_packages()
    check_onnx_size(model := check_model(model))
    progress("fusing")
    prepared, shapes = _prepare(model, dynamic, opset)
    progress("reading calibration images")
    batches = _calibration_batches(calibration_loader, shapes)
    verify(copy.deepcopy(model).cpu(), prepared, batches[0][:2], ATOL)
    progress("converting to onnx")
    before = convert(trace(prepared, shapes), shapes, opset)
    add_metadata(before, describe(model, shapes))
    kept = _kept_nodes(before, [float_layers] if isinstance(float_layers, str) else float_layers)
    progress("rounding" if weights_only else f"calibrating on {sum(map(len, batches))} images")
    rounded = (before, list(kept), bits)
    after = quantize_weights(*rounded) if weights_only else quantize_activations(*rounded, batches)
    mode = "weights" if weights_only else "static"
    add_metadata(after, {"quantization": f"int8 {mode}"})
    progress("comparing")
    layers, measured = _describe_layers(before, after, kept), _measure(prepared, before, after, batches, shapes)
    report = QuantizeReport(path=str(path), mode=mode, weight_bits=bits, layers=layers, **measured)
    progress("writing")
    write_atomically(path, lambda file: file.write_bytes(after.SerializeToString()))
    return report


@torch.no_grad()
def _measure(
    model: nn.Module, before: "ModelProto", after: "ModelProto", batches: Sequence[Tensor], shapes: ExportShapes
) -> dict[str, Any]:
    """Return size and speed of both graphs, the share of equal predictions in percent, and the SQNR of the outputs.

    SQNR = 10 log10(sum(signal^2) / sum((signal - rounded)^2)), in decibels

    Raises: UserError if an output is not finite.
    """
    both = {
        name: load_artefact(graph.SerializeToString(), "onnx") for name, graph in (("float", before), ("int8", after))
    }
    exact, rounded = (torch.cat([run(batch) for batch in batches]).double() for run in (model, both["int8"]))
    if not rounded.isfinite().all():
        raise UserError("the quantised model has outputs that are not finite; keep layers in float with float_layers")
    speed = measure_speeds(both, shapes.shape, _SPEED_IMAGES if "batch" in shapes.dynamic else 1, seconds=0.2)
    return {
        "images": len(exact),
        "megabytes": after.ByteSize() / 1e6,
        "float_megabytes": before.ByteSize() / 1e6,
        "float_operators": _float_operators(after),
        "images_per_second": speed["int8"].median,
        "float_images_per_second": speed["float"].median,
        "agreement": 100 * (exact.argmax(1) == rounded.argmax(1)).double().mean().item(),
        "output_sqnr": 10 * (exact.square().sum() / (exact - rounded).square().sum()).log10().item(),
    }


def _prepare(model: nn.Module, dynamic: str | Iterable[str], opset: int) -> tuple[nn.Module, ExportShapes]:
    """Return the fused model, and the shapes that its graph is right for. Raises: UserError as `encode`."""
    prepared, shapes = prepare(model), plan_shapes(model, dynamic)
    if shapes.named:
        raise UserError(f"the model takes {' and '.join(shapes.names)}, not images alone; give a network of images")
    if shapes.near:
        shapes = encode(prepared, model, "onnx", shapes, opset)[0]
    return prepared, shapes


def _check_bits(path: Path, weights_only: bool, bits: int | None) -> int:
    """Return the bits of a weight. Raises: UserError for another ending than .onnx, or another number of bits."""
    if path.suffix != ".onnx":
        raise UserError(f"{path} must end in .onnx, the format of quantised models")
    if bits not in (None, 7, 8):
        raise UserError(f"weight_bits={bits} is not possible; give 7 or 8")
    return bits or (8 if weights_only else 7)


def _calibration_batches(loader: Iterable[Any], shapes: ExportShapes) -> list[Tensor]:
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
    channels, height, width = shapes.shape
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


def _kept_nodes(proto: "ModelProto", float_layers: Sequence[str]) -> dict[str, str]:
    """Return the nodes that stay in float, with the reason. Raises: UserError for a glob that matches no layer."""
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    nodes = layer_nodes(proto)
    layers = list(dict.fromkeys(map(layer_of, nodes)))
    for glob in float_layers:
        if not any(fnmatchcase(layer, glob) for layer in layers):
            raise UserError(f"{glob!r} in float_layers matches no layer{nearest_names(glob, layers)}")
    kept = {}
    for name, node in nodes.items():
        if any(fnmatchcase(layer_of(name), glob) for glob in float_layers):
            kept[name] = "chosen by float_layers"
        elif weight_of(node, weights) is None:
            kept[name] = "a product of two activations"
    return kept


def _describe_layers(before: "ModelProto", after: "ModelProto", kept: Mapping[str, str]) -> tuple[QuantizedLayer, ...]:
    """Return every layer of the float graph, with its precision in the quantised one. `kept`: reasons by node."""
    made_by = {name: node for node in after.graph.node for name in node.output}
    now = layer_nodes(after)
    rows = []
    for name, node in layer_nodes(before).items():
        reads = [_dequantize(made_by.get(source)) for source in now[name].input[:2]] if name in now else []
        in_float = name in kept or not any(reads)
        precision = "float" if in_float else "int8" if all(reads) else "int8 w"
        reason = kept.get(name, "not supported") if in_float else ""
        rows.append(QuantizedLayer(layer_of(name), node.op_type, precision, reason))
    return tuple(rows)


def _dequantize(node: "NodeProto | None") -> bool:
    return node is not None and node.op_type == "DequantizeLinear"


def _float_operators(after: "ModelProto") -> dict[str, int]:
    """Count the operators of a quantised graph that compute in float, other than layers, by kind."""
    made_by = {name: node for node in after.graph.node for name in node.output}
    counts = Counter(
        node.op_type
        for node in after.graph.node
        if node.op_type not in _BOOKKEEPING
        and node.op_type not in LAYER_OPERATORS
        and not any(_dequantize(made_by.get(name)) for name in node.input)
    )
    return dict(sorted(counts.items()))
