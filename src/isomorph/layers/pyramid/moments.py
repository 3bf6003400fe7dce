"""Mean and covariance of the tokens that a layer reads, from which all BatchNorm statistics of linear chains follow.

For h = A (x - mean) + c over the tokens of a batch: mean(h) = c and var(h) = diag(A S A^T), with S the covariance of x.
So the statistics of every hidden unit of a chain of linear layers follow from (mean, S), without computing h.

Letters: M tokens, C channels, G groups (linear maps on disjoint channels; left out where there is one).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isomorph.layers.eager import can_write_into
from isomorph.layers.pyramid.patch_moments import has_patch_moments, measure_patches
from isomorph.layers.pyramid.tokens import Window, count_tokens, read_tokens, scatter_tokens
from isomorph.layers.pyramid.weight_products import symmetric_product


def sync_group(module: nn.Module) -> Any:
    """Return the processes that share the statistics of a module's BatchNorms, or None."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    norms = (m for m in module.modules() if isinstance(m, nn.SyncBatchNorm))
    return next((norm.process_group or dist.group.WORLD for norm in norms), None)


def all_reduce(group: Any, *tensors: Tensor) -> None:
    """Sum tensors over the processes of a group, in place; None stands for this process alone."""
    if group is not None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)


def check_first_derivatives(group: Any) -> None:
    """Raise RuntimeError if processes share statistics and the backward pass runs with create_graph=True."""
    if group is not None and torch.is_grad_enabled():
        raise RuntimeError(
            "statistics shared by several processes have no second derivatives; do not use create_graph=True"
        )


class Moments(NamedTuple):
    """First and second moments of the tokens that a layer reads. Shape: mean (G, C), covariance (G, C, C)

    `source` is the input for the layer. If every position reads whole channels, the mean is subtracted from it and
    `offset` is None; otherwise it is unchanged and `offset` is the mean.
    `total` is the number of tokens, over all processes if these share statistics.
    """

    source: Tensor
    mean: Tensor
    covariance: Tensor
    offset: Tensor | None
    total: int


class _Reading(NamedTuple):
    """How moments are measured: a convolution's window, whether to centre the source, number of tokens, processes."""

    window: Window | None
    centring: bool
    tokens: int
    group: Any


class MeasureMoments(torch.autograd.Function):
    """Compute mean and covariance of the tokens of x; also x as `dtype`, minus its mean if centring.

    Only that x is saved for backward. With K = (dS + dS^T) / M, the gradient of a token is (token - mean) K + d_mean /
    M.

    Shape: x (*, C) or (B, C, H, W) -> as x, (G, C), (G, C, C)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype, reading: _Reading) -> tuple[Tensor, Tensor, Tensor]:
        window, centring, count, group = reading
        tokens = read_tokens(x, window).to(torch.promote_types(x.dtype, torch.float32))
        mean = tokens.sum(-2) / count
        all_reduce(group, mean)
        centred = tokens - mean.unsqueeze(-2)
        covariance = symmetric_product([centred], [centred]).div_(count)
        all_reduce(group, covariance)
        source = scatter_tokens(centred, x.shape, window) if centring else x.view_as(x)
        return source.to(dtype), mean, covariance

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, _, ctx.reading = inputs
        ctx.save_for_backward(*output[:2])
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, d_source: Tensor, d_mean: Tensor, d_covariance: Tensor) -> tuple[Tensor | None, ...]:
        window, centring, count, group = ctx.reading
        check_first_derivatives(group)
        source, mean = ctx.saved_tensors
        slope = (d_covariance + d_covariance.mT) / count  # (G, C, C)
        tokens = read_tokens(source, window).to(slope.dtype)
        if centring:
            d_mean = d_mean - read_tokens(d_source, window).to(slope.dtype).sum(-2)
        shift = d_mean / count
        all_reduce(group, shift, slope)
        if not centring:
            shift = shift - (mean.unsqueeze(-2) @ slope).squeeze(-2)
        return _add_token_gradients(d_source.to(ctx.dtype), tokens, slope, shift.unsqueeze(-2), window), None, None


def _add_token_gradients(d_x: Tensor, tokens: Tensor, slope: Tensor, shift: Tensor, window: Window | None) -> Tensor:
    """Return d_x plus the gradient of the tokens, tokens K + shift.

    In place where possible: d_x comes from the one linear layer that reads the source, and nothing else holds it.

    Shape: d_x as x, tokens (G, M, C), slope K (G, C, C), shift (G, 1, C) -> as x
    """
    if can_write_into(d_x) and window is None and d_x.dtype == slope.dtype:
        d_x.view(tokens.shape).addmm_(tokens, slope).add_(shift)
        return d_x
    d_tokens = (torch.addmm if tokens.ndim == 2 else torch.baddbmm)(shift, tokens, slope).to(d_x.dtype)
    return d_x + scatter_tokens(d_tokens, d_x.shape, window)


def disable_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast: statistics and products of weights keep the dtype of their inputs."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def measure_moments(x: Tensor, window: Window | None = None, group: Any = None) -> Moments:
    """Return the mean and covariance of what a layer reads, in float32 at least.

    Moments are those of all processes of `group` if it is given.

    Shape: x (*, C), or (B, C, H, W) with the window of a convolution
    Raises: ValueError for a single token, as BatchNorm does: it has no variance.
    """
    count = count_tokens(x, window)
    if group is not None:
        counts = torch.tensor([count], device=x.device)
        all_reduce(group, counts)
        count = int(counts.item())
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
    centring = window is None or (window.is_pointwise and window.groups == 1)
    dtype = autocast_dtype(x) if centring else x.dtype
    with disable_autocast(x.device):
        if window is not None and has_patch_moments(window, x) and group is None:
            mean, covariance = measure_patches(x, window)
            return Moments(x, mean, covariance, mean, count)
        reading = _Reading(window, centring, max(count, 1), group)  # at least 1: an empty batch gives zeros
        source, mean, covariance = MeasureMoments.apply(x, dtype, reading)
    return Moments(source, mean, covariance, None if centring else mean, count)


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
