"""The mean of the positions in a window that look like the one in its middle (non-local means), offset by offset.

    D x (p) = sum_o softmax_o(-|z(p) - z(p + o)|^2 / 2) x(p + o)        for the offsets o of the window, inside the map

The distance of a pair of positions serves both of them, so only half of the offsets are compared. Nothing of the size
of a window is kept: the backward pass computes the weights again, for a few images at a time.

Letters: B images, C and D channels of x and z, K offsets of the window, in row-major order.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isomorph.layers.chunked import chunk_size, is_functorch_tensor

MAX_BYTES = 2**20
"""Bytes of features that are processed together on a CPU, a size that its cache holds."""

Reach = tuple[int, int]
"""Rows and columns of a window above and left of its middle."""


Corner = tuple[int, int]
"""Row and column where a part of a map begins."""


class Pair(NamedTuple):
    """An offset of the lower half of the window and its opposite: where the two compare the same positions.

    `first` and `second` are the corners of the compared parts of the padded map, which are larger than the map by
    `more` rows and columns; `here` and `there` are the corners, in the map of their distances, of those under the
    offset and under its opposite; `at` and `opposite` are the places of both in the window.
    """

    first: Corner
    second: Corner
    more: Corner
    here: Corner
    there: Corner
    at: int
    opposite: int


def cut(x: Tensor, corner: Corner, H: int, W: int) -> Tensor:
    """Return a part of a map. Shape: x (..., rows, columns) -> (..., H, W)"""
    return x[..., corner[0] : corner[0] + H, corner[1] : corner[1] + W]


def pad_map(x: Tensor, reach: Reach) -> Tensor:
    """Pad a map with zeros as far as a window reaches. Shape: x (..., H, W)"""
    return F.pad(x, (reach[1], reach[1], reach[0], reach[0]))


def corners(reach: Reach) -> list[Corner]:
    """Return where each offset of a window begins in the padded map."""
    return list(product(range(2 * reach[0] + 1), range(2 * reach[1] + 1)))


def shifted(padded: Tensor, reach: Reach) -> Iterator[Tensor]:
    """Yield the map as every offset of the window sees it. Shape: padded (..., H + 2 rows, W + 2 columns)"""
    H, W = (n - 2 * r for n, r in zip(padded.shape[-2:], reach, strict=True))
    yield from (cut(padded, corner, H, W) for corner in corners(reach))


def pairs(reach: Reach) -> Iterator[Pair]:
    """Yield every offset below the middle of the window, or right of it, with its opposite."""
    (up, left), middle = reach, (2 * reach[0] + 1) * (2 * reach[1] + 1) // 2
    for down in range(up + 1):
        for right in range(1 if down == 0 else -left, left + 1):
            step = down * (2 * left + 1) + right
            far, near = max(right, 0), max(-right, 0)
            yield Pair(
                first=(up - down, left - far),
                second=(up, left - near),
                more=(down, far + near),
                here=(down, far),
                there=(0, near),
                at=middle + step,
                opposite=middle - step,
            )


def _compared(padded: Tensor, pair: Pair, H: int, W: int) -> tuple[Tensor, Tensor]:
    """Return the compared parts of a padded map. Shape: -> (..., H + more rows, W + more columns), twice"""
    rows, columns = H + pair.more[0], W + pair.more[1]
    return cut(padded, pair.first, rows, columns), cut(padded, pair.second, rows, columns)


def similar_weights(z: Tensor, reach: Reach) -> Tensor:
    """Return the weight of every offset in the mean, 0 outside of the map. Shape: z (B, D, H, W) -> (B, K, H, W)"""
    H, W = z.shape[-2:]
    padded, scores = pad_map(z, reach), [torch.zeros_like(z[:, 0])] * ((2 * reach[0] + 1) * (2 * reach[1] + 1))
    for pair in pairs(reach):
        first, second = _compared(padded, pair, H, W)
        distance = (first - second).square().sum(1)
        scores[pair.at], scores[pair.opposite] = cut(distance, pair.here, H, W), cut(distance, pair.there, H, W)
    inside = torch.stack(list(shifted(pad_map(z.new_ones(H, W), reach), reach))).log()  # 0, or -inf
    return torch.softmax(inside - torch.stack(scores, 1) / 2, dim=1)


class _SimilarMean(torch.autograd.Function):
    """Compute the mean of similar positions, keeping only the arguments.

    Shape: x (B, C, H, W), z (B, D, H, W) -> as x
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, z: Tensor, rows: int, columns: int) -> Tensor:
        reach = (rows, columns)
        return torch.cat([_mean(*part, reach) for part in _chunks(x, z)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, z, *ctx.reach = inputs
        ctx.save_for_backward(x, z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, z = ctx.saved_tensors
        parts = [_gradients(*part, tuple(ctx.reach)) for part in _chunks(x, z, grad)]
        d_x, d_z = (torch.cat(each) for each in zip(*parts, strict=True))
        return d_x, d_z, None, None


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors a few images at a time; all at once in a graph, and elsewhere than on a CPU."""
    x = tensors[0]
    size = x.shape[0] if is_functorch_tensor(x) else chunk_size(MAX_BYTES, math.prod(x.shape[1:]), x)
    if size >= x.shape[0]:
        yield tensors
    else:
        yield from zip(*(tensor.split(size) for tensor in tensors), strict=True)


def _mean(x: Tensor, z: Tensor, reach: Reach) -> Tensor:
    """Return the mean for some images."""
    weights = similar_weights(z, reach).to(x.dtype)
    return _sum_products(weights.unbind(1), shifted(pad_map(x, reach), reach))


def _sum_products(weights: Iterable[Tensor], values: Iterable[Tensor]) -> Tensor:
    """Return the sum of weights times values over offsets. Shape: weights (B, H, W), values (B, C, H, W)"""
    total: Tensor | None = None
    for weight, value in zip(weights, values, strict=True):
        total = weight[:, None] * value if total is None else torch.addcmul(total, weight[:, None], value)
    assert total is not None
    return total


def _gradients(x: Tensor, z: Tensor, grad: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and z for some images."""
    weights = similar_weights(z, reach)
    d_scores = torch.stack([(grad * seen).sum(1) for seen in shifted(pad_map(x, reach), reach)], 1).to(z.dtype)
    d_scores = weights * (d_scores - (weights * d_scores).sum(1, keepdim=True))
    given = zip(pad_map(weights.to(grad.dtype), reach).unbind(1), corners(reach)[::-1], strict=True)  # to position p
    from_others = (cut(weight, corner, *x.shape[-2:]) for weight, corner in given)
    d_x = _sum_products(from_others, reversed(list(shifted(pad_map(grad, reach), reach))))
    return d_x, _embedding_gradient(z, d_scores, reach)


def _embedding_gradient(z: Tensor, d_scores: Tensor, reach: Reach) -> Tensor:
    """Return the gradient of z from those of the scores. Shape: z (B, D, H, W), d_scores (B, K, H, W) -> as z"""
    H, W = z.shape[-2:]
    padded, d_z = pad_map(z, reach), torch.zeros_like(z)
    for pair in pairs(reach):
        first, second = _compared(padded, pair, H, W)
        d_distance = _place(d_scores[:, pair.at], pair.here, pair.more) + _place(
            d_scores[:, pair.opposite], pair.there, pair.more
        )
        change = (first - second) * d_distance[:, None]  # minus the gradient of the first position
        d_z = d_z + cut(change, pair.there, H, W) - cut(change, pair.here, H, W)
    return d_z


def _place(x: Tensor, corner: Corner, more: Corner) -> Tensor:
    """Return a map of zeros, larger by some rows and columns, with x at a corner: the transpose of `cut`."""
    (top, left), (rows, columns) = corner, more
    return F.pad(x, (left, columns - left, top, rows - top))


def similar_mean(x: Tensor, z: Tensor, window: tuple[int, int]) -> Tensor:
    """Return the mean of the positions in a window, weighted by softmax(-|z(p) - z(p + o)|^2 / 2), clipped at borders.

    Shape: x (B, C, H, W), z (B, D, H, W) -> (B, C, H, W)
    """
    return _SimilarMean.apply(x, z, window[0] // 2, window[1] // 2)
