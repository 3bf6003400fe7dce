"""The mean of the positions in a window that are similar to the one in its middle (non-local means).

    S x (p) = sum_o softmax_o(-|z(p) - z(p + o)|^2 / 2) x(p + o)        for the offsets o of the window, inside the map

The distance of two positions serves both of them, so only half of the offsets are compared. No map of the size of a
window is kept: the backward pass computes the weights again, for a few images at a time.

Letters: B images, C and D channels of x and z, K offsets of the window, in row-major order.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.chunked import is_eager, is_functorch_tensor, join_batch, run_in_chunks, split_batch

MAX_NUMBERS = 2**19
"""Numbers of features and weights that are processed together on a CPU, a size that its cache holds."""

MAX_NUMBERS_ELSEWHERE = 2**28
"""The same on other devices."""

_Window = tuple[int, int]
_Corner = tuple[int, int]
"""Row and column where a part of a map begins."""


class _Pair(NamedTuple):
    """An offset in the lower half of the window, and its opposite: both compare the same positions.

    `first` and `second` are the corners of the compared parts of the padded map, which have `growth` more rows and
    columns than the map. In the map of their distances, those of the offset begin at `offset_corner`, and those of its
    opposite at `opposite_corner`. `offset_index` and `opposite_index` are their indices among the K offsets.
    """

    first: _Corner
    second: _Corner
    growth: _Corner
    offset_corner: _Corner
    opposite_corner: _Corner
    offset_index: int
    opposite_index: int


def window_offsets(window: _Window) -> list[tuple[int, int]]:
    """Return the rows and columns from the middle of a window to its K positions."""
    rows, columns = (range(-(side // 2), side // 2 + 1) for side in window)
    return list(product(rows, columns))


def _pairs(window: _Window) -> Iterator[_Pair]:
    """Yield the (K - 1) / 2 offsets below the middle of the window, or right of it, each with its opposite."""
    offsets, (up, left) = window_offsets(window), (window[0] // 2, window[1] // 2)
    for index in range(len(offsets) // 2 + 1, len(offsets)):
        down, right = offsets[index]
        far, near = max(right, 0), max(-right, 0)
        yield _Pair(
            first=(up - down, left - far),
            second=(up, left - near),
            growth=(down, far + near),
            offset_corner=(down, far),
            opposite_corner=(0, near),
            offset_index=index,
            opposite_index=len(offsets) - 1 - index,
        )


def _pad_map(x: Tensor, window: _Window) -> Tensor:
    """Pad a map with zeros as far as a window reaches. Shape: x (..., H, W)"""
    rows, columns = window[0] // 2, window[1] // 2
    return F.pad(x, (columns, columns, rows, rows))


def _cut(x: Tensor, corner: _Corner, H: int, W: int) -> Tensor:
    """Return a part of a map. Shape: x (..., rows, columns) -> (..., H, W)"""
    return x[..., corner[0] : corner[0] + H, corner[1] : corner[1] + W]


def _place(x: Tensor, corner: _Corner, growth: _Corner) -> Tensor:
    """Return a map of zeros, larger by some rows and columns, with x at a corner: the transpose of `_cut`."""
    (top, left), (rows, columns) = corner, growth
    return F.pad(x, (left, columns - left, top, rows - top))


def _shifted(padded: Tensor, window: _Window) -> Iterator[Tensor]:
    """Yield the map as every offset of the window sees it. Shape: padded (..., H + 2 rows, W + 2 columns)"""
    (rows, columns), (H, W) = window, padded.shape[-2:]
    for corner in product(range(rows), range(columns)):
        yield _cut(padded, corner, H - rows + 1, W - columns + 1)


def _compared(padded: Tensor, pair: _Pair, H: int, W: int) -> tuple[Tensor, Tensor]:
    """Return the two parts of a padded map that a pair compares. Shape: -> (..., H + growth, W + growth), twice"""
    rows, columns = H + pair.growth[0], W + pair.growth[1]
    return _cut(padded, pair.first, rows, columns), _cut(padded, pair.second, rows, columns)


def similar_scores(z: Tensor, window: _Window) -> Tensor:
    """Return minus half the squared distance to every offset, -inf outside of the map.

    Shape: z (B, D, H, W) -> (B, K, H, W)
    """
    H, W = z.shape[-2:]
    padded, distances = _pad_map(z, window), [torch.zeros_like(z[:, 0])] * math.prod(window)
    for pair in _pairs(window):
        first, second = _compared(padded, pair, H, W)
        distance = (first - second).square().sum(1)
        distances[pair.offset_index] = _cut(distance, pair.offset_corner, H, W)
        distances[pair.opposite_index] = _cut(distance, pair.opposite_corner, H, W)
    inside = torch.stack(list(_shifted(_pad_map(z.new_ones(H, W), window), window))).log()  # 0, or -inf
    return inside - torch.stack(distances, 1) / 2


def similar_weights(z: Tensor, window: _Window) -> Tensor:
    """Return the weight of every offset in the mean, 0 outside of the map. Shape: z (B, D, H, W) -> (B, K, H, W)"""
    return torch.softmax(similar_scores(z, window), dim=1)


class _SimilarMean(torch.autograd.Function):
    """Compute the mean of similar positions in the dtype of z, keeping only the arguments.

    Shape: x (B, C, H, W), z (B, D, H, W) -> as x
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, z: Tensor, rows: int, columns: int) -> Tensor:
        return run_in_chunks(partial(_mean, window=(rows, columns)), _images_together(x, z, rows * columns), x, z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, z, *ctx.window = inputs
        ctx.save_for_backward(x, z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, z), window, (needs_x, needs_z, *_) = ctx.saved_tensors, tuple(ctx.window), ctx.needs_input_grad
        d_x: list[Tensor] = []
        d_z: list[Tensor] = []
        for few_x, few_z, few_grad in split_batch(_images_together(x, z, math.prod(window)), x, z, grad):
            weights = similar_weights(few_z, window)
            d_x += [_input_gradient(few_x, few_z, few_grad, weights, window)] if needs_x else []
            d_z += [_embedding_gradient(few_x, few_z, few_grad, weights, window)] if needs_z else []
        return join_batch(d_x) if d_x else None, join_batch(d_z) if d_z else None, None, None


def _images_together(x: Tensor, z: Tensor, offsets: int) -> int:
    """Return how many images to process together; all of them in a graph."""
    if not is_eager() or is_functorch_tensor(x) or is_functorch_tensor(z):
        return x.shape[0]
    most = MAX_NUMBERS if x.device.type == "cpu" else MAX_NUMBERS_ELSEWHERE
    return max(1, most // max(1, (x.shape[1] + z.shape[1] + offsets) * math.prod(x.shape[2:])))


def _mean(x: Tensor, z: Tensor, window: _Window) -> Tensor:
    """Return the mean for some images."""
    weights = similar_weights(z, window)
    return _sum_products(weights.unbind(1), _shifted(_pad_map(x.to(z.dtype), window), window)).to(x.dtype)


def _sum_products(weights: Iterable[Tensor], values: Iterable[Tensor]) -> Tensor:
    """Return the sum of weights times values over offsets. Shape: weights (B, H, W), values (B, C, H, W)"""
    total: Tensor | None = None
    for weight, value in zip(weights, values, strict=True):
        total = weight[:, None] * value if total is None else torch.addcmul(total, weight[:, None], value)
    assert total is not None
    return total


def _input_gradient(x: Tensor, z: Tensor, grad: Tensor, weights: Tensor, window: _Window) -> Tensor:
    """Return the gradient of x for some images: every position gets what it gave to the means around it."""
    padded, corners = _pad_map(weights, window).unbind(1), reversed(list(product(range(window[0]), range(window[1]))))
    given = (_cut(weight, corner, *x.shape[-2:]) for weight, corner in zip(padded, corners, strict=True))
    seen = reversed(list(_shifted(_pad_map(grad.to(z.dtype), window), window)))
    return _sum_products(given, seen).to(x.dtype)


def _embedding_gradient(x: Tensor, z: Tensor, grad: Tensor, weights: Tensor, window: _Window) -> Tensor:
    """Return the gradient of z for some images."""
    (H, W), padded = z.shape[-2:], _pad_map(z, window)
    grad, d_z = grad.to(z.dtype), torch.zeros_like(z)
    d_scores = torch.stack([(grad * seen).sum(1) for seen in _shifted(_pad_map(x.to(z.dtype), window), window)], 1)
    d_scores = weights * (d_scores - (weights * d_scores).sum(1, keepdim=True))
    for pair in _pairs(window):
        first, second = _compared(padded, pair, H, W)
        d_distance = _place(d_scores[:, pair.offset_index], pair.offset_corner, pair.growth)
        d_distance = d_distance + _place(d_scores[:, pair.opposite_index], pair.opposite_corner, pair.growth)
        change = (first - second) * d_distance[:, None]  # minus the gradient of the first position
        d_z = d_z + _cut(change, pair.opposite_corner, H, W) - _cut(change, pair.offset_corner, H, W)
    return d_z


def similar_mean(x: Tensor, z: Tensor, window: _Window) -> Tensor:
    """Return the mean of the positions in a window, weighted by softmax(-|z(p) - z(p + o)|^2 / 2), clipped at borders.

    Shape: x (B, C, H, W), z (B, D, H, W) -> (B, C, H, W)
    """
    return _SimilarMean.apply(x, z, *window)
