"""Mean and covariance of the tokens that a layer reads, from which all BatchNorm statistics of linear chains follow.

For h = A (x - mean) + c over the tokens of a batch: mean(h) = c and var(h) = diag(A S A^T), with S the covariance of x.
So the statistics of every hidden unit of a chain of linear layers follow from (mean, S), without computing h.

Letters: M tokens, C channels, G groups (linear maps on disjoint channels; left out where there is one).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

MIN_STRIP_WIDTH = 96
"""Narrowest strip of a symmetric product, which is computed in up to four strips to save 0.4 of the work."""

VARIANCE_FLOOR_ULPS = 4
"""Smallest variance that can be told from 0, in rounding units of the sum of its terms."""


class Moments(NamedTuple):
    """First and second moments of the tokens that a layer reads. Shape: mean (G, C), covariance (G, C, C)

    `source` is the input for the layer. If every position reads whole channels, the mean is subtracted from it and
    `offset` is None; otherwise it is unchanged and `offset` is the mean. `total` is the number of tokens, over all
    processes if these share statistics.
    """

    source: Tensor
    mean: Tensor
    covariance: Tensor
    offset: Tensor | None
    total: int


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


def read_tokens(x: Tensor, window: Window | None) -> Tensor:
    """Return the inputs of each output position as tokens.

    Shape: x (*, C) -> (M, C); with a window x (B, C, H, W) -> (M, C k k), or (G, M, C k k / G) with groups
    """
    if window is None:
        return x.flatten(0, -2)  # (M, C)
    groups = window.groups
    patches = (
        x.flatten(2)
        if window.is_pointwise
        else F.unfold(x, *window[:1], window.dilation, window.padding, window.stride)
    )
    if groups == 1:
        return patches.transpose(1, 2).flatten(0, 1)  # (B L, C k k)
    return patches.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)  # (G, B L, C k k / G)


def _scatter_tokens(tokens: Tensor, shape: torch.Size, window: Window | None) -> Tensor:
    """Add every token's values where they were read: the adjoint of `read_tokens`. Shape: -> `shape`"""
    if window is None:
        return tokens.view(shape)
    batch, rest = shape[0], tokens.shape[:-2]
    patches = tokens.unflatten(-2, (batch, tokens.shape[-2] // max(batch, 1)))  # (G, B, L, C k k / G)
    patches = patches.permute(1, 0, 3, 2).flatten(1, 2) if rest else patches.transpose(1, 2)  # (B, C k k, L)
    if window.is_pointwise or not batch:
        return patches.reshape(shape)  # torch's fold does not accept an empty batch
    return F.fold(patches, shape[-2:], window.kernel_size, window.dilation, window.padding, window.stride)


def _symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left^T right, known to be symmetric: compute strips right of the diagonal and mirror them.

    Shape: left, right (M, C) -> (C, C); groups may lead
    """
    width = right.shape[-1]
    step = max(MIN_STRIP_WIDTH, -(-width // 4))
    if step >= width or right.ndim > 2:
        return left.mT @ right
    product = left.new_empty(width, width)  # from left: under vmap it is the one that always has a sample axis
    for start in range(0, width, step):
        stop = min(start + step, width)
        strip = left[:, start:stop].mT @ right[:, start:]
        product[start:stop, start:] = strip
        product[stop:, start:stop] = strip[:, stop - start :].mT
    return product


def _scale_by(gradient: Tensor, factor: Any) -> Tensor:
    """Return the product, computed in place unless a second derivative may be needed."""
    return gradient * factor if torch.is_grad_enabled() else gradient.mul_(factor)


def _all_reduce(group: Any, *tensors: Tensor) -> None:
    """Sum tensors over the processes of a group, in place; None stands for this process alone."""
    if group is not None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)


class MeasureMoments(torch.autograd.Function):
    """Compute mean and covariance of the tokens of x; if `centred_as` is a dtype, also x minus its mean in that dtype.

    Only that x is saved for backward. With K = (dS + dS^T) / M, the gradient of a token is (token - mean) K + d_mean /
    M.

    Shape: x (*, C) or (B, C, H, W) -> as x, (G, C), (G, C, C)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, window: Window | None, centred_as: torch.dtype | None, count: int, group: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens = read_tokens(x, window).to(torch.promote_types(x.dtype, torch.float32))
        mean = tokens.sum(-2) / count
        _all_reduce(group, mean)
        centred = tokens - mean.unsqueeze(-2)
        covariance = _symmetric_product(centred, centred).div_(count)
        _all_reduce(group, covariance)
        source = _scatter_tokens(centred, x.shape, window).to(centred_as) if centred_as else x.view_as(x)
        return source, mean, covariance

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, ctx.window, centred_as, ctx.count, ctx.group = inputs
        ctx.save_for_backward(*output[:2])
        ctx.centring, ctx.dtype = bool(centred_as), x.dtype

    @staticmethod
    def backward(ctx: Any, d_source: Tensor, d_mean: Tensor, d_covariance: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.group is not None and torch.is_grad_enabled():
            raise RuntimeError(
                "statistics shared by several processes have no second derivatives; do not use create_graph=True"
            )
        source, mean = ctx.saved_tensors
        slope = (d_covariance + d_covariance.mT) / ctx.count  # (G, C, C)
        tokens = read_tokens(source, ctx.window).to(slope.dtype)
        if ctx.centring:
            d_mean = d_mean - read_tokens(d_source, ctx.window).to(slope.dtype).sum(-2)
        shift = d_mean / ctx.count
        _all_reduce(ctx.group, shift, slope)
        if not ctx.centring:
            shift = shift - (mean.unsqueeze(-2) @ slope).squeeze(-2)
        d_tokens = (torch.addmm if tokens.ndim == 2 else torch.baddbmm)(shift.unsqueeze(-2), tokens, slope)
        d_x = d_source.to(ctx.dtype) + _scatter_tokens(d_tokens, source.shape, ctx.window).to(ctx.dtype)
        return d_x, None, None, None, None


def disable_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast: statistics and products of weights keep the dtype of their inputs."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def measure_moments(x: Tensor, window: Window | None = None, group: Any = None) -> Moments:
    """Return the mean and covariance of what a layer reads, in float32 at least.

    They are taken over the processes of `group` if it is given.

    Shape: x (*, C), or (B, C, H, W) with the window of a convolution
    Raises: ValueError for a single token, as BatchNorm does: it has no variance.
    """
    count = _count_tokens(x, window)
    if group is not None:
        counts = torch.tensor([count], device=x.device)
        _all_reduce(group, counts)
        count = int(counts.item())
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
    centred_as = autocast_dtype(x) if window is None or (window.is_pointwise and window.groups == 1) else None
    with disable_autocast(x.device):
        source, mean, covariance = MeasureMoments.apply(
            x, window, centred_as, max(count, 1), group
        )  # max: no tokens give zeros
    return Moments(source, mean, covariance, None if centred_as else mean, count)


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


def _count_tokens(x: Tensor, window: Window | None) -> int:
    """Return the number of tokens that `read_tokens` gives."""
    if window is None:
        return x.shape[:-1].numel()
    positions = 1
    for size, k, s, p, d in zip(x.shape[-2:], *window[:4], strict=True):
        positions *= (size + 2 * p - d * (k - 1) - 1) // s + 1
    return x.shape[0] * positions


class _RowVariance(torch.autograd.Function):
    """Compute diag(A S A^T), saving only A and S: A S is recomputed with one small product.

    The result is at least a few rounding units of diag(A diag(S) A^T). Without that floor, channels that cancel almost
    exactly would get variance 0, and BatchNorm would amplify them. A row at the floor gets no gradient.

    Shape: weight A (G, out, C), covariance S (G, C, C) -> variance (G, out), and a mask of the rows above the floor
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        variance = (weight @ covariance).mul_(weight).sum(-1)  # (G, out)
        spread = covariance.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # (G, C, 1)
        floor = (weight.square() @ spread).squeeze(-1).mul_(VARIANCE_FLOOR_ULPS * torch.finfo(weight.dtype).eps)
        return torch.maximum(variance, floor), variance >= floor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, Tensor | None]:
        weight, covariance, above_floor = ctx.saved_tensors
        scaled = weight * (grad * above_floor).unsqueeze(-1)  # (G, out, C)
        d_weight = _scale_by(scaled @ covariance, 2) if ctx.needs_input_grad[0] else None
        d_covariance = _symmetric_product(scaled, weight) if ctx.needs_input_grad[1] else None
        return d_weight, d_covariance


class _ScaledProduct(torch.autograd.Function):
    """Compute (W diag(scale)) A, saving only W, scale and A.

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
    """Return the variance of every output of a linear layer over the batch.

    Shape: weight (G, out, C), covariance (G, C, C) -> (G, out)
    """
    return _RowVariance.apply(weight, covariance)[0]


def scaled_product(weight: Tensor, scale: Tensor, inner: Tensor) -> Tensor:
    """Return (W diag(scale)) A. Shape: (G, out, hidden), (G, hidden), (G, hidden, C) -> (G, out, C)"""
    return _ScaledProduct.apply(weight, scale, inner)
