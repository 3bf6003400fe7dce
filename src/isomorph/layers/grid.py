"""Geometry of rectangular, strided and padded grids: offsets of queries and keys, taps of a window, shapes of calls.

All attention layers describe a key by its offset `delta = key - query`, in steps of the key grid. Offsets split by
axis (rows, then columns), and so do the quadratic position scores built on them: their softmax over an H x W grid is
the outer product of a softmax over H and a softmax over W.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

# Height and width.
GridSize = tuple[int, int]
# One number for height and width, or both.
Sides = int | GridSize
Forward = Callable[[Any, Tensor], Tensor]


def conv_output_size(size: int, kernel_size: int, stride: int, padding: int) -> int:
    """Return the positions of a window along an axis. Raises: ValueError if it does not fit."""
    if size + 2 * padding < kernel_size:
        window = f"the {kernel_size}-wide window; use a larger input"
        raise ValueError(
            f"a feature map of size {size} with padding {padding} is smaller than {window}",
        )
    return (size + 2 * padding - kernel_size) // stride + 1


def axis_offsets(
    queries: int,
    keys: int,
    start: float = 0,
    stride: float = 1,
    device: Any = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return key - query, for queries at `start + i * stride`. Shape: -> (queries, keys)"""
    positions = start + stride * torch.arange(queries, device=device, dtype=dtype)
    return torch.arange(keys, device=device, dtype=dtype) - positions[:, None]


def odd_window(window: Sides) -> GridSize:
    """Return the height and width of a window. Raises: ValueError unless both are odd and above 0."""
    height, width = to_2tuple(window)
    if height < 1 or width < 1 or height % 2 == 0 or width % 2 == 0:
        raise ValueError(f"window {height} x {width} has no centre; use odd numbers above 0")
    return height, width


def squarest_window(num_taps: int) -> GridSize:
    """Return the height and width of the rectangle of `num_taps` taps closest to a square, with height <= width."""
    height = math.isqrt(num_taps)
    while num_taps % height:
        height -= 1
    return height, num_taps // height


def fit_grid(count: int, shapes: Sequence[GridSize], prefix: int = 0) -> tuple[GridSize, int]:
    """Return the grid (H, W) of `count` tokens, and the number of tokens before it: `prefix`, or else none or one.

    `shapes` are sizes of windows, feature maps or an image, one of which the tokens cover evenly. A shape with as many
    positions is the grid; otherwise the grid has the sides of the first possible shape, scaled, to within one position.
    Without shapes it is a square.

    Raises: ValueError if there is no such grid.

    >>> fit_grid(50, [(224, 224)], prefix=1)
    ((7, 7), 1)
    >>> fit_grid(60, [(7, 7), (96, 160)])
    ((6, 10), 0)
    """
    if not isinstance(count, int) and shapes:  # a size that an export leaves open
        return shapes[0], prefix
    leads = (prefix, 0, 1)
    for (H, W), lead in itertools.product(shapes, leads):
        if known_true(count - lead == H * W):
            return (H, W), lead
    for shape, lead in itertools.product(shapes or [(1, 1)], leads):
        grid = _proportional_grid(count - lead, shape)
        if grid is not None:
            return grid, lead
    expected = "square grid"
    if shapes:
        sizes = " or ".join(f"{H} x {W}" for H, W in shapes)
        expected = f"grid of the proportions of {sizes}"
    before = " or ".join(map(str, sorted(set(leads))))
    raise ValueError(
        f"{count} tokens do not fill a {expected} after {before} class and register tokens; give prefix_tokens, the "
        "number of these, and grid_size=(height, width) for another grid"
    )


def _proportional_grid(count: int, shape: GridSize) -> GridSize | None:
    """Return the grid of `count` positions with the sides of `shape` scaled, to within one, or None."""
    if count < 1:
        return None
    H, W = shape
    step = math.sqrt(H * W / count)
    ideal = H / step
    fitting = []
    for height in range(max(1, int(ideal) - 1), int(ideal) + 3):
        width = count // height
        if height * width == count and abs(height - ideal) <= 1 and abs(width - W / step) <= 1:
            fitting.append((height, width))
    return min(fitting, key=lambda grid: abs(grid[0] - ideal), default=None)


def grid_positions(grid_size: GridSize) -> Tensor:
    """Return the (row, column) of every position of a grid, row by row. Shape: -> (H W, 2)"""
    H, W = grid_size
    return torch.cartesian_prod(torch.arange(float(H)), torch.arange(float(W)))


class OnTokenGrid:
    """Mixin for layers on grid tokens that follow `prefix_tokens`."""

    grid_size: GridSize
    prefix_tokens: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens that fill the layer's own grid, those of the prefix included."""
        return self.prefix_tokens + math.prod(self.grid_size)

    def check_grid(self, x: Tensor, grid_size: GridSize | None) -> GridSize:
        """Return the grid of a call, by default the layer's own. Raises: ValueError if the tokens do not fill it.

        Shape: x (..., N, C)
        """
        H, W = grid_size or self.grid_size
        count = x.shape[-2]
        prefix = self.prefix_tokens
        if count != prefix + H * W:
            after = f" after {prefix} prefix tokens" if prefix else ""
            raise ValueError(
                f"{count} tokens do not fill the {H} x {W} grid{after}; pass grid_size=(height, width)",
            )
        return H, W


def require_map(x: Tensor) -> None:
    """Raise ValueError for anything but a feature map (B, H, W, C)."""
    if x.ndim != 4:
        raise ValueError(f"the input has shape {tuple(x.shape)}; give a feature map (B, H, W, C)")


def pad_to_multiple(x: Tensor, height: int, width: int) -> Tensor:
    """Pad maps with zeros, below and right, to multiples of a height and width. Shape: (..., H, W) -> (..., H', W')"""
    H, W = x.shape[-2:]
    return F.pad(x, (0, -W % width, 0, -H % height))


def no_mask(layer: object, attn_mask: Tensor | None, is_causal: bool) -> None:
    """Raise ValueError for a mask, where a layer is called as timm's Attention and cannot obey one."""
    if attn_mask is not None or is_causal:
        raise ValueError(
            f"{type(layer).__name__} does not support attn_mask or is_causal; leave them out",
        )


def batched(forward: Forward) -> Forward:
    """Decorate a forward that reads feature maps (B, C, H, W) so that it reads one map (C, H, W) too."""

    @wraps(forward)
    def call(self: Any, x: Tensor) -> Tensor:
        return forward(self, x[None])[0] if x.ndim == 3 else forward(self, x)

    return call


def known_true(condition: Any) -> bool:
    """Return True if a condition on sizes holds for all sizes of a graph; those of `torch.jit` are tensors."""
    return bool(condition) if isinstance(condition, Tensor) else statically_known_true(condition)
