"""Mean and variance of each value of the tokens: cheap, and what keeps statistics of a part of the tokens safe.

Take a channel that is zero for all but a few images, as ReLU makes them. A part T of the tokens may have none of these
images; normalised by the variance of T, their values would be as large as 1 / sqrt(eps). So only the covariances are of
T. With the mean m and the variance v_i of each value over all tokens,

    S = S_T + diag(max(v_i - (S_T)_ii, 0)),    S_T = mean over T of (x - m)(x - m)^T

so that every value counts with its own variance at least; what T lacks is taken to be independent of other values.

Letters: M tokens, n taps of a patch, G groups of c channels, C = G c; left out where there is one.
"""

import math
from typing import Any

import torch
from torch import Tensor

from isomorph.layers.chunked import chunk_size, is_owned_gradient, split_batch
from isomorph.layers.processes import all_reduce, refuse_second_derivatives
from isomorph.layers.tokens import Window

CHUNK_BYTES = 4 << 20


class SumDeviations(torch.autograd.Function):
    """Sum x - level and its square over the first axis, in the dtype of `level`; also return `source`.

    `source` is x as a layer reads it, in that layer's dtype: it alone is saved, and gets the gradient of both, so the
    layer must read the source that is returned.

    Shape: x (B, *), source (B, *), level that broadcasts to an x[i] -> (B, *), (*), (*)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, source: Tensor, level: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
        sums: Any = 0
        squares: Any = 0
        for (part,) in split_batch(_chunk_size(x), x):
            y = part.to(level.dtype) - level
            sums, squares = sums + y.sum(0), squares + y.square().sum(0)
        all_reduce(group, sums, squares)
        return source.view_as(source), sums, squares

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, source, level, ctx.group = inputs
        ctx.save_for_backward(source, level)

    @staticmethod
    def backward(ctx: Any, d_source: Tensor, d_sums: Tensor, d_squares: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives(ctx.group)
        source, level = ctx.saved_tensors
        slope, shift = 2 * d_squares, d_sums.clone()
        all_reduce(ctx.group, slope, shift)
        if not is_owned_gradient(d_source):
            d_x = (source.to(level.dtype) - level) * slope + shift
            return None, d_source + d_x.to(d_source.dtype), None, None
        for d_part, part in split_batch(_chunk_size(source), d_source, source):
            d_part.add_((part.to(level.dtype) - level).mul_(slope).add_(shift))
        return None, d_source, None, None


def _chunk_size(x: Tensor) -> int:
    return chunk_size(CHUNK_BYTES, max(x.shape[1:].numel(), 1), x)


def measure_marginals(
    x: Tensor, source: Tensor, window: Window | None, near: Tensor, count: int, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `source`, for the layer to read, and mean and variance of each value of the tokens of x.

    `source` is x in the dtype of the layer. `near` is close to the means: any value is exact, the means keep digits.
    `count` is the number of tokens.

    Shape: x and source (*, C) or (B, C, H, W), near (G, n c) -> as x, (G, n c), (G, n c), in the dtype of `near`
    """
    count, near = max(count, 1), near.detach()
    if window is None:
        flat, *sums = SumDeviations.apply(x.detach().flatten(0, -2), source.flatten(0, -2), near, group)
        mean, square = (each / count for each in sums)
        return flat.view(source.shape), near + mean, square - mean.square()
    level = near.reshape(x.shape[1], -1).mean(-1)  # (C,)
    source, *sums = SumDeviations.apply(x.detach(), source, level.view(-1, 1, 1), group)  # sums (C, H, W)
    rows, columns = window.lines_read(sums[0])
    inside = rows.sum(1).outer(columns.sum(1)).flatten() / math.prod(window.output_size(x))  # share of positions, (n,)
    mean, square = (torch.einsum("ah,chw,bw->cab", rows, each, columns).flatten() / count for each in sums)  # (C n,)
    level, share = level.repeat_interleave(len(inside)), inside.repeat(len(level))
    # a tap has the value y + level inside the map and 0 outside; y is the deviation, 0 outside
    variance = square - mean.square() + level * (1 - share) * (2 * mean + level * share)
    return source, (mean + level * share).view(near.shape), variance.view(near.shape)


def complete_covariance(covariance: Tensor, part_mean: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return S of the covariance of a part, about its own mean, and the mean and variances of all tokens.

    Shape: (G, C, C), (G, C), (G, C), (G, C) -> (G, C, C)
    """
    gap = part_mean - mean
    covariance = covariance + gap.unsqueeze(-1) * gap.unsqueeze(-2)
    lack = (variance - covariance.diagonal(dim1=-2, dim2=-1)).clamp(min=0)
    return covariance + torch.diag_embed(lack)
