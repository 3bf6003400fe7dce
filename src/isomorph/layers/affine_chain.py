"""Collapse a chain of linear and BatchNorm layers into one affine map of its input, also in train mode.

Given the mean and covariance S of the tokens in a batch, every chain has the form x -> A (x - mean) + c:

    linear      A <- W A,                    c <- W c + b
    BatchNorm   s = gamma / sqrt(diag(A S A^T) + eps),    A <- s A,    c <- beta

This equals running the tokens through the layers, but costs only products of weight matrices. A BatchNorm in eval mode
scales and shifts by its running statistics instead; if all are in eval mode, mean = 0 and no moments are needed.

Letters: C channels, G groups (left out where there is one), `weight` A, `bias` c.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.layers.chunked import is_eager, is_functorch_tensor
from isomorph.layers.moments import Moments
from isomorph.layers.weight_products import row_variance, scaled_product


def weight_matrix(layer: nn.Linear | nn.Conv2d) -> Tensor:
    """Return the weight of a linear layer, or of a convolution acting on its patches, as one matrix per group.

    Shape: -> (out, C), or (G, out / G, C / G) for a grouped convolution
    """
    groups = getattr(layer, "groups", 1)
    weight = layer.weight.flatten(1)
    weight = weight if groups == 1 else weight.unflatten(0, (groups, -1))
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _shape_like_rows(values: Tensor, like: Tensor) -> Tensor:
    """Reshape and cast a bias or a scale to match the rows of a matrix. Shape: (out,) -> (G, out / G)"""
    return (values if like.ndim == 2 else values.view(like.shape[:-1])).to(like.dtype)


def matvec(weight: Tensor, column: Tensor) -> Tensor:
    """Return the product W c of a matrix and a vector per group. Shape: (G, out, C), (G, C) -> (G, out)"""
    return weight.mv(column) if weight.ndim == 2 else (weight @ column.unsqueeze(-1)).squeeze(-1)


def _is_recomputing() -> bool:
    """True during the second forward pass of gradient checkpointing, whose first pass has updated the statistics.

    The second pass runs within a backward pass; torch.utils.checkpoint itself asks autograd in the same private way.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _check_vmap(running: Tensor, new: Tensor) -> None:
    """Check that per-sample statistics of vmap are not written into shared running statistics.

    Raises: RuntimeError, as torch's BatchNorm does.
    """
    batched = torch._C._functorch.is_batchedtensor
    if is_eager() and batched(new) and not batched(running):
        raise RuntimeError(
            "BatchNorm in train mode cannot update its running statistics from each sample of vmap; call model.eval() "
            "or torch.func.replace_all_batch_norm_modules_(model)"
        )


@torch.no_grad()
def _update_statistics(norm: _BatchNorm, mean: Tensor, variance: Tensor, count: int) -> None:
    """Update the running mean and the running unbiased variance as torch's BatchNorm does.

    Shape: mean, variance (G, out / G)
    """
    if norm.running_mean is None or norm.running_var is None or _is_recomputing():
        return
    assert norm.num_batches_tracked is not None
    _check_vmap(norm.running_mean, mean)
    norm.num_batches_tracked.add_(1)
    if not count:  # torch's BatchNorm counts an empty batch but does not update its statistics
        return
    momentum: Any = norm.momentum
    if momentum is None:  # the average over all batches so far
        momentum = norm.num_batches_tracked.to(norm.running_mean.dtype).reciprocal()
    for running, new in ((norm.running_mean, mean), (norm.running_var, variance * (count / (count - 1)))):
        new = new.reshape(-1).to(running.dtype)
        if is_functorch_tensor(running):  # vmap runs lerp_ once for each sample
            running.add_((new - running) * momentum)
        else:
            running.lerp_(new, momentum)


def apply_batchnorm(norm: _BatchNorm, weight: Tensor, bias: Tensor, moments: Moments | None) -> tuple[Tensor, Tensor]:
    """Apply BatchNorm to h = A (x - mean) + c; return the scale of the rows of A and the new c.

    Shape: weight A (G, out, C), bias c (G, out) -> (G, out), (G, out)
    Source: Ioffe and Szegedy (2015) algorithm 1; Tan et al. (TDRL) eq. 1
    """
    gamma, beta = (None if p is None else _shape_like_rows(p, weight) for p in (norm.weight, norm.bias))
    if uses_batch_statistics(norm):
        assert moments is not None
        mean, variance = bias, row_variance(weight, moments.covariance)
        _update_statistics(norm, mean.detach(), variance.detach(), moments.total)
    else:
        mean, variance = (_shape_like_rows(t, weight) for t in (norm.running_mean, norm.running_var))  # type: ignore[arg-type]
    scale = torch.rsqrt(variance + norm.eps)
    scale = scale if gamma is None else scale * gamma
    bias = (bias - mean) * scale
    return scale, bias if beta is None else bias + beta


def uses_batch_statistics(norm: nn.Module | None) -> bool:
    """True if a module is a BatchNorm that normalises by the batch: in train mode, or without running statistics."""
    return isinstance(norm, _BatchNorm) and (norm.training or norm.running_mean is None)


def collapse_chain(layers: Sequence[nn.Module], moments: Moments | None, start: Tensor) -> tuple[Tensor, Tensor]:
    """Collapse a chain of linear and BatchNorm layers, each BatchNorm after a linear layer, into A and c.

    `start` is the mean of the input, or 0 where no moments are needed.

    Shape: start (G, C) -> (G, out, C), (G, out)
    """
    weight, scale, bias = None, None, start
    for layer, after in pairwise([*layers, None]):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            matrix = weight_matrix(layer)
            if weight is None:
                weight = matrix
            else:
                weight = matrix @ weight if scale is None else scaled_product(matrix, scale, weight)
            # batch statistics subtract W c and b again: their gradient is 0, so skip the outer product for W
            bias = matvec(matrix.detach() if uses_batch_statistics(after) else matrix, bias)
            scale, bias = None, bias if layer.bias is None else bias + _shape_like_rows(layer.bias, matrix)
        elif layer is not None:
            scale, bias = apply_batchnorm(layer, weight, bias, moments)  # type: ignore[arg-type]
    return (weight if scale is None else weight * scale.unsqueeze(-1)), bias  # type: ignore[operator, return-value]
