"""A model as one graph of torch operators (torch.export), which both file formats are made from."""

import copy
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from timm.layers import padding
from timm.utils.model import reparameterize_model
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from isomorph.deployment.shapes import ExportShapes
from isomorph.errors import UserError
from isomorph.operations import unwrap
from isomorph.surgery import fuse, fusible_modules
from isomorph.surgery.fuse import recast_layers
from isomorph.surgery.linear_chains import absorb_conv_biases

_OPERATOR = re.compile(r"\b(?:aten|prims|torchvision|isomorph|higher_order)(?:::|\.)\w+(?:\.\w+)?")
"""An operator of torch in a message."""
_CALL = re.compile(r"\btorch(?:\.\w+)+")
"""A function of torch in a message."""


def prepare(model: nn.Module) -> nn.Module:
    """Return a copy of the model to export: fused, in eval mode, on the CPU, in float32, without gradients.

    Branches of timm's own blocks (MobileOne, RepVGG) are merged too, except where a branch became attention.
    """
    plain = copy.deepcopy(unwrap(model)).cpu().float().eval().requires_grad_(False)
    fused = fuse(plain)
    absorb_conv_biases(fused)
    blocks = {name: fused.get_submodule(name) for name in _mergeable(fused)}
    kept = {name: block for name, block in blocks.items() if recast_layers(block)}  # timm cannot merge these
    for name in kept:
        fused.set_submodule(name, nn.Identity())
    merged = reparameterize_model(fused, inplace=True)
    for name, block in kept.items():
        merged.set_submodule(name, block)
    return merged.requires_grad_(False)


def _mergeable(model: nn.Module) -> list[str]:
    """Return the names of the blocks whose branches timm merges."""
    return [name for name, module in model.named_modules() if callable(getattr(module, "reparameterize", None))]


def fused_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that `prepare` fuses."""
    return (*fusible_modules(model), *_mergeable(model))


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings and log lines of exporters and quantiser within the block; errors still raise."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
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
    """Trace a prepared model with torch.export, with the dynamic axes of the shapes.

    Raises: UserError that names the operator when the model cannot be traced.
    """
    images, named = shapes.example()
    axes = {name: dict.fromkeys(numbers, Dim.DYNAMIC) or None for name, numbers in shapes.axes.items()}
    # tracing runs the model's code, and raises whatever that raises with symbolic sizes
    with (
        quiet(),
        patch.object(padding, "get_same_padding", _same_padding),
        explain_failure("torch.export cannot trace the model", shapes),
    ):
        dynamic = axes if named else tuple(axes.values())
        program = torch.export.export(model, images, named, dynamic_shapes=dynamic)
    if (outputs := len(program.graph_signature.user_outputs)) != 1:
        raise UserError(f"the model returns {outputs} tensors; export a model with one output")
    if not program.call_spec.out_spec.is_leaf():
        raise UserError("the model returns its tensor in a list, tuple or dict; export a model that returns a tensor")
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):  # the stack traces name folders of this machine
        node.meta.pop("stack_trace", None)
    return program


@contextmanager
def explain_failure(what: str, shapes: ExportShapes) -> Iterator[None]:
    """Raise errors within the block as UserError: what failed, the operator at fault, and what to try."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        advice = "; try it with dynamic batch alone" if "size" in shapes.dynamic else ""
        raise UserError(f"{what}: {name_failure(error)}{advice}") from error


def name_failure(error: BaseException) -> str:
    """Return the operator that an exporter failed at, where an error of the chain names one, and its first line."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    for deepest in reversed(chain):
        if match := _OPERATOR.search(str(deepest)) or _CALL.search(str(deepest)):
            return f"operator {match[0].replace('::', '.')} ({_first_line(deepest)})"
    return _first_line(chain[-1])


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    return (lines[0][:200] if lines else type(error).__name__).rstrip(".;:")
