"""Mean and variance of each value of the tokens: cheap, and what keeps statistics of a part of the tokens safe.

Take a channel that is zero for all but a few images, as ReLU makes them. A part T of the tokens may have none of these
images; normalised by the variance of T, their values would be as large as 1 / sqrt(eps). So only the covariances are of
T. With the mean m and the variance v_i of each value over all tokens,

    S = S_T + diag(max(v_i - (S_T)_ii, 0)),    S_T = mean over T of (x - m)(x - m)^T

so that every value counts with its own variance at least; what T lacks is taken to be independent of other values.

Letters: M tokens, n taps of a patch, G groups of c channels, C = G c; left out where there is one.
"""

from typing import Any

import torch
from torch import Tensor

from isomorph.layers.chunked import chunk_size, split_batch
from isomorph.layers.processes import all_reduce, refuse_second_derivatives
from isomorph.layers.tokens import Window, unfold

CHUNK_BYTES = 1 << 20


class SumDeviations(torch.autograd.Function):
    """Sum x - level and its square over the first axis, in the dtype of `level`.

    It saves `source`, which is x as a layer reads it, and saves.

    Shape: x (B, *), source (B, *), level that broadcasts to an x[i] -> (*), (*)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, source: Tensor, level: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        sums: Any = 0
        squares: Any = 0
        for (part,) in split_batch(chunk_size(CHUNK_BYTES, max(x.shape[1:].numel(), 1), x), x):
            y = part.to(level.dtype) - level
            sums, squares = sums + y.sum(0), squares + y.square().sum(0)
        all_reduce(group, sums, squares)
        return sums, squares

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, source, level, ctx.group = inputs
        ctx.save_for_backward(source, level)
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, d_sums: Tensor, d_squares: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives(ctx.group)
        source, level = ctx.saved_tensors
        if ctx.group is not None:
            d_sums, d_squares = d_sums.clone(), d_squares.clone()
            all_reduce(ctx.group, d_sums, d_squares)
        d_x = torch.addcmul(d_sums, source.to(level.dtype) - level, 2 * d_squares)
        return d_x.to(ctx.dtype), None, None, None


def measure_marginals(
    x: Tensor, source: Tensor, window: Window | None, near: Tensor, count: int, group: Any
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each value of the tokens, whose number is `count`, in the dtype of `near`.

    `source` is x as a layer reads it; `near` is close to the means: any value is exact, the means keep digits.

    Shape: x and source (*, C) or (B, C, H, W), near (G, n c) -> (G, n c), (G, n c)
    """
    count = max(count, 1)
    if window is None:
        level, flat = near.detach(), (x.flatten(0, -2), source.flatten(0, -2))
        mean, square = (total / count for total in SumDeviations.apply(*flat, level, group))
        return level + mean, square - mean.square()
    level = near.detach().reshape(x.shape[1], -1).mean(-1)  # (C,)
    sums = SumDeviations.apply(x, source, level.view(-1, 1, 1), group)  # (C, H, W) each
    inside = unfold(torch.ones_like(sums[0][:1]), window)  # (n, positions): 0 where a tap reads outside the map
    taps, positions = inside.shape
    mean, square = (unfold(total * (positions / count), window).mean(-1) for total in sums)  # (C n,)
    level, share = level.repeat_interleave(taps), inside.mean(1).repeat(len(level))
    # a tap has the value y + level inside the map and 0 outside; y is the deviation, 0 outside
    variance = square - mean.square() + level * (1 - share) * (2 * mean + level * share)
    return (mean + level * share).view(near.shape), variance.view(near.shape)


def complete_covariance(covariance: Tensor, part_mean: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return S of the covariance of a part, about its own mean, and the mean and variances of all tokens.

    Shape: (G, C, C), (G, C), (G, C), (G, C) -> (G, C, C)
    """
    gap = part_mean - mean
    covariance = covariance + gap.unsqueeze(-1) * gap.unsqueeze(-2)
    lack = (variance - covariance.diagonal(dim1=-2, dim2=-1)).clamp(min=0)
    return covariance + torch.diag_embed(lack)
