"""An ONNX graph with 8-bit weights, or 8-bit weights and activations, by onnxruntime's quantiser."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from isomorph.deployment.program import quiet
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
    proto: "ModelProto", kept: Sequence[str], bits: int, batches: Sequence[Tensor]
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
    images = iter([{INPUT: batch.numpy()} for batch in batches])
    with _temporary_file() as path, quiet():
        quantize_static(
            source,
            path,
            SimpleNamespace(get_next=lambda: next(images, None)),
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


@contextmanager
def _temporary_file() -> Iterator[Path]:
    """Yield a path in a temporary folder. Raises: UserError when it cannot be written."""
    try:
        with tempfile.TemporaryDirectory(prefix="isomorph-") as folder:
            yield Path(folder) / "model.onnx"
    except OSError as error:
        raise UserError(f"cannot write temporary files in {tempfile.gettempdir()}: {error.strerror or error}") from None


def quantize_weights(proto: "ModelProto", kept: Sequence[str], bits: int) -> "ModelProto":
    """Return a graph with 8-bit weights, one scale for each output channel (column of a map), that computes in float.

    Arguments as in `quantize_activations`.
    """
    import onnx
    from onnxruntime.quantization import QDQQuantizer, QuantType

    class WeightQuantizer(QDQQuantizer):
        """onnxruntime's quantiser, which leaves activations and biases as they are."""

        def quantize_activation_tensor(self, tensor_name: str) -> None:
            pass

        def quantize_bias_tensor(self, *arguments: Any) -> None:
            pass

    source = onnx.ModelProto()
    source.CopyFrom(proto)
    quantizer = WeightQuantizer(
        source,
        per_channel=True,
        reduce_range=bits == 7,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=None,
        nodes_to_quantize=[],
        nodes_to_exclude=list(kept),
        op_types_to_quantize=list(LAYER_OPERATORS),
        extra_options={"QDQOpTypePerChannelSupportToAxis": {"MatMul": -1}},
    )
    with quiet():
        return quantizer.quantize_model()
