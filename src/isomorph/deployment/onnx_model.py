"""A model as an ONNX graph, by torch's exporter."""

import ast
import math
import re
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.export import ExportedProgram

from isomorph.deployment.program import name_failure, quiet
from isomorph.deployment.shapes import ExportShapes
from isomorph.errors import UserError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto
    from onnx_ir import Node

DEFAULT_OPSET = 20
"""Operator set of ONNX unless another one is asked for; onnxruntime runs it since 2023."""
OPSETS = range(18, 24)
"""Operator sets that torch's exporter writes."""
_SCOPES_KEY = "pkg.torch.onnx.name_scopes"
"""Where torch's exporter notes the modules that a node is from, and its own name."""
MAX_BYTES = 2**31 - 2**20
"""Largest ONNX file: the format counts bytes in 31 bits."""
_REARRANGING = ("Pad", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that rearrange a weight: the quantiser rounds weights only if these are computed."""
_SMALL = 1024
"""Elements that a constant may always have."""
_GROWTH = 2
"""Largest ratio of the size of a computed constant to the sizes of those that it is computed from."""


def check_opset(opset: int | None) -> int:
    """Return the operator set, or the default for None. Raises: UserError for one that cannot be written."""
    if opset is not None and opset not in OPSETS:
        raise UserError(
            f"opset {opset} cannot be written; give {OPSETS[0]} to {OPSETS[-1]} (by default {DEFAULT_OPSET})"
        )
    return opset or DEFAULT_OPSET


def check_onnx_size(model: nn.Module) -> None:
    """Raise UserError for a model with more weights than one ONNX file holds."""
    held = 4 * sum(tensor.numel() for tensor in model.state_dict().values())
    if held > MAX_BYTES:
        raise UserError(
            f"the model has {held / 1e9:.1f} GB of weights, an ONNX file holds at most 2 GB; export a .pt2 file"
        )


@torch.no_grad()
def convert(program: ExportedProgram, shapes: ExportShapes, opset: int) -> "ModelProto":
    """Convert a traced model to ONNX. Raises: UserError that names the operator when there is no ONNX form of it."""
    from onnxscript.optimizer import optimize_ir

    try:
        with quiet():
            made = torch.onnx.export(
                program,
                input_names=list(shapes.names),
                output_names=[shapes.output],
                opset_version=opset,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
            assert made is not None
            optimize_ir(made.model, should_fold=_should_compute)
            proto = made.model_proto
    except Exception as error:  # the exporter raises errors of torch, onnxscript and onnx
        raise UserError(f"ONNX cannot express the model: {name_failure(error)}; export a .pt2 file") from error
    written = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    if written != opset:
        raise UserError(f"the model cannot be written in opset {opset}, only in {written}; give that")
    _name_axes(proto, shapes)
    return proto


def _should_compute(node: "Node") -> bool | None:
    """Return whether to compute a node whose inputs are constants; None leaves it to the rules of onnxscript.

    A constant that is much larger than those stays a product of small ones, such as a map of position attention with
    the maps along its two axes. onnxruntime computes it once, when it opens the file.
    """
    shape = node.outputs[0].shape
    if shape is None or not shape.is_static():
        return None
    read = [(value.const_value.size, len(value.uses())) for value in node.inputs if value and value.const_value]
    if math.prod(shape.numpy()) > max(_SMALL, _GROWTH * sum(size for size, _ in read)):
        return False
    replaces = all(size <= _SMALL or uses == 1 for size, uses in read)  # instead of storing the weight twice
    return True if node.op_type in _REARRANGING and replaces else None


def _name_axes(proto: "ModelProto", shapes: ExportShapes) -> None:
    """Name the dynamic axes, such as batch, instead of the tracer's symbols, and remove notes on the code."""
    symbols = {
        value.type.tensor_type.shape.dim[axis].dim_param: name
        for value in proto.graph.input
        for axis, name in shapes.axes[value.name].items()
    }
    pattern = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in symbols) or r"(?!)")
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = pattern.sub(lambda match: symbols[match[0]], dim.dim_param)
    for node in proto.graph.node:
        _name_by_layer(node)


def _name_by_layer(node: "NodeProto") -> None:
    """Put the name of its layer before a node's name, as in "blocks.0.attn.qkv/node_linear", and remove its notes."""
    notes = {entry.key: entry.value for entry in node.metadata_props}
    scopes: list[str] = ast.literal_eval(notes.get(_SCOPES_KEY, "['']"))
    layer = scopes[-2] if len(scopes) > 1 else ""
    if weight := next((name for name in node.input[1:2] if name.endswith(".weight")), ""):
        layer = weight.removesuffix(".weight")  # a folded norm would name the node
    node.name = f"{layer}/{node.name}"
    del node.metadata_props[:]


def add_metadata(proto: "ModelProto", metadata: dict[str, str]) -> None:
    """Write metadata into an ONNX graph, by key; earlier values of the same keys are replaced."""
    from onnx.helper import set_model_props

    set_model_props(proto, {entry.key: entry.value for entry in proto.metadata_props} | metadata)
