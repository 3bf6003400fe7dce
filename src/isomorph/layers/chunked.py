"""Work on a batch some images at a time: on a CPU, what stays in its cache and its allocator is fast."""

from collections.abc import Callable
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks


def in_eager_mode() -> bool:
    """Whether this call is what it seems to be, not a compiler, exporter or tracer that looks at it once for ever."""
    return not torch.compiler.is_compiling() and not torch.jit.is_tracing()


def transformed(tensor: Tensor) -> bool:
    """Whether it is a stand-in that torch.func (vmap, jvp and the like) computes with."""
    return in_eager_mode() and torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def images_within(limit: int, numbers: int, x: Tensor) -> int:
    """How many images go together when each makes so many numbers like x's; the whole batch but in eager CPU code."""
    if x.device.type != "cpu" or not in_eager_mode():
        return x.shape[0]
    return max(1, limit // (numbers * x.element_size()))


def watched(module: nn.Module) -> bool:
    """Whether a hook inside, or on all modules, would see that the batch comes in parts."""
    if _global_forward_hooks or _global_forward_pre_hooks:
        return True
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules() if m is not module)


def by_images(function: Callable[..., Tensor], number: int, *tensors: Tensor | None) -> Tensor:
    """The function of a batch, `number` images at a time."""
    first = tensors[0]
    assert first is not None
    if number >= first.shape[0]:
        return function(*tensors)
    parts = [t.split(number) if t is not None else repeat(None) for t in tensors]
    return torch.cat([function(*part) for part in zip(*parts, strict=False)])
