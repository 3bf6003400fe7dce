"""What torch does with this call: which form a layer takes, and what it may keep or overwrite."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

CPU_DEVICE = "cpu"
"""Type of the device for which layers take the form of a CPU; a test of the other form names another."""


def on_cpu(tensor: Tensor) -> bool:
    """True if a layer takes the form that is fast on a CPU for this tensor."""
    return tensor.device.type == CPU_DEVICE


def is_eager() -> bool:
    """True if torch runs eagerly: nothing is compiling, exporting or tracing this call."""
    return not torch.compiler.is_compiling() and not torch.jit.is_tracing()


def is_functorch_tensor(tensor: Tensor) -> bool:
    return is_eager() and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def in_functorch() -> bool:
    return is_eager() and torch._C._functorch.maybe_current_level() is not None


def can_write_into(gradient: Tensor) -> bool:
    """True if a gradient that nothing else reads may be overwritten: it is contiguous, and nothing is recorded."""
    recorded = torch.is_grad_enabled() or not is_eager() or is_functorch_tensor(gradient)
    return not recorded and gradient.is_contiguous()


def can_keep(*tensors: Tensor) -> bool:
    """True if what is computed from these tensors may serve later calls: nothing traces or captures this one."""
    if not is_eager() or torch._C._functorch.peek_interpreter_stack() is not None or get_proxy_mode() is not None:
        return False
    if any(type(each) not in (Tensor, nn.Parameter) or each.is_meta or each.is_inference() for each in tensors):
        return False
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())


def recomputed(function: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
    """Return what the function returns, computed again in the backward pass instead of keeping what it needs."""
    if not torch.is_grad_enabled() or in_functorch():  # torch.func has no checkpoint
        return function(*arguments, **named)
    return checkpoint(function, *arguments, use_reentrant=False, **named)


LARGEST_CONSTANT = 2**23
"""Bytes of the largest constant that is kept."""


@functools.lru_cache(maxsize=128)
def _made(make: Callable[..., Tensor], device: torch.device, arguments: tuple[Hashable, ...]) -> Tensor | None:
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        made = make(*arguments, device=torch.device("cpu"))
        return made.to(device) if made.nbytes <= LARGEST_CONSTANT else None  # complete on return, for every stream


def constant(make: Callable[..., Tensor], like: Tensor, *arguments: Any) -> Tensor:
    """Return `make(*arguments, device=...)` on the device of `like`: numbers that follow from sizes alone.

    Small ones are made once for all layers and calls, and must not be written to.
    """
    kept = _made(make, like.device, arguments) if can_keep(like) else None
    return kept if kept is not None else make(*arguments, device=like.device)
