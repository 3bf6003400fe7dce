"""What became of every layer of a quantised model, and what rounding cost."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from isomorph.deployment.quantize_graph import LAYER_OPERATORS, layer_nodes, layer_of, weight_of

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_BOOKKEEPING = {
    *("QuantizeLinear", "DequantizeLinear", "Constant", "Shape", "Gather", "Slice", "Split", "Expand", "Cast"),
    *("Identity", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Flatten", "Concat", "Pad", "Range", "Where"),
}
"""Operators that compute nothing, or only move values."""


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


def sqnr(signal: Tensor, rounded: Tensor) -> float:
    """Return 10 log10(sum(signal^2) / sum((signal - rounded)^2)), infinite if nothing was rounded."""
    signal, rounded = signal.double(), rounded.double()
    noise, power = float((signal - rounded).square().sum()), float(signal.square().sum())
    return math.inf if noise == 0 else -math.inf if power == 0 else 10 * math.log10(power / noise)


def describe_layers(before: "ModelProto", after: "ModelProto", kept: Mapping[str, str]) -> tuple[QuantizedLayer, ...]:
    """Return every layer of the float graph, with its precision in the quantised one. `kept`: reasons by node."""
    weights = {tensor.name: tensor for tensor in before.graph.initializer}
    made_by = {name: node for node in after.graph.node for name in node.output}
    now = layer_nodes(after)
    rows = []
    for name, node in layer_nodes(before).items():
        reads = [_dequantize(made_by.get(source)) for source in now[name].input[:2]] if name in now else []
        in_float = weight_of(node, weights) is None or not any(reads)
        precision = "float" if in_float else "int8" if all(reads) else "int8 w"
        reason = kept.get(name, "not supported") if in_float else ""
        rows.append(QuantizedLayer(layer_of(name), node.op_type, precision, reason))
    return tuple(rows)


def _dequantize(node: "NodeProto | None") -> bool:
    return node is not None and node.op_type == "DequantizeLinear"


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
