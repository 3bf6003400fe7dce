"""What every node of a .pt2 file computes, with the modules of PyTorch that the file names."""

import io
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from isomorph.deployment.onnx_operations import ROUNDING
from isomorph.operations import tensors_in
from isomorph.surgery.calls import cast
from isomorph.surgery.first_difference import Operations
from isomorph.surgery.port.watch import Call, Ref


class _Recorder(fx.Interpreter):
    """Runs a graph, and records its nodes and their values."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.calls: list[Call] = []
        self.values: list[Tensor] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self._slots: dict[fx.Node, list[int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if n.op == "output":
            for node in n.all_input_nodes:
                self.outputs += self._slots[node]
        elif n.target is operator.getitem:
            self._slots[n] = self._item(n)
        else:
            self._slots[n] = [self._add(tensor) for tensor in tensors_in(out)]
        if n.op == "placeholder":
            self.inputs += self._slots[n]
        elif n.op == "call_function" and n.target is not operator.getitem:
            self._record(n)
        return out

    def _add(self, tensor: Tensor) -> int:
        value = tensor.detach().clone()  # a node may write into it
        self.values.append(cast(value, torch.float64))
        return len(self.values) - 1

    def _item(self, n: fx.Node) -> list[int]:
        """Return the slot of one of the values of another node."""
        source: Any = n.args[0]
        index: Any = n.args[1]
        slots = self._slots[source]
        return [slots[index]] if slots else []

    def _record(self, n: fx.Node) -> None:
        schema = getattr(n.target, "_schema", None)
        arguments: dict[str, Any] = dict(n.kwargs)
        if schema is not None:
            names = [argument.name for argument in schema.arguments]
            arguments |= dict(zip(names, n.args, strict=False))
        self.calls.append(
            Call(
                index=len(self.calls),
                name=getattr(n.target, "__name__", str(n.target)).partition(".")[0],
                function=None,
                module=_module_of(n),
                args=(),
                kwargs=tree_map_only(fx.Node, self._given, arguments),
                inputs=tuple(slot for node in n.all_input_nodes for slot in self._slots[node]),
                outputs=tuple(self._slots[n]),
            )
        )

    def _given(self, node: fx.Node) -> Any:
        """Return a node among the arguments of another as the value that it is."""
        slots = self._slots[node]
        return Ref(slots[0]) if len(slots) == 1 else None


def _module_of(n: fx.Node) -> str:
    """Return the name of the module that a node is from."""
    stack = list(n.meta.get("nn_module_stack", {}).values())
    return stack[-1][0] if stack else ""


@torch.no_grad()
def pt2_operations(contents: bytes, inputs: Mapping[str, Tensor]) -> Operations:
    """Run a .pt2 file node by node, and return the nodes and their values."""
    module = torch.export.load(io.BytesIO(contents)).module()
    assert isinstance(module, fx.GraphModule)
    recorder = _Recorder(module)
    recorder.run(*inputs.values())
    return Operations(
        calls=recorder.calls,
        values=recorder.values,
        inputs=recorder.inputs,
        outputs=recorder.outputs,
        rounding=ROUNDING,
    )
