"""The tokens that a linear layer or a convolution reads.

Letters: M tokens, C channels, G groups (linear maps on disjoint channels; left out where there is one).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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

    @property
    def overlaps(self) -> bool:
        """True if neighbouring patches share values of the map."""
        return any(s <= d * (k - 1) for k, s, d in zip(self.kernel_size, self.stride, self.dilation, strict=True))

    def output_size(self, x: Tensor) -> tuple[int, int]:
        """Return the height and width of the output map. Shape: x (B, C, H, W)"""
        sizes = zip(x.shape[-2:], *self[:4], strict=True)
        height, width = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        return height, width


def unfold(x: Tensor, window: Window) -> Tensor:
    """Return the patches of maps. Shape: (B, C, H, W) -> (B, C k k, L), or without B"""
    return F.unfold(x, window.kernel_size, window.dilation, window.padding, window.stride)


def read_tokens(x: Tensor, window: Window | None) -> Tensor:
    """Return the inputs of each output position as tokens.

    Shape: x (*, C) -> (M, C); with a window x (B, C, H, W) -> (M, C k k), or (G, M, C k k / G) with groups
    """
    if window is None:
        return x.flatten(0, -2)  # (M, C)
    groups = window.groups
    patches = x.flatten(2) if window.is_pointwise else unfold(x, window)
    if groups == 1:
        return patches.transpose(1, 2).flatten(0, 1)  # (B L, C k k)
    return patches.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)  # (G, B L, C k k / G)


def scatter_tokens(tokens: Tensor, shape: torch.Size, window: Window | None) -> Tensor:
    """Add every token's values where they were read: the adjoint of `read_tokens`. Shape: -> `shape`"""
    if window is None:
        return tokens.view(shape)
    batch, rest = shape[0], tokens.shape[:-2]
    patches = tokens.unflatten(-2, (batch, tokens.shape[-2] // max(batch, 1)))  # (G, B, L, C k k / G)
    patches = patches.permute(1, 0, 3, 2).flatten(1, 2) if rest else patches.transpose(1, 2)  # (B, C k k, L)
    if window.is_pointwise or not batch:
        return patches.reshape(shape)  # torch's fold does not accept an empty batch
    return F.fold(patches, shape[-2:], window.kernel_size, window.dilation, window.padding, window.stride)


def count_tokens(x: Tensor, window: Window | None) -> int:
    """Return the number of tokens that `read_tokens` gives."""
    if window is None:
        return x.shape[:-1].numel()
    return len(x) * math.prod(window.output_size(x))
