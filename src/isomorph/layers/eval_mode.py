"""Put a model into eval mode temporarily, check its outputs, and compare those of two layers in eval mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from isomorph.errors import NotFinite


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode within the block, then restore the mode of every module, a frozen BatchNorm's too."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def require_finite(outputs: Any) -> None:
    """Raise NotFinite if a tensor in a network's outputs has NaN or infinite values."""
    if not all(bool(each.isfinite().all()) for each in tree_leaves(outputs) if isinstance(each, Tensor)):
        raise NotFinite("the network's outputs are not finite (NaN or infinite); check its weights and the inputs")


@torch.no_grad()
def relative_deviation(layer: nn.Module, other: nn.Module, shape: tuple[int, ...], like: Tensor) -> float:
    """Return the largest |difference| of two layers in eval mode, relative to the largest |output| of `other`.

    The input is standard normal, with the given shape and the device and dtype of `like`.
    """
    probe = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)
    with eval_mode(layer), eval_mode(other):  # dropout would differ from itself
        expected, actual = other(probe), layer(probe)
    return relative_difference(actual, expected)


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest |difference|, relative to the largest |expected|; 0 for zeros, and on the meta device."""
    if expected.is_meta:
        return 0.0
    largest = expected.abs().max()
    return ((actual - expected).abs().max() / largest.clamp(min=torch.finfo(largest.dtype).tiny)).item()
