"""Mean and covariance of the tokens that a layer reads, from which all BatchNorm statistics of linear chains follow.

For h = A (x - mean) + c over the tokens of a batch: mean(h) = c and var(h) = diag(A S A^T), with S the covariance of x.
So the statistics of every hidden unit of a chain of linear layers follow from (mean, S), without computing h.

The covariance may be measured on a part of the tokens, which costs less; the mean and variance of each channel are
always measured on all tokens (layers/marginals.py).

Letters: M tokens, C channels, G groups (linear maps on disjoint channels; left out where there is one).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isomorph.layers.gradients import can_write_into
from isomorph.layers.marginals import complete_covariance, measure_marginals
from isomorph.layers.patch_moments import has_patch_moments, measure_patches
from isomorph.layers.processes import all_reduce, check_first_derivatives
from isomorph.layers.tokens import Window, count_tokens, draw_tokens, read_tokens, scatter_tokens
from isomorph.layers.weight_products import symmetric_product


class Moments(NamedTuple):
    """First and second moments of the tokens that a layer reads. Shape: mean (G, C), covariance (G, C, C)

    `source` is the input for the layer. If every position reads whole channels and the covariance is measured on all
    tokens, the mean is subtracted from it and `offset` is None; otherwise it is unchanged and `offset` is the mean.
    `total` is the number of tokens, over all processes if these share statistics.
    """

    source: Tensor
    mean: Tensor
    covariance: Tensor
    offset: Tensor | None
    total: int


class _Reading(NamedTuple):
    """How moments are measured: a convolution's window, whether to centre the source, measured tokens, processes."""

    window: Window | None
    centring: bool
    measured: int
    group: Any


def _select_tokens(x: Tensor, window: Window | None, drawn: Tensor | None) -> Tensor:
    """Return the drawn tokens of x, or all of them, in float32 at least. Shape: -> (G, n, C)"""
    tokens = read_tokens(x, window)
    tokens = tokens if drawn is None else tokens.index_select(-2, drawn)
    return tokens.to(torch.promote_types(x.dtype, torch.float32))


class MeasureMoments(torch.autograd.Function):
    """Compute mean and covariance of the tokens of x, or of those drawn; also x as `dtype`, minus its mean if centring.

    Only that x is saved for backward. With K = (dS + dS^T) / M, the gradient of a token is (token - mean) K + d_mean /
    M, for the tokens that the moments are of.

    Shape: x (*, C) or (B, C, H, W), drawn (n,) -> as x, (G, C), (G, C, C)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, drawn: Tensor | None, dtype: torch.dtype, reading: _Reading
    ) -> tuple[Tensor, Tensor, Tensor]:
        window, centring, count, group = reading
        tokens = _select_tokens(x, window, drawn)
        mean = tokens.sum(-2) / count
        all_reduce(group, mean)
        centred = tokens - mean.unsqueeze(-2)
        covariance = symmetric_product([centred], [centred]).div_(count)
        all_reduce(group, covariance)
        source = scatter_tokens(centred, x.shape, window) if centring else x.view_as(x)
        return source.to(dtype), mean, covariance

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, drawn, _, ctx.reading = inputs
        ctx.save_for_backward(*output[:2], drawn)
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, d_source: Tensor, d_mean: Tensor, d_covariance: Tensor) -> tuple[Tensor | None, ...]:
        window, centring, count, group = ctx.reading
        check_first_derivatives(group)
        source, mean, drawn = ctx.saved_tensors
        slope = (d_covariance + d_covariance.mT) / count  # (G, C, C)
        tokens = _select_tokens(source, window, drawn).to(slope.dtype)
        if centring:
            d_mean = d_mean - read_tokens(d_source, window).to(slope.dtype).sum(-2)
        shift = d_mean / count
        all_reduce(group, shift, slope)
        if not centring:
            shift = shift - (mean.unsqueeze(-2) @ slope).squeeze(-2)
        d_x = _add_token_gradients(d_source.to(ctx.dtype), tokens, slope, shift.unsqueeze(-2), window, drawn)
        return d_x, None, None, None


def _add_token_gradients(
    d_x: Tensor, tokens: Tensor, slope: Tensor, shift: Tensor, window: Window | None, drawn: Tensor | None
) -> Tensor:
    """Return d_x plus the gradient, tokens K + shift, of the tokens that the moments are of.

    In place where possible: d_x comes from the one linear layer that reads the source, and nothing else holds it.

    Shape: d_x as x, tokens (G, n, C), slope K (G, C, C), shift (G, 1, C) -> as x
    """
    in_place = can_write_into(d_x) and window is None and d_x.dtype == slope.dtype
    if in_place and drawn is None:
        d_x.view(tokens.shape).addmm_(tokens, slope).add_(shift)
        return d_x
    d_tokens = (torch.addmm if tokens.ndim == 2 else torch.baddbmm)(shift, tokens, slope).to(d_x.dtype)
    if in_place and drawn is not None:
        d_x.view(-1, d_x.shape[-1]).index_add_(0, drawn, d_tokens)
        return d_x
    if drawn is not None:
        count = count_tokens(d_x, window)
        every = d_tokens.new_zeros((*d_tokens.shape[:-2], count, d_tokens.shape[-1]))
        d_tokens = every.index_add(-2, drawn, d_tokens)
    return d_x + scatter_tokens(d_tokens, d_x.shape, window)


def disable_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast: statistics and products of weights keep the dtype of their inputs."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def measure_moments(x: Tensor, window: Window | None = None, group: Any = None, part: float = 1.0) -> Moments:
    """Return the mean and covariance of what a layer reads, in float32 at least.

    With `part` below 1 the covariance is measured on a random part: of the images where patches overlap, otherwise of
    the tokens. Moments are those of all processes of `group` if it is given.

    Shape: x (*, C), or (B, C, H, W) with the window of a convolution
    Raises: ValueError for a single token, as BatchNorm does: it has no variance.
    """
    read, drawn = _draw_part(x, window, part)
    total, count = count_tokens(x, window), count_tokens(read, window) if drawn is None else len(drawn)
    if group is not None:
        counts = torch.tensor([total, count], device=x.device)
        all_reduce(group, counts)
        total, count = counts.tolist()
    if total == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
    reads_channels = window is None or (window.is_pointwise and window.groups == 1)
    dtype = autocast_dtype(x) if reads_channels else x.dtype
    with disable_autocast(x.device):
        source, centring = x, False
        if window is not None and has_patch_moments(window, x.shape[1]) and drawn is None and group is None:
            mean, covariance = measure_patches(read, window)
        else:
            centring = reads_channels and drawn is None
            reading = _Reading(window, centring, max(count, 1), group)  # at least 1: an empty batch gives zeros
            measured, mean, covariance = MeasureMoments.apply(read, drawn, dtype, reading)
            source = measured if read is x else x
        if part < 1:
            part_mean = mean
            source, mean, variance = measure_marginals(x, source, window, mean, total, group)
            covariance = complete_covariance(covariance, part_mean, mean, variance, total / max(count, 1))
    return Moments(source, mean, covariance, None if centring else mean, total)


def _draw_part(x: Tensor, window: Window | None, part: float) -> tuple[Tensor, Tensor | None]:
    """Draw images where patches overlap, as moments cost least on whole maps; otherwise tokens. Return x and indices.

    Shape: -> (b, C, H, W), None or as x, (n,)
    """
    if part >= 1:
        return x, None
    if window is not None and window.overlaps:
        return x.index_select(0, draw_tokens(len(x), part, x.device)), None
    return x, draw_tokens(count_tokens(x, window), part, x.device)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which torch computes a linear layer on x: autocast's if enabled, otherwise that of x."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(kind)


def cast_clamped(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a weight, clamped to the range of the new dtype: an overflow to infinity would turn 0 inputs into NaN."""
    limit = torch.finfo(dtype).max
    return (weight if limit >= torch.finfo(weight.dtype).max else weight.clamp(-limit, limit)).to(dtype)
