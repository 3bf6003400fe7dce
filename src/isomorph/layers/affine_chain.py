"""Chains of linear and BatchNorm layers as one affine map of their input, in training too.

Given the moments of the batch, a chain is x -> A (x - mean) + c, and stays of that form through every layer:

    linear      A <- W A,                    c <- W c + b
    BatchNorm   s = gamma / sqrt(diag(A S A^T) + eps),    A <- s A,    c <- beta

which is what running the tokens through the layers gives, at the price of products of weights. A BatchNorm in eval
mode scales and shifts by its running statistics instead; with all of them so, mean = 0 and no moments are needed.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.layers.chunked import in_eager_mode
from isomorph.layers.moments import Moments, row_variance, scaled_product


def matrix(layer: nn.Linear | nn.Conv2d) -> Tensor:
    """The weight of a linear layer or of a convolution on its patches, one matrix a group.

    Shape: -> (out, C), or (G, out / G, C / G) of a grouped convolution
    """
    groups = getattr(layer, "groups", 1)
    weight = layer.weight.flatten(1)
    weight = weight if groups == 1 else weight.unflatten(0, (groups, -1))
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def vector(values: Tensor, like: Tensor) -> Tensor:
    """A bias or the like, laid out and computed with as the rows of a matrix. Shape: (out,) -> (G, out / G)"""
    return (values if like.ndim == 2 else values.view(like.shape[:-1])).to(like.dtype)


def times(weight: Tensor, column: Tensor) -> Tensor:
    """W c. Shape: (G, out, C), (G, C) -> (G, out)"""
    return weight.mv(column) if weight.ndim == 2 else (weight @ column.unsqueeze(-1)).squeeze(-1)


def recomputing() -> bool:
    """Whether this forward pass is gradient checkpointing's second one: statistics have been updated by the first.

    The second one runs within a backward pass; torch.utils.checkpoint itself asks the same private question.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _check_vmap(running: Tensor, new: Tensor) -> None:
    """Raises: RuntimeError when one set of statistics is to keep those of every sample of a vmap, as torch's would."""
    batched = torch._C._functorch.is_batchedtensor
    if in_eager_mode() and batched(new) and not batched(running):
        raise RuntimeError(
            "BatchNorm in train mode cannot keep the statistics of each sample of vmap: call eval(), or "
            "torch.func.replace_all_batch_norm_modules_(model)"
        )


@torch.no_grad()
def _update_statistics(norm: _BatchNorm, mean: Tensor, variance: Tensor, count: int) -> None:
    """Running mean and unbiased variance, as BatchNorm keeps them. Shape: mean, variance (G, out / G)"""
    if norm.running_mean is None or norm.running_var is None or recomputing():
        return
    assert norm.num_batches_tracked is not None
    _check_vmap(norm.running_mean, mean)
    norm.num_batches_tracked.add_(1)
    if not count:  # torch's BatchNorm counts an empty batch and learns nothing from it
        return
    momentum: Any = norm.momentum
    if momentum is None:  # the average over all batches so far
        momentum = norm.num_batches_tracked.to(norm.running_mean.dtype).reciprocal()
    for running, new in ((norm.running_mean, mean), (norm.running_var, variance * (count / (count - 1)))):
        running.lerp_(new.reshape(-1).to(running.dtype), momentum)


def normalise(norm: _BatchNorm, weight: Tensor, centre: Tensor, moments: Moments | None) -> tuple[Tensor, Tensor]:
    """BatchNorm of h = A (x - mean) + c: the scale of its rows, and its new c.

    Shape: weight A (G, out, C), centre c (G, out) -> (G, out), (G, out)
    Source: Ioffe and Szegedy (2015) algorithm 1; Tan et al. (TDRL) eq. 1
    """
    gamma, beta = (None if p is None else vector(p, weight) for p in (norm.weight, norm.bias))
    if uses_batch(norm):
        assert moments is not None
        mean, variance = centre, row_variance(weight, moments.covariance)
        _update_statistics(norm, mean.detach(), variance.detach(), moments.total)
    else:
        mean, variance = (vector(t, weight) for t in (norm.running_mean, norm.running_var))  # type: ignore[arg-type]
    scale = torch.rsqrt(variance + norm.eps)
    scale = scale if gamma is None else scale * gamma
    centre = (centre - mean) * scale
    return scale, centre if beta is None else centre + beta


def uses_batch(norm: nn.Module | None) -> bool:
    """Whether a BatchNorm normalises by the batch: in train mode, or where it keeps no statistics."""
    return isinstance(norm, _BatchNorm) and (norm.training or norm.running_mean is None)


def collapse_chain(layers: Sequence[nn.Module], moments: Moments | None, start: Tensor) -> tuple[Tensor, Tensor]:
    """A chain of linear and BatchNorm layers, each BatchNorm after a linear layer, as A and c.

    `start`: the mean of the input, 0 where no moments are needed. Shape: (G, C) -> (G, out, C), (G, out)
    """
    weight, scale, centre = None, None, start
    for layer, after in pairwise([*layers, None]):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            own = matrix(layer)
            weight = own if weight is None else own @ weight if scale is None else scaled_product(own, scale, weight)
            # the batch takes W c and b out again: their gradient is 0, which for W is not worth an outer product
            centre = times(own.detach() if uses_batch(after) else own, centre)
            scale, centre = None, centre if layer.bias is None else centre + vector(layer.bias, own)
        elif layer is not None:
            scale, centre = normalise(layer, weight, centre, moments)  # type: ignore[arg-type]
    return (weight if scale is None else weight * scale.unsqueeze(-1)), centre  # type: ignore[operator, return-value]
