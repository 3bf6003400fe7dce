"""Geometry of rectangular, strided and padded grids: offsets between queries and keys, and the taps of a window.

All attention layers describe a key by its offset `delta = key - query`, in steps of the key grid. Offsets split by
axis (rows, then columns), and so do the quadratic position scores built on them: their softmax over an H x W grid is
the outer product of a softmax over H and a softmax over W.
"""

import math

import torch
from timm.layers import to_2tuple
from torch import Tensor


def conv_output_size(size: int, kernel_size: int, stride: int, padding: int) -> int:
    """Return the number of positions of a strided, padded convolution window along an axis of `size` keys.

    Raises: ValueError if the window does not fit.
    """
    if size + 2 * padding < kernel_size:
        raise ValueError(
            f"a feature map of size {size} with padding {padding} is smaller than the {kernel_size}-wide window; "
            "use a larger input"
        )
    return (size + 2 * padding - kernel_size) // stride + 1


def axis_offsets(
    num_queries: int,
    num_keys: int,
    start: float = 0,
    stride: float = 1,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the offsets key - query along one axis, for queries at the key positions `start + i * stride`.

    Shape: -> (num_queries, num_keys)
    """
    queries = start + stride * torch.arange(num_queries, device=device, dtype=dtype)
    keys = torch.arange(num_keys, device=device, dtype=dtype)
    return keys - queries[:, None]


def odd_window(window: int | tuple[int, int]) -> tuple[int, int]:
    """Return the height and width of a window. Raises: ValueError unless both are odd and above 0."""
    height, width = to_2tuple(window)
    if height < 1 or width < 1 or height % 2 == 0 or width % 2 == 0:
        raise ValueError(f"window {height} x {width} has no centre; use odd numbers above 0")
    return height, width


def square_window(num_taps: int) -> tuple[int, int]:
    """Return the height and width of a square window of `num_taps` taps.

    Raises: ValueError if num_taps is not a square number.
    """
    size = math.isqrt(num_taps)
    if size * size != num_taps:
        raise ValueError(f"{num_taps} heads do not form a square window; use a square number (1, 4, 9, 16, ...)")
    return size, size


def squarest_window(num_taps: int) -> tuple[int, int]:
    """Return the height and width of the rectangle of `num_taps` taps closest to a square, with height <= width."""
    height = next(n for n in range(math.isqrt(num_taps), 0, -1) if num_taps % n == 0)
    return height, num_taps // height


def window_centres(window: tuple[int, int]) -> Tensor:
    """Return the offsets (row, column) of the taps of a window, in row-major order as in `conv.weight.flatten(2)`.

    A side of even length has its centres at half steps, so that no tap lies exactly on one key.

    Shape: -> (height width, 2)
    """
    rows, columns = (torch.arange(size, dtype=torch.float32) - (size - 1) / 2 for size in window)
    return torch.cartesian_prod(rows, columns)  # (height width, 2)
