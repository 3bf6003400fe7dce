"""Mean and covariance of the tokens a layer reads: all that BatchNorm after linear layers ever asks about them.

For h = A (x - mean) + c over the tokens of a batch: mean(h) = c and var(h) = diag(A S A^T), S the covariance of x. So
the statistics of every hidden unit of a chain of linear layers follow from (mean, S), in weight space, without h.

Letters: M tokens, C channels, G groups (linear maps on disjoint channels; left out where there is one).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

NARROWEST_STRIP = 96
"""Symmetric products are computed in up to four strips from the diagonal on (0.6 of the work), none narrower."""


ROUNDING = 4
"""Units of rounding of the sum of its terms below which a variance is not known."""


class Moments(NamedTuple):
    """First and second moments of what a layer reads. Shape: mean (G, C), covariance (G, C, C)

    `source` is the input to go on with: less its mean where every position reads whole channels (`offset` None), else
    as it came, with `offset` the mean of what is read of it. `total` is the number of tokens, over all processes where
    these share statistics.
    """

    source: Tensor
    mean: Tensor
    covariance: Tensor
    offset: Tensor | None
    total: int


class Window(NamedTuple):
    """The patches that a convolution reads as its tokens."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def pointwise(self) -> bool:
        return self.kernel_size == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)


def read_tokens(x: Tensor, window: Window | None) -> Tensor:
    """What each output position reads. Shape: x (*, C) -> (M, C), or x (B, C, H, W) -> (M, C k k), (G, M, C k k / G)"""
    if window is None:
        return x.flatten(0, -2)  # (M, C)
    groups = window.groups
    patches = (
        x.flatten(2) if window.pointwise else F.unfold(x, *window[:1], window.dilation, window.padding, window.stride)
    )
    if groups == 1:
        return patches.transpose(1, 2).flatten(0, 1)  # (B L, C k k)
    return patches.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)  # (G, B L, C k k / G)


def _spread_tokens(tokens: Tensor, shape: torch.Size, window: Window | None) -> Tensor:
    """The adjoint of `read_tokens`: every token's values added where they were read. Shape: -> `shape`"""
    if window is None:
        return tokens.view(shape)
    batch, rest = shape[0], tokens.shape[:-2]
    patches = tokens.unflatten(-2, (batch, tokens.shape[-2] // max(batch, 1)))  # (G, B, L, C k k / G)
    patches = patches.permute(1, 0, 3, 2).flatten(1, 2) if rest else patches.transpose(1, 2)  # (B, C k k, L)
    if window.pointwise or not batch:
        return patches.reshape(shape)  # torch's fold takes no empty batch
    return F.fold(patches, shape[-2:], window.kernel_size, window.dilation, window.padding, window.stride)


def _symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """left^T right where that is known to be symmetric: strips from the diagonal on, then mirrored.

    Shape: left, right (M, C) -> (C, C); groups may lead
    """
    width = right.shape[-1]
    step = max(NARROWEST_STRIP, -(-width // 4))
    if step >= width or right.ndim > 2:
        return left.mT @ right
    product = left.new_empty(width, width)  # in vmap it is the left one that is sure to differ by sample
    for start in range(0, width, step):
        stop = min(start + step, width)
        strip = left[:, start:stop].mT @ right[:, start:]
        product[start:stop, start:] = strip
        product[stop:, start:stop] = strip[:, stop - start :].mT
    return product


def _scale_by(gradient: Tensor, factor: Any) -> Tensor:
    """The product, in place where no second derivative is to be taken."""
    return gradient * factor if torch.is_grad_enabled() else gradient.mul_(factor)


def _sum_over(group: Any, *tensors: Tensor) -> None:
    """Sums over the processes of a group, in place. None: this process alone."""
    if group is not None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)


class Measure(torch.autograd.Function):
    """x -> x (less its mean, in the type `centred_as`, if any), mean and covariance of its tokens; keeps only that x.

    Backwards, with K = (dS + dS^T) / M, every token gets (token - mean) K + d_mean / M.

    Shape: x (*, C) or (B, C, H, W) -> as x, (G, C), (G, C, C)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, window: Window | None, centred_as: torch.dtype | None, count: int, group: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens = read_tokens(x, window).to(torch.promote_types(x.dtype, torch.float32))
        mean = tokens.sum(-2) / count
        _sum_over(group, mean)
        centred = tokens - mean.unsqueeze(-2)
        covariance = _symmetric_product(centred, centred).div_(count)
        _sum_over(group, covariance)
        source = _spread_tokens(centred, x.shape, window).to(centred_as) if centred_as else x.view_as(x)
        return source, mean, covariance

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, ctx.window, centred_as, ctx.count, ctx.group = inputs
        ctx.save_for_backward(*output[:2])
        ctx.centring, ctx.dtype = bool(centred_as), x.dtype

    @staticmethod
    def backward(ctx: Any, d_source: Tensor, d_mean: Tensor, d_covariance: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.group is not None and torch.is_grad_enabled():
            raise RuntimeError("statistics that several processes share have first derivatives only")
        source, mean = ctx.saved_tensors
        slope = (d_covariance + d_covariance.mT) / ctx.count  # (G, C, C)
        tokens = read_tokens(source, ctx.window).to(slope.dtype)
        if ctx.centring:
            d_mean = d_mean - read_tokens(d_source, ctx.window).to(slope.dtype).sum(-2)
        shift = d_mean / ctx.count
        _sum_over(ctx.group, shift, slope)
        if not ctx.centring:
            shift = shift - (mean.unsqueeze(-2) @ slope).squeeze(-2)
        d_tokens = (torch.addmm if tokens.ndim == 2 else torch.baddbmm)(shift.unsqueeze(-2), tokens, slope)
        d_x = d_source.to(ctx.dtype) + _spread_tokens(d_tokens, source.shape, ctx.window).to(ctx.dtype)
        return d_x, None, None, None, None


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Statistics and weight-space products are computed as they are written, under autocast too."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def measure(x: Tensor, window: Window | None = None, group: Any = None) -> Moments:
    """Mean and covariance of what a layer reads, in float32 at least, over the processes of `group` where one is given.

    Shape: x (*, C), or (B, C, H, W) with the window of a convolution

    Raises: ValueError for a single token, as BatchNorm does: it has no variance.
    """
    count = _count_tokens(x, window)
    if group is not None:
        counts = torch.tensor([count], device=x.device)
        _sum_over(group, counts)
        count = int(counts.item())
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
    centred_as = product_dtype(x) if window is None or (window.pointwise and window.groups == 1) else None
    with full_precision(x.device):
        source, mean, covariance = Measure.apply(x, window, centred_as, max(count, 1), group)  # no tokens: all zero
    return Moments(source, mean, covariance, None if centred_as else mean, count)


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which a linear layer on x is computed: autocast's, or that of x."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(kind)


def within_range(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in another type, at its largest number where it would overflow: infinity times 0 is no number."""
    limit = torch.finfo(dtype).max
    return (weight if limit >= torch.finfo(weight.dtype).max else weight.clamp(-limit, limit)).to(dtype)


def _count_tokens(x: Tensor, window: Window | None) -> int:
    """M, the tokens of `read_tokens`."""
    if window is None:
        return x.shape[:-1].numel()
    places = 1
    for size, k, s, p, d in zip(x.shape[-2:], *window[:4], strict=True):
        places *= (size + 2 * p - d * (k - 1) - 1) // s + 1
    return x.shape[0] * places


class RowVariance(torch.autograd.Function):
    """diag(A S A^T), keeping A and S only: A S is one small product away.

    Never below what rounding makes of it, a few units of diag(A diag(S) A^T): channels that cancel almost wholly would
    else come out as 0 and be blown up. Such a row is held there, and has no gradient.

    Shape: weight A (G, out, C), covariance S (G, C, C) -> (G, out), and which are known
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        variance = (weight @ covariance).mul_(weight).sum(-1)  # (G, out)
        spread = covariance.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # (G, C, 1)
        floor = (weight.square() @ spread).squeeze(-1).mul_(ROUNDING * torch.finfo(weight.dtype).eps)
        return torch.maximum(variance, floor), variance >= floor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, Tensor | None]:
        weight, covariance, known = ctx.saved_tensors
        scaled = weight * (grad * known).unsqueeze(-1)  # (G, out, C)
        d_weight = _scale_by(scaled @ covariance, 2) if ctx.needs_input_grad[0] else None
        d_covariance = _symmetric_product(scaled, weight) if ctx.needs_input_grad[1] else None
        return d_weight, d_covariance


class ScaledProduct(torch.autograd.Function):
    """(W diag(scale)) A, keeping W, scale and A only.

    Shape: W (G, out, hidden), scale (G, hidden), A (G, hidden, C) -> (G, out, C)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, scale: Tensor, inner: Tensor) -> Tensor:
        return (weight * scale.unsqueeze(-2)) @ inner

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, scale, inner = ctx.saved_tensors
        d_inner = (weight * scale.unsqueeze(-2)).mT @ grad
        d_weight = grad @ inner.mT  # of W diag(scale)
        d_scale = (d_weight * weight).sum(-2)
        return _scale_by(d_weight, scale.unsqueeze(-2)), d_scale, d_inner


def row_variance(weight: Tensor, covariance: Tensor) -> Tensor:
    """Variance of every output of a linear layer over the batch. Shape: (G, out, C), (G, C, C) -> (G, out)"""
    return RowVariance.apply(weight, covariance)[0]


def scaled_product(weight: Tensor, scale: Tensor, inner: Tensor) -> Tensor:
    """(W diag(scale)) A. Shape: (G, out, hidden), (G, hidden), (G, hidden, C) -> (G, out, C)"""
    return ScaledProduct.apply(weight, scale, inner)
