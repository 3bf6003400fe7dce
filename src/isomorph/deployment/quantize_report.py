"""What became of every layer of a quantised model, and the noise that rounding left in it."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from isomorph.deployment.onnx_model import INPUT
from isomorph.deployment.quantize_graph import LAYER_OPERATORS, layer_nodes, layer_of, output_axis, weight_of
from isomorph.surgery.quantization_noise import sqnr

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_BOOKKEEPING = {
    *("QuantizeLinear", "DequantizeLinear", "Constant", "Shape", "Gather", "Slice", "Split", "Expand", "Cast"),
    *("Identity", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Flatten", "Concat", "Pad", "Range", "Where"),
}
"""Operators that compute nothing, or only move values."""


@dataclass(frozen=True)
class QuantizedLayer:
    """A convolution or matrix product: its precision, with the reason for float, and its SQNR in decibels.

    `precision` is "int8" (weights and activations), "int8 w" (weights alone) or "float". `weight_sqnr` is that of the
    rounded weight, None where there is none; `output_sqnr` that of the layer's output on calibration images, with
    everything before it quantised too, None where the layer's activation function is part of it.

    Example:
        >>> iso.deployment.QuantizedLayer("blocks.0.attn", "MatMul", "float", "a product of two activations").reason
        'a product of two activations'
    """

    name: str
    operator: str
    precision: str
    reason: str = ""
    weight_sqnr: float | None = None
    output_sqnr: float | None = None


@dataclass(frozen=True, repr=False)
class QuantizeReport:
    """Result of `quantize`: the file, its size and speed next to the float model's as ONNX, and every layer.

    `agreement` is the share of calibration images, in percent, of which both models predict the same class.
    `images_per_second` are measured with onnxruntime, on as many threads as torch has.

    Example:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
        >>> report = iso.quantize(vit, [torch.randn(4, 3, 32, 32)], "int8.onnx", weights_only=True)
        >>> report.mode, round(report.float_megabytes / report.megabytes, 1)
        ('weights', 3.9)
    """

    path: str
    mode: str
    weight_bits: int
    images: int
    megabytes: float
    float_megabytes: float
    images_per_second: float
    float_images_per_second: float
    equalized: tuple[str, ...]
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
        if self.equalized:
            lines.append(f"channels were equalised after {len(self.equalized)} layers, with the same outputs in float")
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
    head = f"{'layer':<{width}}  {'operator':<8}  precision  weight dB  output dB"
    rows = [
        f"{layer.name:<{width}}  {layer.operator:<8}  {layer.precision:<9}  {_decibels(layer.weight_sqnr):>9}  "
        f"{_decibels(layer.output_sqnr):>9}"
        for layer in layers
    ]
    return "\n".join([head, *(row.rstrip() for row in rows)])


def _decibels(value: float | None) -> str:
    return "" if value is None or math.isinf(value) else f"{value:.1f}"


def describe_layers(
    before: "ModelProto", after: "ModelProto", kept: Mapping[str, str], outputs: Mapping[str, float]
) -> tuple[QuantizedLayer, ...]:
    """Return every layer of the float graph, with its precision in the quantised one. `kept`: reasons by node."""
    from onnx import numpy_helper

    old = {tensor.name: tensor for tensor in before.graph.initializer}
    new = {tensor.name: numpy_helper.to_array(tensor) for tensor in after.graph.initializer}
    made_by = {name: node for node in after.graph.node for name in node.output}
    now = layer_nodes(after)
    rows = []
    for name, node in layer_nodes(before).items():
        weight = weight_of(node, old)
        reads = [_dequantize(made_by.get(source)) for source in now[name].input[:2]] if name in now else []
        precision = "float" if weight is None or not any(reads) else "int8" if all(reads) else "int8 w"
        reason = kept.get(name, "not supported") if precision == "float" else ""
        noise = None
        if weight is not None and not reason:
            axis = output_axis(node, weight, len(old[weight].dims))
            noise = _weight_sqnr(numpy_helper.to_array(old[weight]), weight, new, axis)
        rows.append(QuantizedLayer(layer_of(name), node.op_type, precision, reason, noise, outputs.get(name)))
    return tuple(rows)


def _dequantize(node: "NodeProto | None") -> bool:
    return node is not None and node.op_type == "DequantizeLinear"


def _weight_sqnr(weight: np.ndarray, name: str, tensors: Mapping[str, np.ndarray], axis: int) -> float | None:
    """Return the SQNR of a weight from its integers and scales."""
    integers, scale = tensors.get(f"{name}_quantized"), tensors.get(f"{name}_scale")
    if integers is None or scale is None:
        return None
    shape = [-1 if i == axis and scale.size > 1 else 1 for i in range(weight.ndim)]
    rounded = integers.astype(np.float32) * scale.reshape(shape)
    return sqnr(torch.from_numpy(weight.copy()), torch.from_numpy(rounded))


def float_operators(after: "ModelProto") -> dict[str, int]:
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


def compare_layers(before: "ModelProto", after: "ModelProto", images: Tensor) -> dict[str, float]:
    """Return the SQNR in decibels of every layer's output in the quantised graph, by node, on some images."""
    named = {name: node.output[0] for name, node in layer_nodes(before).items()}
    present = {name for node in after.graph.node for name in node.output}
    shared = {name: tensor for name, tensor in named.items() if tensor in present}
    exact, rounded = (_run(proto, list(shared.values()), images) for proto in (before, after))
    return {name: sqnr(exact[tensor], rounded[tensor]) for name, tensor in shared.items()}


def _run(proto: "ModelProto", tensors: Sequence[str], images: Tensor) -> dict[str, Tensor]:
    """Return inner tensors of a graph for some images."""
    import onnx
    import onnxruntime

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    own = {output.name for output in copy.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(tensors) if name not in own)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(copy.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = list(dict.fromkeys(tensors))
    values = session.run(wanted, {INPUT: images.numpy()})
    return {name: torch.from_numpy(value) for name, value in zip(wanted, values, strict=True)}
