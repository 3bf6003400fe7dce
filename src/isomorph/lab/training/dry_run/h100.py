"""The time of a training step on an H100, calculated from its operations on the meta device.

An operation takes the longest of its arithmetic at the peak of its precision, its bytes (inputs
once, outputs once) at the memory's bandwidth, and the shortest kernel. Eagerly the host launches
one operation after another, and the device waits for it. Peaks and bandwidth are those of an H100
SXM's data sheet; the costs were fitted on measured steps (docs/gpu.md, which has the errors).
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Floating-point operations a second; float32 without TF32.
PEAKS = {torch.float32: 66.9e12, torch.bfloat16: 989.4e12}
# Bytes a second.
BANDWIDTH = 3.35e12
# Seconds of the host for an operation in training, and of the shortest kernel; share of peak and
# bandwidth that kernels reach (`python benchmarks/gpu_model.py --check`).
HOST = 42e-6
KERNEL = 2e-6
REACH = 0.45

# What autocast leaves in float32, by the beginnings of the names of operations.
_FULL_PRECISION = ("native_layer_norm", "_softmax", "_log_softmax", "nll_loss", "native_group_norm")
_NOT_LAUNCHED = ("_unsafe_view", "empty", "new_empty", "is_", "sym_")


class StepCost(NamedTuple):
    """Seconds of a step: with the host launching operations, and as a CUDA graph."""

    eager: float
    graph: float


class RecordOperations(TorchDispatchMode):
    """Record arithmetic and traffic of every operation that a GPU would launch, in seconds.

    With `amp`, float32 tensors count as bfloat16, except in norms, softmax and losses.
    """

    def __init__(self, amp: bool) -> None:
        super().__init__()
        self.amp = amp
        self.counts: list[int] = []
        self.work: list[float] = []
        self.traffic: list[float] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = operation(*args, **kwargs)
        if _is_launched(operation):
            self._record(operation, args, kwargs, output)
        return output

    def _record(self, operation: Any, args: Any, kwargs: Any, output: Any) -> None:
        name = operation._schema.name.partition("::")[2]
        leaves = tree_leaves((args, kwargs, output))
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        halved = self.amp and not name.startswith(_FULL_PRECISION)
        traffic = sum(_bytes_of(tensor, halved) for tensor in tensors.values())
        count = flop_registry.get(operation.overloadpacket)
        flops = count(*args, **kwargs, out_val=output) if count else 0
        peak = PEAKS[torch.bfloat16 if halved else torch.float32]
        self.counts.append(flops)
        self.work.append(flops / peak)
        self.traffic.append(traffic / BANDWIDTH)

    def flops(self) -> int:
        """Return the floating-point operations of what was recorded."""
        return sum(self.counts)

    def cost(self) -> StepCost:
        """Return the time of what was recorded."""
        longest = np.maximum(np.array(self.work), np.array(self.traffic))
        busy = np.maximum(longest / REACH, KERNEL)
        # from an operation's start to the end, if the device never waits again
        remaining = busy[::-1].cumsum()[::-1]
        launched = HOST * np.arange(1, len(busy) + 1)
        return StepCost(eager=float((launched + remaining).max()), graph=float(busy.sum()))


@functools.cache
def _is_launched(operation: Any) -> bool:
    aliases = [output.alias_info for output in operation._schema.returns]
    views = any(alias and not alias.is_write for alias in aliases)
    name = operation._schema.name.partition("::")[2]
    return not views and not name.startswith(_NOT_LAUNCHED)


def _bytes_of(tensor: Tensor, halved: bool) -> int:
    if halved and tensor.dtype == torch.float32:
        return 2 * tensor.numel()
    return tensor.numel() * tensor.element_size()


class FuseAttention(TorchFunctionMode):
    """Let scaled_dot_product_attention be one kernel, as on a GPU; the meta device forms maps."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") == "scaled_dot_product_attention":
            return _fused_attention(*args, **kwargs)
        return function(*args, **kwargs)


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    records = torch.is_grad_enabled()
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, records, dropout_p, is_causal, scale=scale
    )[0]
