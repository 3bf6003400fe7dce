"""An ONNX graph with 8-bit weights, or 8-bit weights and activations, by onnxruntime's quantiser."""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from isomorph.deployment.shapes import INPUT
from isomorph.errors import UserError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

LAYER_OPERATORS = ("Conv", "Gemm", "MatMul")
"""Operators that multiply by weights."""
_BETWEEN_LAYERS = (
    *("Add", "AveragePool", "Clip", "Concat", "Flatten", "GlobalAveragePool", "MaxPool", "Relu", "Reshape"),
    *("Squeeze", "Transpose", "Unsqueeze"),
)
"""Operators between the layers of a convolutional network that runtimes have in 8 bits too."""
_ATTENTION = ("LayerNormalization", "Softmax")
"""Operators of networks where only layers are rounded: the sums between their blocks have too wide a range."""


def weight_of(node: "NodeProto", initializers: dict[str, Any]) -> str | None:
    """Return the name of a layer's weight, or None for a product of two activations."""
    constants = [name for name in node.input[:2] if name in initializers]
    return constants[0] if len(constants) == 1 else None


def layer_nodes(proto: "ModelProto") -> dict[str, "NodeProto"]:
    """Return the convolutions and matrix products of a graph by node name."""
    return {node.name: node for node in proto.graph.node if node.op_type in LAYER_OPERATORS}


def layer_of(node_name: str) -> str:
    """Return the name of the layer that a node is from."""
    return node_name.rpartition("/")[0]


def quantize_activations(
    proto: "ModelProto", batches: Sequence[Tensor], kept: Sequence[str], bits: int
) -> "ModelProto":
    """Return a graph with 8-bit weights and activations, in ONNX's QDQ form.

    Weights are signed, with one scale for each output channel. Activations are unsigned, with the range that they have
    on the batches. In networks with attention or LayerNorm, only the inputs of layers are rounded.

    Args:
        kept: nodes that stay in float.
        bits: bits of the weights, 7 or 8.

    Raises: UserError when temporary files cannot be written.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_static
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    source = onnx.ModelProto()
    source.CopyFrom(proto)  # the quantiser changes what it is given
    add_pre_process_metadata(source)  # torch's exporter has done this work
    attends = any(node.op_type in _ATTENTION for node in proto.graph.node)
    between = () if attends else _BETWEEN_LAYERS
    with _temporary_file() as path, _silent():
        quantize_static(
            source,
            path,
            _Reader(batches),
            op_types_to_quantize=[*LAYER_OPERATORS, *between],
            per_channel=True,
            reduce_range=bits == 7,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=list(kept),
            extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"]} if attends else {},
        )
        quantized = onnx.load(path)
    onnx.helper.set_model_props(quantized, {entry.key: entry.value for entry in proto.metadata_props})
    return quantized


class _Reader:
    """Batches as onnxruntime reads them."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.batches = iter(batches)

    def get_next(self) -> dict[str, np.ndarray] | None:
        batch = next(self.batches, None)
        return None if batch is None else {INPUT: batch.numpy()}


@contextmanager
def _temporary_file() -> Iterator[Path]:
    """Yield a path in a temporary folder. Raises: UserError when it cannot be written."""
    try:
        with tempfile.TemporaryDirectory(prefix="isomorph-") as folder:
            yield Path(folder) / "model.onnx"
    except OSError as error:
        raise UserError(f"cannot write temporary files in {tempfile.gettempdir()}: {error.strerror or error}") from None


@contextmanager
def _silent() -> Iterator[None]:
    """Suppress log lines below errors within the block; the quantiser writes its advice to the root logger."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def quantize_weights(proto: "ModelProto", kept: Sequence[str], bits: int) -> "ModelProto":
    """Return a graph with 8-bit weights, one scale for each output channel, that computes in float."""
    import onnx
    from onnx import helper, numpy_helper

    quantized = onnx.ModelProto()
    quantized.CopyFrom(proto)
    graph = quantized.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    readers = [node for node in graph.node if node.op_type in LAYER_OPERATORS and node.name not in kept]
    done: dict[str, str] = {}
    nodes: list[NodeProto] = []
    for node in readers:
        name = weight_of(node, initializers)
        if name is None or initializers[name].data_type != onnx.TensorProto.FLOAT:
            continue
        if name not in done:
            axis = _output_axis(node, name, len(initializers[name].dims))
            weight, scale = round_to_integers(numpy_helper.to_array(initializers[name]), axis, bits)
            graph.initializer.append(numpy_helper.from_array(weight, f"{name}_quantized"))
            graph.initializer.append(numpy_helper.from_array(scale, f"{name}_scale"))
            done[name] = f"{name}_DequantizeLinear_Output"
            inputs = [f"{name}_quantized", f"{name}_scale"]
            label = f"{layer_of(node.name)}/dequantize_{len(nodes)}"
            nodes.append(helper.make_node("DequantizeLinear", inputs, [done[name]], name=label, axis=axis))
        node.input[list(node.input).index(name)] = done[name]
    for node in reversed(nodes):
        graph.node.insert(0, node)
    _remove_unused(graph, done)
    return quantized


def _output_axis(node: "NodeProto", weight: str, ndim: int) -> int:
    """Return the axis of a weight that counts output channels."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "Gemm":
        transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        return 0 if transposed else 1
    return ndim - 1 if node.input[1] == weight else max(ndim - 2, 0)


def round_to_integers(weight: np.ndarray, axis: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a weight as signed integers, and the scale of every channel along an axis."""
    others = tuple(i for i in range(weight.ndim) if i != axis)
    scale = (np.abs(weight).max(others, initial=0.0) / (2 ** (bits - 1) - 1)).astype(np.float32)
    scale[scale == 0] = 1.0
    shape = [-1 if i == axis else 1 for i in range(weight.ndim)]
    return np.round(weight / scale.reshape(shape)).astype(np.int8), scale


def _remove_unused(graph: Any, replaced: dict[str, str]) -> None:
    """Remove float weights that no node reads any more."""
    read = {name for node in graph.node for name in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name in replaced and tensor.name not in read]:
        graph.initializer.remove(tensor)
