"""What torch does with this call, and what a layer may do in it: chunks of images on a CPU, gradients in place."""

from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks


def is_eager() -> bool:
    """True if torch runs eagerly: nothing is compiling, exporting or tracing this call."""
    return not torch.compiler.is_compiling() and not torch.jit.is_tracing()


def is_functorch_tensor(tensor: Tensor) -> bool:
    """True if the tensor is a wrapper of torch.func (vmap, jvp and the like)."""
    return is_eager() and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def chunk_size(max_bytes: int, elements: int, x: Tensor) -> int:
    """Return how many images to process together so that they need at most `max_bytes`.

    Each image needs `elements` numbers of the dtype of x. The whole batch, unless torch runs eagerly on a CPU.
    """
    if x.device.type != "cpu" or not is_eager():
        return x.shape[0]
    return max(1, max_bytes // (elements * x.element_size()))


def has_inner_hooks(module: nn.Module) -> bool:
    """True if a hook on a submodule, or a global hook, would notice that the batch is processed in chunks."""
    if _global_forward_hooks or _global_forward_pre_hooks:
        return True
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules() if m is not module)


def split_batch(size: int, *tensors: Tensor | None) -> Iterable[tuple[Any, ...]]:
    """Return `size` images of all tensors at a time; None stays None."""
    first = tensors[0]
    assert first is not None
    if size >= first.shape[0]:
        return [tensors]
    return zip(*(t.split(size) if t is not None else repeat(None) for t in tensors), strict=False)


def run_in_chunks(function: Callable[..., Tensor], size: int, *tensors: Tensor | None) -> Tensor:
    """Call `function` on `size` images at a time and concatenate the results."""
    return join_batch([function(*part) for part in split_batch(size, *tensors)])


def join_batch(parts: list[Tensor]) -> Tensor:
    """Return the images of all parts as one batch."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def can_write_into(gradient: Tensor) -> bool:
    """Return whether a gradient may be overwritten: it is contiguous, and torch runs eagerly and records nothing.

    The caller makes sure that nothing else reads the gradient.
    """
    recorded = torch.is_grad_enabled() or not is_eager() or is_functorch_tensor(gradient)
    return not recorded and gradient.is_contiguous()
