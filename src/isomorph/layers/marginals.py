"""Mean and variance of each value over all tokens, which correct a covariance that is measured on a part of them.

A value is one entry of a token: a channel, or one tap of a channel in a patch. ReLU leaves some channels zero in all
but a few images. If a part T of the tokens has none of these images, the variance of such a channel in T is 0, and
BatchNorm would multiply its values in the other tokens by 1 / sqrt(eps). With the mean m and the variance v_i of each
value over all tokens, the covariance is therefore

    S = D S_T D + diag(v - diag(D S_T D)),    S_T = mean over T of (x - m)(x - m)^T,
    D_ii = sqrt(min(M / N, v_i / (S_T)_ii))

so that S_ii = v_i. Only the correlations of different values come from T. No value can vary more in T than M / N times
as much as over all tokens; one that varies less than N / M times as much is scaled by M / N only, and the variance that
is then missing is added to the diagonal, as if it were independent of the other values. A sum of several values can
still have too small a variance.

Letters: M tokens, N of them in T, n taps of a patch, G groups of c channels, C = G c. Axes of size 1 for n and G are
left out.
"""

import math
from typing import Any

import torch
from torch import Tensor

from isomorph.layers.chunked import chunk_size, split_batch
from isomorph.layers.gradients import can_write_into
from isomorph.layers.processes import all_reduce, check_first_derivatives
from isomorph.layers.tokens import Window

_CHUNK_BYTES = 2 << 20


class _SumDeviations(torch.autograd.Function):
    """Sum x - level and its square over the first axis, in the dtype of `level`; also return `source`.

    `source` is x as a layer reads it, in that layer's dtype. Only `source` and `level` are saved. The gradient of the
    sums is added to that of `source`, in its dtype, so the layer must read the returned `source`.

    Shape: x (B, *), source (B, *), level (*) or a shape that broadcasts to it -> (B, *), (*), (*)
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
        check_first_derivatives(ctx.group)
        source, level = ctx.saved_tensors
        slope, shift = 2 * d_squares, d_sums.clone()
        all_reduce(ctx.group, slope, shift)
        if not can_write_into(d_source):
            d_x = torch.addcmul(shift, source.to(level.dtype) - level, slope)
            return None, d_source + d_x.to(d_source.dtype), None, None
        for d_part, part in split_batch(_chunk_size(source), d_source, source):
            d_part.add_(torch.addcmul(shift, part.to(level.dtype) - level, slope))
        return None, d_source, None, None


def _chunk_size(x: Tensor) -> int:
    return chunk_size(_CHUNK_BYTES, max(x.shape[1:].numel(), 1), x)


def measure_marginals(
    x: Tensor, source: Tensor, window: Window | None, near: Tensor, count: int, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `source` for the layer to read, and the mean and variance of each value over the tokens of x.

    `source` is x in the dtype of the layer. `near` is subtracted before squaring, to avoid cancellation; it should be
    close to the means, and does not change the result. `count` is the number of tokens.

    Shape: x and source (*, C) or (B, C, H, W), near (G, n c) -> as x, (G, n c), (G, n c), in the dtype of `near`
    """
    count, near = max(count, 1), near.detach()
    if window is None:
        flat, *sums = _SumDeviations.apply(x.detach().flatten(0, -2), source.flatten(0, -2), near, group)
        mean, square = (each / count for each in sums)
        return flat.view(source.shape), near + mean, square - mean.square()
    rows, columns = (mask.to(near.dtype) for mask in window.line_masks(x))
    # the share of positions at which a tap is inside the map, (n,), and the mean of the values there, (C,)
    inside = rows.sum(1).outer(columns.sum(1)).flatten() / math.prod(window.output_size(x))
    level = near.reshape(x.shape[1], -1).sum(-1) / inside.sum().clamp(min=0.5 / count)
    source, *sums = _SumDeviations.apply(x.detach(), source, level.view(-1, 1, 1), group)  # sums (C, H, W)
    mean, square = (torch.einsum("ah,chw,bw->cab", rows, each, columns).flatten() / count for each in sums)  # (C n,)
    level, share = level.repeat_interleave(len(inside)), inside.repeat(len(level))
    # a tap reads y + level inside the map and 0 outside; mean and square count y as 0 outside
    variance = square - mean.square() + level * (1 - share) * (2 * mean + level * share)
    return source, (mean + level * share).view(near.shape), variance.view(near.shape)


class _Rescale(torch.autograd.Function):
    """Compute D (C + g g^T) D with the diagonal replaced by v, saving only the result, which its reader saves too.

    Shape: covariance C (G, n c, n c), gap g, scale diag(D) and variance v (G, n c) each -> (G, n c, n c)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(covariance: Tensor, gap: Tensor, scale: Tensor, variance: Tensor) -> Tensor:
        covariance = covariance + gap.unsqueeze(-1) * gap.unsqueeze(-2)
        scaled = scale.unsqueeze(-1) * covariance * scale.unsqueeze(-2)
        return scaled + torch.diag_embed(variance - scaled.diagonal(dim1=-2, dim2=-1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, gap, scale, _ = inputs
        ctx.save_for_backward(output, gap, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        rescaled, gap, scale = ctx.saved_tensors
        d_variance = grad.diagonal(dim1=-2, dim2=-1)
        grad = grad - torch.diag_embed(d_variance)
        d_scale = ((grad * rescaled).sum(-1) + (grad * rescaled).sum(-2)) / scale
        grad = scale.unsqueeze(-1) * grad * scale.unsqueeze(-2)
        d_gap = (grad @ gap.unsqueeze(-1)).squeeze(-1) + (gap.unsqueeze(-2) @ grad).squeeze(-2)
        return grad, d_gap, d_scale, d_variance


def complete_covariance(covariance: Tensor, part_mean: Tensor, mean: Tensor, variance: Tensor, limit: float) -> Tensor:
    """Return S of the module docstring from covariance and mean of the part, and mean and variance of all tokens.

    `limit` is M / N.

    Shape: (G, n c, n c), (G, n c), (G, n c), (G, n c) -> (G, n c, n c)
    """
    gap, variance = part_mean - mean, variance.clamp(min=0)
    own = covariance.diagonal(dim1=-2, dim2=-1) + gap.square()
    enough = limit * own > variance  # so the divisor is above 0
    ratio = (variance / torch.where(enough, own, 1.0)).clamp(min=torch.finfo(own.dtype).eps)
    scale = torch.where(enough, ratio.sqrt(), math.sqrt(limit))  # D
    return _Rescale.apply(covariance, gap, scale, variance)
