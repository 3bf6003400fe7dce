"""Computing the constants of an ONNX graph when it is written, or leaving them to the runtime."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx_ir import Model, Node

_REARRANGING = ("Pad", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that rearrange a weight: the quantiser rounds weights only if these are computed."""
_SMALL = 1024
"""Elements that a constant may always have."""
_GROWTH = 2
"""Largest ratio of the size of a computed constant to the sizes of those that it is computed from."""


def optimize_graph(model: "Model") -> None:
    """Simplify a graph in place, computing constants where the result takes about as much space as its inputs.

    A constant that is much larger stays a product of small ones, such as a map of position attention with the maps
    along its two axes. onnxruntime computes it once, when it opens the file.
    """
    from onnxscript.optimizer import optimize_ir

    optimize_ir(model, should_fold=_should_compute)


def _should_compute(node: "Node") -> bool | None:
    """Return whether to compute a node whose inputs are constants; None leaves it to the rules of onnxscript."""
    shape = node.outputs[0].shape
    if shape is None or not shape.is_static():
        return None
    read = [(value.const_value.size, len(value.uses())) for value in node.inputs if value and value.const_value]
    if math.prod(shape.numpy()) > max(_SMALL, _GROWTH * sum(size for size, _ in read)):
        return False
    replaces = all(size <= _SMALL or uses == 1 for size, uses in read)  # instead of storing the weight twice
    return True if node.op_type in _REARRANGING and replaces else None
