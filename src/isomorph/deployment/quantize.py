"""Quantise a model to 8-bit integers, as an ONNX file that runs without isomorph, by onnxruntime's quantiser."""

import copy
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isomorph.analysis.speed import measure_speeds
from isomorph.checkpoints.files import write_atomically
from isomorph.deployment.artefact import describe, load_artefact, preparation_notes
from isomorph.deployment.export import (
    Progress,
    check_exportable,
    check_onnx_size,
    check_output,
    check_path,
    encode,
)
from isomorph.deployment.program import only_tensor, prepare, quiet, to_onnx, trace
from isomorph.deployment.shapes import INPUT, ExportShapes, plan_export
from isomorph.errors import UserError
from isomorph.json_values import JsonObject, json_values
from isomorph.models.input_sizes import ImageSize, evaluation_config
from isomorph.operations import copy_module
from isomorph.spec import spec_of
from isomorph.surgery import NotEqual
from isomorph.surgery.calls import batches_of, describe_shape
from isomorph.surgery.comparison import class_agreement, relative_difference, signal_to_noise
from isomorph.surgery.fuse_report import describe_left
from isomorph.surgery.site import nearest_names
from isomorph.surgery.verify import verify

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_LAYERS = ("Conv", "Gemm", "MatMul")
# Operators between the layers of a convolutional network that runtimes have in 8 bits too.
_BETWEEN_LAYERS = (
    "Add",
    "AveragePool",
    "Clip",
    "Concat",
    "Flatten",
    "GlobalAveragePool",
    "MaxPool",
    "Relu",
    "Reshape",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
)
# with these only layers are rounded: sums range too widely
_ATTENTION = ("LayerNormalization", "Softmax")
_SPEED_IMAGES = 8
_DECIBELS = 120.0  # of equal outputs


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

    `agreement` is the share of calibration images, in percent, of which both models predict the same class, None if
    outputs are not (B, classes), and `output_sqnr` the signal-to-quantisation-noise ratio of the outputs in decibels:
    6 dB are one bit. `float_difference` is the largest of the float file from the model, relative to the largest
    output, on these images. `images_per_second` are measured with onnxruntime, on as many threads as torch has. `notes`
    are doubts about the images, and `left` the norms and layers that were not merged, with the reason.

    Example:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
        >>> report = iso.quantize(vit, [torch.randn(4, 3, 32, 32)], "int8.onnx", weights_only=True)
        >>> report.mode, round(report.float_megabytes / report.megabytes, 1)
        ('weights', 3.8)
    """

    path: str
    mode: str
    images: int
    megabytes: float
    float_megabytes: float
    images_per_second: float
    float_images_per_second: float
    agreement: float | None
    output_sqnr: float
    float_difference: float
    layers: tuple[QuantizedLayer, ...]
    notes: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> JsonObject:
        """Return the report as plain values for JSON, with None for what is not finite."""
        return json_values(asdict(self))

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=0)
        lines = []
        for layer in self.layers:
            row = (
                f"{layer.name:<{width}}  {layer.operator:<8}  {layer.precision:<6}  {layer.reason}"
            )
            lines.append(row.rstrip())
        rounded = sum(layer.precision != "float" for layer in self.layers)
        kind = "weights" if self.mode == "weights" else "weights and activations"
        lines.append(f"{rounded} of {len(self.layers)} layers have {kind} in int8")
        smaller = f"{self.float_megabytes / self.megabytes:.1f} times smaller than in float"
        lines.append(f"{self.megabytes:.2f} MB, {smaller} ({self.float_megabytes:.2f} MB)")
        lines += describe_left(self.left)
        images = f"{self.images} calibration images"
        if self.agreement is None:
            lines.append(f"outputs at {self.output_sqnr:.1f} dB on {images}")
        else:
            agreement = f"same class as the float model on {self.agreement:.1f}% of {images}"
            lines.append(f"{agreement}; outputs at {self.output_sqnr:.1f} dB")
        lines.append(
            f"before rounding: max |diff| / max |out| {self.float_difference:.1e} from the model"
        )
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = __str__


# Between the model and its ONNX graph before rounding, relative to the largest output.
_LARGEST_FLOAT_DIFFERENCE = 1e-4


@torch.random.fork_rng(devices=[])  # measuring speed draws images
def quantize(
    model: nn.Module,
    calibration_loader: Iterable[Any],
    path: str | Path,
    *,
    weights_only: bool = False,
    float_layers: str | Sequence[str] = (),
    dynamic: str = "batch",
    size: int | ImageSize | None = None,
    overwrite: bool = False,
    progress: Progress = lambda step: None,
) -> QuantizeReport:
    """Quantise a model to 8-bit integers: a smaller and mostly faster ONNX file that `isomorph evaluate` opens.

    The model is fused and exported in float32; then convolutions and linear layers get int8 weights, with one scale for
    each output channel, and activations get the range that they have on the calibration images. Norms, softmax and
    products of two activations stay in float. Weights have 7 bits, so that sums of products also fit into 16 bits, as
    processors without VNNI add them; 8 with `weights_only`, where nothing is added in integers.

    Args:
        calibration_loader: Normalised images (B, C, H, W), or (images, labels), as from `iso.data.eval_loader`; 128 to
            512 training images are enough.
        path: File ending in .onnx.
        weights_only: Keep activations in float: a small file that computes as fast as float, not faster.
        float_layers: Glob or globs over names of layers that stay in float.
        dynamic: Axes that stay open: "batch", "batch,size" (also height and width) or "none".
        size: Height and width, or one number for both; by default the model's own, where it says one.
        overwrite: Replace an existing file.
        progress: Called with the name of each step.

    Raises: UserError when a package is missing, the images do not fit the model, a glob matches no layer, the model
        cannot be exported, arguments are swapped, or the file exists or cannot be written.

    Example:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
        >>> images = torch.randn(4, 3, 32, 32)
        >>> report = iso.quantize(vit, [images], "int8.onnx", weights_only=True, float_layers=["head"])
        >>> report.layers[-1].name, report.layers[-1].precision
        ('head', 'float')
        >>> iso.deployment.open_artefact("int8.onnx")(images).shape
        torch.Size([4, 1000])
    """
    path = check_path(path, "quantize(model, calibration_loader, path)")
    if path.suffix != ".onnx":
        raise UserError(f"{path} must end in .onnx, the format of quantised models")
    mode = "weights" if weights_only else "static"
    model = check_exportable(model, path, overwrite)
    _check_loader(calibration_loader)
    model, shapes = plan_export(model, dynamic, size)
    if shapes.named:
        raise UserError(
            f"the model takes {' and '.join(shapes.names)}, not images alone; give a network of images",
        )
    check_output(model, shapes)
    progress("fusing")
    prepared, merged = prepare(model, shapes)
    check_onnx_size(prepared, "quantise a smaller model")
    if shapes.near:
        shapes, _, deviation = encode(prepared, model, "onnx", shapes)
        if not deviation.passed:
            raise NotEqual(deviation)
    progress("reading calibration images")
    batches = _calibration_batches(calibration_loader, shapes)
    verify(copy_module(model).cpu(), prepared, batches[0][:2])
    progress("converting to onnx")
    metadata = describe(model, shapes)
    before = to_onnx(trace(prepared, shapes), shapes, metadata)
    if isinstance(float_layers, str):
        float_layers = [float_layers]
    kept = _kept_nodes(before, float_layers)
    if weights_only:
        progress("rounding")
        after = _round_weights(before, kept)
    else:
        progress(f"calibrating on {sum(map(len, batches))} images")
        after = _round_all(before, kept, batches)
    del after.metadata_props[:]
    _write_metadata(after, metadata | {"quantization": json.dumps(f"int8 {mode}")})
    progress("comparing")
    measured = _measure(prepared, before, after, batches, shapes)
    if measured["float_difference"] > _LARGEST_FLOAT_DIFFERENCE:
        raise UserError(
            f"the ONNX graph in float32 differs from the model by {measured['float_difference']:.1g} of its largest "
            "output on the calibration images; check that they are prepared as the model expects"
        )
    notes = (*preparation_notes(model, shapes), *_doubts(model, batches, measured.pop("predicted")))
    layers = _describe_layers(before, after, kept)
    report = QuantizeReport(
        path=str(path), mode=mode, layers=layers, notes=notes, left=merged.left, **measured
    )
    _write_metadata(after, {"fidelity": json.dumps(_stored_fidelity(report))})
    progress("writing")
    write_atomically(
        path, lambda file: file.write_bytes(after.SerializeToString()), new=not overwrite
    )
    return report


def _check_loader(loader: object) -> None:
    if isinstance(loader, nn.Module | str | Path) or not isinstance(loader, Iterable):
        order = "quantize(model, calibration_loader, path)"
        raise UserError(
            f"the calibration loader is a {type(loader).__name__}; give batches of images, in the order {order}"
        )


def _write_metadata(graph: "ModelProto", values: Mapping[str, str]) -> None:
    """Add metadata to a graph, in place of what it has under the same keys."""
    entries = {entry.key: entry.value for entry in graph.metadata_props} | dict(values)
    del graph.metadata_props[:]
    for key, value in entries.items():
        graph.metadata_props.add(key=key, value=value)


def _stored_fidelity(report: QuantizeReport) -> dict[str, float | None]:
    """Return how close the file is to its model, for `iso.verify`; equal outputs count as 120 dB."""
    decibels = min(max(report.output_sqnr, -_DECIBELS), _DECIBELS)
    return {"output_sqnr": decibels, "agreement": report.agreement, "images": report.images}


def _outputs(model: nn.Module, batches: Sequence[Tensor]) -> Tensor:
    return torch.cat([only_tensor(model(batch)) for batch in batches]).double()


@torch.no_grad()
def _measure(
    model: nn.Module,
    before: "ModelProto",
    after: "ModelProto",
    batches: Sequence[Tensor],
    shapes: ExportShapes,
) -> JsonObject:
    """Return the numbers of a report: SQNR = 10 log10(sum(signal^2) / sum((signal - rounded)^2)), in decibels."""
    in_float = load_artefact(before.SerializeToString(), "onnx")
    in_int8 = load_artefact(after.SerializeToString(), "onnx")
    exact = _outputs(model, batches)
    before_rounding = _outputs(in_float, batches)
    rounded = _outputs(in_int8, batches)
    if not rounded.isfinite().all():
        raise UserError(
            "the quantised model has outputs that are not finite; keep layers in float with `float_layers`",
        )
    agreement = class_agreement(exact, rounded, getattr(model, "num_classes", None))
    images = _SPEED_IMAGES if "batch" in shapes.dynamic else 1
    speed = measure_speeds({"float": in_float, "int8": in_int8}, shapes.shape, images, seconds=0.2)
    return {
        "images": len(exact),
        "megabytes": after.ByteSize() / 1e6,
        "float_megabytes": before.ByteSize() / 1e6,
        "images_per_second": speed["int8"].median,
        "float_images_per_second": speed["float"].median,
        "agreement": agreement,
        "predicted": 0 if agreement is None else len(exact.argmax(1).unique()),
        "float_difference": relative_difference(exact, before_rounding),
        "output_sqnr": signal_to_noise(exact, rounded),
    }


def _doubts(model: nn.Module, batches: Sequence[Tensor], predicted: int) -> Iterator[str]:
    """Yield why calibration images may not be prepared as the model expects them; agreement would not show it."""
    config = evaluation_config(model)
    mean = torch.tensor(config["mean"])
    std = torch.tensor(config["std"])
    low = (-mean / std).min().item()
    high = ((1 - mean) / std).max().item()
    smallest = min(batch.min().item() for batch in batches)
    largest = max(batch.max().item() for batch in batches)
    if smallest < low - 0.1 or largest > high + 0.1:
        advice = "set model.pretrained_cfg to how they are prepared"
        if spec_of(model).config:
            advice = "prepare them like its test images, with iso.data.eval_loader"
        yield (
            f"calibration images reach from {smallest:.3g} to {largest:.3g}, and those prepared as the file says lie "
            f"between {low:.3g} and {high:.3g}: {advice}"
        )
    if predicted == 1 < sum(map(len, batches)) and getattr(model, "num_classes", 2) != 1:
        yield "the model predicts one class for all calibration images; are they prepared as in its training?"


def _calibration_batches(loader: Iterable[Any], shapes: ExportShapes) -> list[Tensor]:
    batches: list[Tensor] = []
    for given in batches_of(loader, of_loader=True):
        _check_images(given, shapes)
        if isinstance(given, Tensor) and len(given):
            batches.append(given.detach().cpu().float())
    if not batches:
        raise UserError("the calibration batches are empty; give at least one image")
    if "batch" in shapes.dynamic:
        return batches
    images: list[Tensor] = []
    for batch in batches:  # of other sizes, where these are open
        images += batch.split(1)
    return images


def _check_images(images: object, shapes: ExportShapes) -> None:
    channels, height, width = shapes.shape
    description = type(images).__name__
    if isinstance(images, Tensor):
        fits = images.ndim == 4 and images.shape[1] == channels
        description = f"{describe_shape(images)} in {str(images.dtype).removeprefix('torch.')}"
        own_size = "size" in shapes.dynamic or images.shape[2:] == (height, width)
        if fits and own_size and images.is_floating_point() and images.isfinite().all():
            return
    raise UserError(
        f"calibration images are {description}; give normalised images, finite floats of "
        f"B x {channels} x {height} x {width}; for images of another size, give it as `size`"
    )


def _layer_nodes(proto: "ModelProto") -> dict[str, "NodeProto"]:
    """Return the convolutions and matrix products of a graph by node name, which is LAYER/NODE."""
    return {node.name: node for node in proto.graph.node if node.op_type in _LAYERS}


def _layer_of(node_name: str) -> str:
    return node_name.rpartition("/")[0]


def _kept_nodes(proto: "ModelProto", float_layers: Sequence[str]) -> dict[str, str]:
    """Return the nodes that stay in float, with the reason. Raises: UserError for a glob that matches no layer."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    nodes = _layer_nodes(proto)
    layers = list(dict.fromkeys(map(_layer_of, nodes)))
    for glob in float_layers:
        if not any(fnmatchcase(layer, glob) for layer in layers):
            raise UserError(
                f"{glob!r} in `float_layers` matches no layer{nearest_names(glob, layers)}",
            )
    kept = {}
    for name, node in nodes.items():
        if any(fnmatchcase(_layer_of(name), glob) for glob in float_layers):
            kept[name] = "chosen by float_layers"
        elif sum(source in weights for source in node.input[:2]) != 1:
            kept[name] = "a product of two activations"
    return kept


def _describe_layers(
    before: "ModelProto",
    after: "ModelProto",
    kept: Mapping[str, str],
) -> tuple[QuantizedLayer, ...]:
    new_nodes = _layer_nodes(after)
    rounded: set[str] = set()
    for node in after.graph.node:
        if node.op_type == "DequantizeLinear":
            rounded.update(node.output)
    rows = []
    for name, node in _layer_nodes(before).items():
        reads = set(new_nodes[name].input[:2]) if name in new_nodes else set()
        precision = "int8 w"
        reason = ""
        if name in kept or reads.isdisjoint(rounded):
            precision = "float"
            reason = kept.get(name, "not supported")
        elif reads <= rounded:
            precision = "int8"
        rows.append(QuantizedLayer(_layer_of(name), node.op_type, precision, reason))
    return tuple(rows)


def _round_all(proto: "ModelProto", kept: Iterable[str], batches: Sequence[Tensor]) -> "ModelProto":
    """Return a graph with 7-bit weights and 8-bit activations, in ONNX's QDQ form; `kept` nodes stay in float.

    Weights are signed, with one scale for each output channel. Activations are unsigned, with the range that they have
    on the batches. In networks with attention or LayerNorm, only the inputs of layers are rounded.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_static
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    source = copy.deepcopy(proto)  # the quantiser changes what it is given
    add_pre_process_metadata(source)  # torch's exporter has done this work
    operators = list(_LAYERS)
    options: dict[str, Any] = {}
    if any(node.op_type in _ATTENTION for node in proto.graph.node):
        options["OpTypesToExcludeOutputQuantization"] = ["Gemm", "MatMul"]
    else:
        operators += _BETWEEN_LAYERS
    images = iter([{INPUT: batch.numpy()} for batch in batches])
    try:
        with tempfile.TemporaryDirectory(prefix="isomorph-") as folder, quiet():
            path = Path(folder) / "model.onnx"
            quantize_static(
                source,
                path,
                SimpleNamespace(get_next=lambda: next(images, None)),
                op_types_to_quantize=operators,
                per_channel=True,
                reduce_range=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=list(kept),
                extra_options=options,
            )
            return onnx.load(path)
    except OSError as error:
        raise UserError(
            f"cannot write temporary files in {tempfile.gettempdir()}: {error.strerror or error}",
        ) from None


def _round_weights(proto: "ModelProto", kept: Iterable[str]) -> "ModelProto":
    """Return a graph with 8-bit weights that computes in float. They have one scale for each output channel."""
    from onnxruntime.quantization import QDQQuantizer, QuantType

    class WeightQuantizer(QDQQuantizer):
        """onnxruntime's quantiser, which leaves activations and biases as they are."""

        def quantize_activation_tensor(self, tensor_name: str) -> None:
            pass

        def quantize_bias_tensor(self, *arguments: Any) -> None:
            pass

    quantizer = WeightQuantizer(
        copy.deepcopy(proto),
        per_channel=True,
        reduce_range=False,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=None,
        nodes_to_quantize=[],
        nodes_to_exclude=list(kept),
        op_types_to_quantize=list(_LAYERS),
        extra_options={"QDQOpTypePerChannelSupportToAxis": {"MatMul": -1}},
    )
    with quiet():
        return quantizer.quantize_model()
