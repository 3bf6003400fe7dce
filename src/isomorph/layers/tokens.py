"""The tokens that a linear layer or a convolution reads: all of them, or a random part of them.

Letters: M tokens, n drawn tokens, C channels, G groups (linear maps on disjoint channels; left out where there is one).
"""

import math
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.errors import UserError

Statistics = float | Literal["all"]
"""Part of the tokens on which the covariance of a layer's input is measured: above 0 and at most 1, or "all"."""


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

    def line_masks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return masks of the map's rows that each row of the kernel reads, and of its columns that each column reads.

        Shape: x (B, C, H, W) -> (k, H), (k, W), bool
        """
        masks = []
        for size, out, k, s, p, d in zip(x.shape[-2:], self.output_size(x), *self[:4], strict=True):
            first = torch.arange(out, device=x.device) * s - p
            line = first + d * torch.arange(k, device=x.device).unsqueeze(1)  # (k, positions)
            read = line.unsqueeze(2) == torch.arange(size, device=x.device)
            masks.append(read.any(1))
        return masks[0], masks[1]


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


def parse_statistics(given: Any) -> float:
    """Return the part of the tokens on which covariances are measured: 1 for "all"; "1/4" may be text.

    Raises: UserError unless it is "all" or a number above 0 and at most 1.
    """
    part = None
    if isinstance(given, int | float | str) and not isinstance(given, bool):
        try:
            part = 1.0 if given == "all" else float(Fraction(given))
        except (ValueError, ZeroDivisionError, OverflowError):
            part = None
    if part is not None and 0 < part <= 1:
        return part
    shown = repr(given) if len(repr(given)) <= 40 else f"{repr(given)[:37]}..."
    raise UserError(
        f"statistics {shown} is not a part of the tokens; give 'all', or a number above 0 and at most 1, such as 1/4"
    )


def draw_tokens(count: int, part: float, device: torch.device) -> Tensor:
    """Draw a part of `count` tokens, at least two, from torch's generator: one of each run of neighbours, in order.

    The tokens are divided into n = round(part * count) runs whose lengths differ by at most one, so the drawn tokens
    are spread evenly over the images. Images of a batch are drawn in the same way.

    Shape: -> (n,)
    """
    drawn = min(count, max(2, round(part * count)))
    edges = torch.arange(drawn + 1, device=device) * count // max(drawn, 1)
    lengths = edges[1:] - edges[:-1]
    return edges[:-1] + (torch.rand(drawn, device=device) * lengths).long()
