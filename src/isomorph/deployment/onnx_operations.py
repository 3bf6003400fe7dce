"""What every node of an ONNX file computes, with the modules of PyTorch that the file names."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from isomorph.surgery.calls import cast
from isomorph.surgery.first_difference import Operations
from isomorph.surgery.port.watch import Call

if TYPE_CHECKING:
    from onnx import NodeProto

# The modules around a node and its own name, as torch's exporter writes them.
_SCOPES_KEY = "pkg.torch.onnx.name_scopes"
# Relative differences that float32 explains.
ROUNDING = 2e-6


def module_of(node: "NodeProto") -> str:
    """Return the name of the module that a node is from: by torch's notes on it, else by its own name."""
    notes = {entry.key: entry.value for entry in node.metadata_props}
    scopes = re.findall(r"'([^']*)'", notes.get(_SCOPES_KEY, ""))
    if len(scopes) > 1:
        return scopes[-2]
    path = node.name.rpartition("/")[0].strip("/")
    parts: list[str] = []
    # /layer1/layer1.0/conv1 of torch's older exporter is layer1.0.conv1
    for part in path.split("/"):
        if parts and part.startswith(f"{parts[-1]}."):
            parts.pop()
        parts.append(part)
    return ".".join(parts)


def open_session(contents: bytes, **config: str) -> Any:
    """Return an ONNX file as onnxruntime's session on the CPU, with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    options.intra_op_num_threads = torch.get_num_threads()
    for name, value in config.items():
        options.add_session_config_entry(f"session.{name}", value)
    return onnxruntime.InferenceSession(contents, options, providers=["CPUExecutionProvider"])


def onnx_operations(contents: bytes, inputs: Mapping[str, Tensor]) -> Operations:
    """Run an ONNX file with every value as an output, and return its nodes and their values."""
    import onnx

    proto = onnx.load_from_string(contents)
    graph_outputs = [output.name for output in proto.graph.output]
    output_names = list(graph_outputs)
    for node in proto.graph.node:
        for name in node.output:
            if name and name not in graph_outputs:
                proto.graph.output.append(onnx.ValueInfoProto(name=name))
                output_names.append(name)
    session = open_session(proto.SerializeToString())

    arrays: dict[str, Any] = {name: x.numpy() for name, x in inputs.items()}
    results = session.run(output_names, arrays)
    for initializer in proto.graph.initializer:
        arrays[initializer.name] = onnx.numpy_helper.to_array(initializer)
    arrays.update(zip(output_names, results, strict=True))
    slots = {name: slot for slot, name in enumerate(arrays)}
    return Operations(
        calls=[_call(index, node, slots) for index, node in enumerate(proto.graph.node)],
        values=[cast(torch.from_numpy(np.array(x)), torch.float64) for x in arrays.values()],
        inputs=[slots[name] for name in inputs],
        outputs=[slots[name] for name in graph_outputs],
        rounding=ROUNDING,
    )


def _call(index: int, node: "NodeProto", slots: Mapping[str, int]) -> Call:
    return Call(
        index=index,
        name=node.op_type,
        function=None,
        module=module_of(node),
        args=(),
        kwargs={},
        inputs=tuple(slots[name] for name in node.input if name in slots),
        outputs=tuple(slots[name] for name in node.output if name in slots),
    )
