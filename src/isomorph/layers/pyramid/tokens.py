"""The tokens that a linear layer or a convolution reads.

Letters: M tokens, G groups (linear maps on disjoint channels) of C channels each.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.modes import on_cpu

RIDGE_ULPS = 8
"""Rounding units by which variances of channels are raised: more than a variance that cancels can lack in them.

Without them, units that cancel almost exactly would get a variance of 0 or below, and BatchNorm would amplify them.
"""


class Window(NamedTuple):
    """The window of a convolution: the patches that it reads as its tokens."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def is_pointwise(self) -> bool:
        """True for a 1x1 convolution without stride and padding, whose patches are the positions themselves."""
        return self.kernel_size == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)

    def output_size(self, x: Tensor) -> tuple[int, int]:
        sizes = zip(x.shape[-2:], *self[:4], strict=True)
        height, width = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        return height, width

    def unfold(self, x: Tensor) -> Tensor:
        """Return patches. Shape: (B, C, H, W) -> (B, C k k, L), or without B"""
        return F.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)


def saves_work(x: Tensor) -> bool:
    """True where arithmetic is what takes the time: on a CPU, and on the meta device, on which it is counted."""
    return on_cpu(x) or x.is_meta


def read_tokens(x: Tensor, window: Window | None) -> Tensor:
    """Shape: x (*, C) -> (1, M, C); with a window x (B, C, H, W) -> (G, M, C k k / G)"""
    if window is None:
        return x.flatten(0, -2).unsqueeze(0)
    patches = x.flatten(2) if window.is_pointwise else window.unfold(x)
    return patches.permute(1, 0, 2).flatten(1).unflatten(0, (window.groups, -1)).mT


def scatter_tokens(tokens: Tensor, shape: torch.Size, window: Window | None) -> Tensor:
    """Add every token's values where they were read: the adjoint of `read_tokens`."""
    if window is None:
        return tokens.view(shape)
    patches = tokens.mT.flatten(0, 1).unflatten(1, (shape[0], -1 if shape[0] else 0)).permute(1, 0, 2)  # (B, C k k, L)
    if window.is_pointwise or not shape[0]:
        return patches.reshape(shape)  # torch's fold does not accept an empty batch
    return F.fold(patches, shape[-2:], window.kernel_size, window.dilation, window.padding, window.stride)


def count_tokens(x: Tensor, window: Window | None) -> int:
    """Return the number of tokens that `read_tokens` gives in each group."""
    return x.shape[:-1].numel() if window is None else len(x) * math.prod(window.output_size(x))
