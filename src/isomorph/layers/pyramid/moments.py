"""The tokens that a layer reads, and their moments, from which all BatchNorm statistics of linear chains follow.

Letters: M tokens, G groups (linear maps on disjoint channels) of C channels each.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.layers.modes import can_write_into, disable_autocast, is_eager, on_cpu, without_autocast

# Rounding units by which variances of channels are raised: more than a variance that cancels can lack in them.
#
# Without them, units that cancel almost exactly would get a variance of 0 or below, and BatchNorm would amplify them.
RIDGE_ULPS = 8


class Window(NamedTuple):
    """The window of a convolution: the patches that it reads as its tokens."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def is_pointwise(self) -> bool:
        """True for a 1x1 convolution without stride and padding, whose patches are the positions themselves."""
        return self.kernel_size == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)

    def output_size(self, x: Tensor) -> tuple[int, int]:
        sizes = zip(x.shape[-2:], *self[:4], strict=True)
        height, width = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        return height, width

    def unfold(self, x: Tensor) -> Tensor:
        """Return patches. Shape: (B, C, H, W) -> (B, C k k, L), or without B"""
        return F.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)


def saves_work(x: Tensor) -> bool:
    """True where arithmetic is what takes the time: on a CPU, and on the meta device, on which it is counted."""
    return on_cpu(x) or x.is_meta


def read_tokens(x: Tensor, window: Window | None) -> Tensor:
    """Shape: x (*, C) -> (1, M, C); with a window x (B, C, H, W) -> (G, M, C k k / G)"""
    if window is None:
        return x.flatten(0, -2).unsqueeze(0)
    patches = x.flatten(2) if window.is_pointwise else window.unfold(x)
    return patches.permute(1, 0, 2).flatten(1).unflatten(0, (window.groups, -1)).mT


def scatter_tokens(tokens: Tensor, shape: torch.Size, window: Window | None) -> Tensor:
    """Add every token's values where they were read: the adjoint of `read_tokens`."""
    if window is None:
        return tokens.view(shape)
    patches = tokens.mT.flatten(0, 1).unflatten(1, (shape[0], -1 if shape[0] else 0)).permute(1, 0, 2)  # (B, C k k, L)
    if window.is_pointwise or not shape[0]:
        return patches.reshape(shape)  # torch's fold does not accept an empty batch
    return F.fold(patches, shape[-2:], window.kernel_size, window.dilation, window.padding, window.stride)


def count_tokens(x: Tensor, window: Window | None) -> int:
    """Return the number of tokens that `read_tokens` gives in each group."""
    return x.shape[:-1].numel() if window is None else len(x) * math.prod(window.output_size(x))


# Smallest width of the blocks of a symmetric product.
NARROWEST_BLOCK = 96


def symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left^T right, known to be symmetric: on a CPU its upper blocks, mirrored, for up to 0.44 less work.

    Shape: (G, M, C) each -> (G, C, C)
    """
    groups, _, width = right.shape
    if width < 2 * NARROWEST_BLOCK or groups > 1 or not saves_work(right) or not is_eager():
        return torch.bmm(left.mT, right)
    product = left.new_empty(1, width, width)  # from left: under vmap it is the one that always has a sample axis
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
    norms = (m for m in module.modules() if isinstance(m, nn.SyncBatchNorm))
    return next((norm.process_group or dist.group.WORLD for norm in norms), None)


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


class MeasureMoments(torch.autograd.Function):
    """Compute mean and covariance of the tokens of x, centred in `dtype`; also x, minus its mean if `centring`.

    Only that x is saved for backward. The gradient of a token is 2 dS (token - mean) / M + d_mean / M.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, window: Window | None, centring: bool, group: Any
    ) -> tuple[Tensor, ...]:
        tokens, work = read_tokens(x, window), torch.promote_types(x.dtype, torch.float32)
        count, total = tokens.shape[1], None
        if group is None:
            mean = tokens.mean(1, dtype=work) if count else tokens.sum(1, dtype=work)
        else:
            sums = torch.cat([tokens.sum(1, dtype=work).flatten(), tokens.new_full((1,), count, dtype=work)])
            dist.all_reduce(sums, group=group)
            total = sums[-1:].clamp(min=1)
            mean = (sums[:-1] / total).view(len(tokens), -1)
        written = torch.empty_like(tokens, dtype=dtype) if is_eager() else None  # a compiler fuses the cast
        centred = torch.sub(tokens, mean.unsqueeze(1), out=written).to(dtype)
        source = scatter_tokens(centred, x.shape, window) if centring else x.view_as(x)
        if dtype != work and not (x.is_cuda or x.is_meta):
            centred = centred.to(work)
        if total is None and count and centred.dtype == work and not saves_work(x):  # divided by the same operation
            covariance = torch.baddbmm(mean.unsqueeze(1), centred.mT, centred, beta=0, alpha=1 / count)
        else:
            covariance = (
                symmetric_product(centred, centred)
                if centred.dtype == work
                else torch.bmm(centred.mT, centred, out_dtype=work)  # sums in float32 of products in half precision
            )
            if total is not None:
                dist.all_reduce(covariance, group=group)
            covariance = covariance / (max(count, 1) if total is None else total)
        covariance.diagonal(dim1=1, dim2=2).mul_(1 + RIDGE_ULPS * torch.finfo(work).eps)
        ctx.window, ctx.centring, ctx.count, ctx.group, ctx.dtype = window, centring, count, group, x.dtype
        numbers = () if total is None else (total,)
        ctx.save_for_backward(source, mean, *numbers)
        ctx.mark_non_differentiable(*numbers)
        return source, mean, covariance, *numbers

    @staticmethod
    @without_autocast
    def backward(
        ctx: Any, d_source: Tensor, d_mean: Tensor, d_covariance: Tensor, *_: Any
    ) -> tuple[Tensor | None, ...]:
        source, mean, *numbers = ctx.saved_tensors
        number = numbers[0] if numbers else max(ctx.count, 1)
        if can_write_into(d_source) and ctx.window is None and not numbers:
            # in place: the gradient comes from the one linear layer that reads the source, and nothing else holds it
            rows = d_source.view(-1, source.shape[-1]), source.view(-1, source.shape[-1])
            rows[0].addmm_(rows[1], d_covariance[0].to(source.dtype), alpha=2 / number)
            return d_source.add_(d_mean[0], alpha=1 / number).to(ctx.dtype), None, None, None, None
        slope, shift = d_covariance * (2 / number), d_mean / number
        if numbers:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "statistics shared by several processes have no second derivatives; do not use create_graph=True"
                )
            dist.all_reduce(slope, group=ctx.group)
            dist.all_reduce(shift, group=ctx.group)
        # the source is centred by a constant: that the mean follows from x counts in second derivatives
        level = mean - mean.detach() if ctx.centring else mean
        if not ctx.centring or torch.is_grad_enabled():
            shift = shift - (level.unsqueeze(1) @ slope).squeeze(1)
        tokens = read_tokens(source, ctx.window).to(slope.dtype)
        d_tokens = torch.baddbmm(shift.unsqueeze(1), tokens, slope).to(d_source.dtype)
        d_x = d_source + scatter_tokens(d_tokens, d_source.shape, ctx.window)
        return d_x.to(ctx.dtype), None, None, None, None


def measure_moments(x: Tensor, window: Window | None = None, group: Any = None) -> Moments:
    """Return the moments of what a layer reads, in all processes of `group`: sums in float32 at least.

    Shape: x (*, C), or (B, C, H, W) with the window of a convolution
    Raises: ValueError for a single token, as BatchNorm does: it has no variance.
    """
    count = count_tokens(x, window)
    if count == 1 and group is None:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
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
    return (weight if limit >= torch.finfo(weight.dtype).max else weight.clamp(-limit, limit)).to(dtype)
