"""The moments of the tokens that a layer reads, from which all BatchNorm statistics of linear chains follow.

Letters: M tokens, G groups (linear maps on disjoint channels) of C channels each.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isomorph.layers.modes import (
    Gradients,
    at_least_float32,
    disable_autocast,
    is_arithmetic_bound,
    is_eager,
    is_functorch_tensor,
    without_autocast,
)
from isomorph.layers.patches import (
    Window,
    apply_to_patches,
    count_tokens,
    is_summed_by_lag,
    measure_patches,
    read_tokens,
    scatter_tokens,
)

# Rounding units by which variances of channels are raised: more than a variance that cancels can
# lack in them.
#
# Without them, units that cancel almost exactly would get a variance of 0 or below, and BatchNorm
# would amplify them.
RIDGE_ULPS = 8


# Smallest width of the blocks of a symmetric product.
NARROWEST_BLOCK = 96


def symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left^T right, known to be symmetric: on a CPU its upper blocks, mirrored, for up to 0.44 less work.

    Shape: (G, M, C) each -> (G, C, C)
    """
    groups, _, width = right.shape
    if (
        width < 2 * NARROWEST_BLOCK
        or groups > 1
        or not is_arithmetic_bound(right)
        or not is_eager()
    ):
        return torch.bmm(left.mT, right)
    # from left: under vmap it is the one that always has a sample axis
    product = left.new_empty(1, width, width)
    spans = [(0, width)]
    while spans:
        start, stop = spans.pop()
        halved = stop - start >= 2 * NARROWEST_BLOCK
        middle = (start + stop) // 2 if halved else stop
        after = middle if halved else start
        block = left[..., start:middle].mT @ right[..., after:stop]
        product[:, start:middle, after:stop] = block
        if halved:
            product[:, middle:stop, start:middle] = block.mT
            spans += [(start, middle), (middle, stop)]
    return product


def sync_group(module: nn.Module) -> Any:
    """Return the processes that share the statistics of a module's BatchNorms, or None."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    for norm in module.modules():
        if isinstance(norm, nn.SyncBatchNorm):
            return norm.process_group or dist.group.WORLD
    return None


class Moments(NamedTuple):
    """Moments of the tokens that a layer reads. Shape: mean (G, C), covariance (G, C, C)

    `source` is the input for the layer, less the mean as if it were a constant if `centred`. Whoever reads the moments
    differentiates for it, by a symmetric gradient of the covariance. `total` counts the tokens of all processes.
    """

    source: Tensor
    mean: Tensor
    covariance: Tensor
    centred: bool
    total: int | Tensor


def _measure_tokens(
    x: Tensor, dtype: torch.dtype, window: Window | None, centring: bool, group: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the input, less its mean if `centring`, the mean and covariance of its tokens.

    In a group of processes also the number of tokens of all of them.
    """
    tokens = read_tokens(x, window)
    work = at_least_float32(x)
    count = tokens.shape[1]
    total = None
    if group is None:
        mean = tokens.mean(1, dtype=work) if count else tokens.sum(1, dtype=work)
    else:
        sums = torch.cat(
            [tokens.sum(1, dtype=work).flatten(), tokens.new_full((1,), count, dtype=work)]
        )
        dist.all_reduce(sums, group=group)
        total = sums[-1:].clamp(min=1)
        mean = (sums[:-1] / total).view(len(tokens), -1)

    # a compiler fuses the cast
    written = torch.empty_like(tokens, dtype=dtype) if is_eager() else None
    centred = torch.sub(tokens, mean.unsqueeze(1), out=written).to(dtype)
    source = scatter_tokens(centred, x.shape, window) if centring else x.view_as(x)
    if dtype != work and not (x.is_cuda or x.is_meta):
        centred = centred.to(work)

    # divided by the same operation
    if total is None and count and centred.dtype == work and not is_arithmetic_bound(x):
        covariance = torch.baddbmm(mean.unsqueeze(1), centred.mT, centred, beta=0, alpha=1 / count)
        return source, mean, covariance, None
    if centred.dtype == work:
        products = symmetric_product(centred, centred)
    else:  # sums in float32 of products in half precision
        products = torch.bmm(centred.mT, centred, out_dtype=work)
    if total is None:
        return source, mean, products / max(count, 1), None
    dist.all_reduce(products, group=group)
    return source, mean, products / total, total


def _can_write_into(gradient: Tensor) -> bool:
    """True if a gradient that nothing else reads may be overwritten: it is contiguous, and nothing is recorded."""
    recorded = torch.is_grad_enabled() or not is_eager() or is_functorch_tensor(gradient)
    return not recorded and gradient.is_contiguous()


class MeasureMoments(torch.autograd.Function):
    """Compute mean and covariance of the tokens of x, centred in `dtype`; also x, minus its mean if `centring`.

    Only that x is saved for backward. The gradient of a token is 2 dS (token - mean) / M + d_mean / M.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, window: Window | None, centring: bool, group: Any
    ) -> tuple[Tensor, ...]:
        by_lag = window is not None and group is None and is_summed_by_lag(x, window)
        work = at_least_float32(x)
        total = None
        if by_lag and window is not None:
            source = x.view_as(x)
            mean, covariance = measure_patches(x.to(work), window)
        else:
            source, mean, covariance, total = _measure_tokens(x, dtype, window, centring, group)
        covariance.diagonal(dim1=1, dim2=2).mul_(1 + RIDGE_ULPS * torch.finfo(work).eps)
        totals = () if total is None else (total,)
        ctx.window = window
        ctx.by_lag = by_lag
        ctx.centring = centring
        ctx.group = group
        ctx.dtype = x.dtype
        ctx.count = count_tokens(x, window)
        ctx.save_for_backward(source, mean, *totals)
        ctx.mark_non_differentiable(*totals)
        return source, mean, covariance, *totals

    @staticmethod
    @without_autocast
    def backward(
        ctx: Any, d_source: Tensor, d_mean: Tensor, d_covariance: Tensor, *_: Any
    ) -> Gradients:
        source, mean, *totals = ctx.saved_tensors
        total = totals[0] if totals else max(ctx.count, 1)
        if _can_write_into(d_source) and ctx.window is None and not totals:
            # in place: the gradient comes from the one linear layer that reads the source, and
            # nothing else holds it
            tokens = source.view(-1, source.shape[-1])
            d_tokens = d_source.view(-1, source.shape[-1])
            d_tokens.addmm_(tokens, d_covariance[0].to(source.dtype), alpha=2 / total)
            d_x = d_source.add_(d_mean[0], alpha=1 / total)
            return d_x.to(ctx.dtype), None, None, None, None

        slope = d_covariance * (2 / total)
        shift = d_mean / total
        if totals:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "statistics shared by several processes have no second derivatives; do not use create_graph=True"
                )
            dist.all_reduce(slope, group=ctx.group)
            dist.all_reduce(shift, group=ctx.group)
        # the source is centred by a constant: that the mean follows from x counts in second
        # derivatives
        level = mean - mean.detach() if ctx.centring else mean
        if not ctx.centring or torch.is_grad_enabled():
            shift = shift - (level.unsqueeze(1) @ slope).squeeze(1)
        if ctx.by_lag:
            d_x = apply_to_patches(source.to(slope.dtype), slope, ctx.window)
            everywhere = shift.unsqueeze(1).expand(-1, ctx.count // len(source), -1)
            d_x = d_x + scatter_tokens(everywhere, source[:1].shape, ctx.window)
            d_x = d_source + d_x.to(d_source.dtype)
        else:
            tokens = read_tokens(source, ctx.window).to(slope.dtype)
            d_tokens = torch.baddbmm(shift.unsqueeze(1), tokens, slope).to(d_source.dtype)
            d_x = d_source + scatter_tokens(d_tokens, d_source.shape, ctx.window)
        return d_x.to(ctx.dtype), None, None, None, None


def check_count(count: int, shape: Sequence[int]) -> None:
    """Raise a ValueError for a single token, as BatchNorm does: it has no variance."""
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {list(shape)}",
        )


def measure_moments(x: Tensor, window: Window | None = None, group: Any = None) -> Moments:
    """Return the moments of what a layer reads, in all processes of `group`: sums in float32 at least.

    Shape: x (*, C), or (B, C, H, W) with the window of a convolution
    Raises: ValueError for a single token, as BatchNorm does: it has no variance.
    """
    count = count_tokens(x, window)
    if group is None:
        check_count(count, x.shape)
    centring = window is None or (window.is_pointwise and window.groups == 1)
    dtype = autocast_dtype(x)
    with disable_autocast(x.device):
        source, mean, covariance, *total = MeasureMoments.apply(x, dtype, window, centring, group)
    return Moments(source, mean, covariance, centring, total[0] if total else count)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which torch computes a linear layer on x: autocast's if enabled, otherwise that of x."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(kind)


def cast_clamped(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a weight, clamped to the range of the new dtype: an overflow to infinity would turn 0 inputs into NaN."""
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(weight.dtype).max:
        weight = weight.clamp(-limit, limit)
    return weight.to(dtype)
