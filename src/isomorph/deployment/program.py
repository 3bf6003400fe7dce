"""A model as one graph of torch operators (torch.export), and that graph in ONNX, by torch's exporter."""

import io
import json
import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import TYPE_CHECKING, Any

import torch
from timm.layers import padding
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from isomorph.deployment.onnx_operations import module_of
from isomorph.deployment.shapes import ExportShapes
from isomorph.errors import UserError
from isomorph.operations import copy_module, in_eval_mode, unwrap
from isomorph.process import replaced_attribute
from isomorph.surgery import FuseReport, fuse_with_report

if TYPE_CHECKING:
    from onnx import ModelProto
    from onnx_ir import Node

OPSET = 20  # operator set of ONNX files; onnxruntime runs it since 2023
METADATA_FILE = "metadata.json"  # in a .pt2 file
# What torch.export says of an axis that is to be open.
_CONSTANT = re.compile(
    r"size\(\)\[(\d+)\] as dynamic but your code specialized it to be a constant \((\d+)\)"
)
# Operators that rearrange a weight: the quantiser rounds weights only if these are computed.
_REARRANGING = ("Pad", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
# elements that a constant may always have
_SMALL = 1024
# largest ratio of a constant to those that it is made of
_GROWTH = 2


def prepare(model: nn.Module, shapes: ExportShapes) -> tuple[nn.Module, FuseReport]:
    """Return a copy to export (fused, eval mode, CPU, float32, no gradients) and what was fused."""
    plain = in_eval_mode(copy_module(unwrap(model)).cpu().float()).requires_grad_(False)
    prepared, report = fuse_with_report(plain, shapes.examples()[0][1], only_forward=True)
    return prepared.requires_grad_(False), report


def only_tensor(output: Any) -> Tensor:
    """Return a model's output, or the logits in it. Raises: UserError for what is not one tensor."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        kind = type(output).__name__
        raise UserError(
            f"the model returns a {kind}, and a file has one output; export a module that gives one tensor",
        )
    return logits


class _OneOutput(nn.Module):
    """A model that returns its logits in an object of transformers, as one that returns the tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return only_tensor(self.model(images))


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings and log lines of exporters and quantiser within the block; errors still raise."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        # torch prints the graph of a model that branches on values
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _same_padding(size: int, kernel_size: int, stride: int, dilation: int) -> int | torch.SymInt:
    """Return the rows or columns to add for ceil(size / stride) outputs: (outputs - 1) stride + extent - size.

    timm divides sizes to floats and rounds up, which a .pt2 file with open height and width cannot hold.
    """
    outputs = (size + stride - 1) // stride  # -(-size // stride) is rounded the other way by ONNX
    extent = (kernel_size - 1) * dilation + 1
    return torch.sym_max((outputs - 1) * stride + extent - size, 0)


@torch.no_grad()
def trace(model: nn.Module, shapes: ExportShapes) -> ExportedProgram:
    """Trace a prepared model with torch.export. Raises: UserError naming the operator, or for several outputs."""
    inputs = shapes.checks[1]
    axes = {
        name: dict.fromkeys(numbers, Dim.DYNAMIC) or None for name, numbers in shapes.axes.items()
    }
    positional: tuple[Tensor, ...] = ()
    named: dict[str, Tensor] = {}
    dynamic: Any = axes
    if shapes.named:
        named = inputs
    else:
        positional = tuple(inputs.values())
        dynamic = tuple(axes.values())
    # tracing runs the model's code, and raises whatever that raises with symbolic sizes
    failure = "torch.export cannot trace the model"
    with (
        quiet(),
        replaced_attribute(padding, "get_same_padding", _same_padding),
        explain_failure(failure, shapes),
    ):
        program = torch.export.export(model, positional, named, dynamic_shapes=dynamic)
    if not program.call_spec.out_spec.is_leaf():
        return trace(_OneOutput(model), shapes)
    for part in program.graph_module.modules():
        if isinstance(part, GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)  # which names folders of this machine
    return program


@contextmanager
def explain_failure(what: str, shapes: ExportShapes) -> Iterator[None]:
    """Raise errors within the block as UserError: what failed, why, and what to try."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError):
            raise
        cause = _first_cause(error)
        advice = less_dynamic(shapes)
        fixed = _CONSTANT.search(str(error))
        if "data-dependent" in cause:
            advice = "; write it without the branch, as with torch.where"
            cause = f"its code branches on values of the images ({cause})"
        elif fixed:
            advice = less_dynamic(shapes, of_batch=fixed[1] == "0")
            cause = _explain_fixed_axis(fixed, shapes)
        raise UserError(f"{what}: {cause}{advice}") from error


def less_dynamic(shapes: ExportShapes, of_batch: bool = False) -> str:
    """Return the advice to leave fewer axes open, size rather than batch if not `of_batch`; empty if none is open."""
    less = {"batch,size": "size" if of_batch else "batch", "size": "none", "batch": "none"}
    return f"; try it with dynamic {less[shapes.dynamic]}" if shapes.dynamic in less else ""


def _explain_fixed_axis(found: re.Match[str], shapes: ExportShapes) -> str:
    """Return which axis the model's code takes for a constant, and what to write instead."""
    number, size = map(int, found.groups())
    names = {axis: name for axes in shapes.axes.values() for axis, name in axes.items()}
    written = f"{shapes.names[0]}.shape[{number}]"
    fixing = f"len({shapes.names[0]})" if number == 0 else f"int({written})"
    return f"its code fixes {names[number]} at {size}, as {fixing} does; write {written}"


def _first_cause(error: BaseException) -> str:
    """Return the first line of the error that an exporter's error began with, which names the operator."""
    inner: BaseException | None = error
    while inner is not None:
        error = inner
        inner = error.__cause__ or error.__context__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".;:")


def to_pt2(program: ExportedProgram, shapes: ExportShapes, metadata: Mapping[str, str]) -> bytes:
    """Return the contents of a .pt2 file of a traced model, with metadata by key. Raises: UserError if it cannot."""
    program.example_inputs = None
    buffer = io.BytesIO()
    with quiet(), explain_failure("torch.export cannot save the model", shapes):
        torch.export.save(program, buffer, extra_files={METADATA_FILE: json.dumps(metadata)})
    return buffer.getvalue()


@torch.no_grad()
def to_onnx(
    program: ExportedProgram,
    shapes: ExportShapes,
    metadata: Mapping[str, str] = {},
) -> "ModelProto":
    """Convert a traced model to ONNX, with metadata by key. Raises: UserError when an operator has no ONNX form."""
    from onnx.helper import set_model_props
    from onnxscript.optimizer import optimize_ir

    options: dict[str, Any] = dict(dynamo=True, optimize=False, verbose=False, opset_version=OPSET)
    try:
        with quiet():
            exported = torch.onnx.export(
                program, input_names=shapes.names, output_names=[shapes.output], **options
            )
            assert exported is not None
            optimize_ir(exported.model, should_fold=_should_compute)
            proto = exported.model_proto
    except Exception as error:  # the exporter raises errors of torch, onnxscript and onnx
        raise UserError(
            f"ONNX cannot express the model: {_first_cause(error)}; export a .pt2 file",
        ) from error
    _name_parts(proto, shapes)
    set_model_props(proto, dict(metadata))
    return proto


def _should_compute(node: "Node") -> bool | None:
    """Return whether to compute a node whose inputs are constants; None leaves it to the rules of onnxscript.

    A constant that is much larger than those stays a product of small ones, such as a map of position attention with
    the maps along its two axes. onnxruntime computes it once, when it opens the file.
    """
    shape = node.outputs[0].shape
    if shape is None or not shape.is_static():
        return None
    total = 0
    stored_twice = False
    for value in node.inputs:
        if value is not None and value.const_value is not None:
            size = value.const_value.size
            total += size
            stored_twice |= size > _SMALL and len(value.uses()) > 1
    if math.prod(shape.numpy()) > max(_SMALL, _GROWTH * total):
        return False
    if node.op_type not in _REARRANGING or stored_twice:
        return None
    return True


def _name_parts(proto: "ModelProto", shapes: ExportShapes) -> None:
    """Name dynamic axes, not by the tracer's symbols, nodes by layer (blocks.0.attn.qkv/node_linear); drop notes."""
    symbols: dict[str, str] = {}
    for value in proto.graph.input:
        for axis, name in shapes.axes[value.name].items():
            symbols[value.type.tensor_type.shape.dim[axis].dim_param] = name
    pattern = re.compile("|".join(rf"\b{re.escape(symbol)}\b" for symbol in symbols) or r"(?!)")
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = pattern.sub(lambda match: symbols[match[0]], dim.dim_param)
    reads: Counter[str] = Counter()
    for node in proto.graph.node:
        reads.update(node.input)
    for node in proto.graph.node:
        node.name = f"{_layer_name(node, reads)}/{node.name}"
        del node.metadata_props[:]


def _layer_name(node: Any, reads: Mapping[str, int]) -> str:
    """Return the name of the layer that a node is from: that of its weight, unless tied layers read it."""
    for weight in node.input[1:2]:
        if weight.endswith(".weight") and reads[weight] == 1:  # a folded norm has another
            return weight.removesuffix(".weight")
    return module_of(node)
