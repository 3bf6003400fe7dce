"""Shapes of inputs: feature maps without a batch axis, and comparisons of sizes under a tracer."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

Forward = Callable[[Any, Tensor], Tensor]


def batched(forward: Forward) -> Forward:
    """Decorate a forward that reads feature maps (B, C, H, W) so that it reads one map (C, H, W) too."""

    @wraps(forward)
    def call(self: Any, x: Tensor) -> Tensor:
        return forward(self, x[None])[0] if x.ndim == 3 else forward(self, x)

    return call


def known_true(condition: Any) -> bool:
    """Return True if a condition on sizes holds for all sizes of a graph; those of `torch.jit` are tensors."""
    return bool(condition) if isinstance(condition, Tensor) else statically_known_true(condition)
