"""Evaluation for a while: every module gets back the mode it had, a frozen BatchNorm its eval mode too."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode within the block."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def deviation(layer: nn.Module, other: nn.Module, shape: tuple[int, ...], like: Tensor) -> float:
    """Largest |difference| of two layers in eval mode, relative to the largest |output| of `other`.

    On standard normal input of that shape, of the kind of `like`.
    """
    probe = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)
    with eval_mode(layer), eval_mode(other):  # dropout would differ from itself
        expected, actual = other(probe), layer(probe)
    return ((actual - expected).abs().max() / expected.abs().max()).item()
