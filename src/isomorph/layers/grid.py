"""The geometry of rectangular, strided, padded grids: the one place that knows where queries and keys lie.

Every attention here looks at a key through its offset `delta = key - query`, in steps of the key grid. Offsets
split by axis (rows, then columns), and so do the quadratic position scores built on them: the softmax over an
H x W grid is then the outer product of one softmax over H and one over W.
"""

import math

import torch
from torch import Tensor


def output_size(size: int, kernel_size: int, stride: int, padding: int) -> int:
    """Number of queries that a strided, padded convolution window places along an axis of `size` keys.

    Raises: ValueError when the window does not fit.
    """
    if size + 2 * padding < kernel_size:
        raise ValueError(
            f"a map of {size} along one axis, padded by {padding}, is smaller than the {kernel_size}-wide window"
        )
    return (size + 2 * padding - kernel_size) // stride + 1


def axis_offsets(
    num_queries: int,
    num_keys: int,
    start: int = 0,
    stride: int = 1,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Offsets key - query along one axis; query i stands on key position `start + i * stride`.

    Shape: -> (num_queries, num_keys)
    """
    queries = start + stride * torch.arange(num_queries, device=device, dtype=dtype)
    keys = torch.arange(num_keys, device=device, dtype=dtype)
    return keys - queries[:, None]


def square_window(num_taps: int) -> tuple[int, int]:
    """Height and width of a square window of so many taps.

    Raises: ValueError when num_taps is not a square.
    """
    size = math.isqrt(num_taps)
    if size * size != num_taps:
        raise ValueError(
            f"{num_taps} heads do not form a square window; use a square number of heads (1, 4, 9, 16, ...)"
        )
    return size, size


def squarest_window(num_taps: int) -> tuple[int, int]:
    """Height and width of the rectangle of so many taps that is nearest to a square, never higher than wide."""
    height = next(n for n in range(math.isqrt(num_taps), 0, -1) if num_taps % n == 0)
    return height, num_taps // height


def window_centres(window: tuple[int, int]) -> Tensor:
    """Offsets (row, column) of the taps of a window, row-major like `conv.weight.flatten(2)`.

    An even side has its centres on half steps: no tap then lies on exactly one key.

    Shape: -> (height width, 2)
    """
    rows, columns = (torch.arange(size, dtype=torch.float32) - (size - 1) / 2 for size in window)
    return torch.cartesian_prod(rows, columns)  # (height width, 2)
