"""Collapse a chain of linear and BatchNorm layers into one affine map of its input, also in train mode.

Given the mean and covariance S of the tokens in a batch, every chain has the form x -> A (x - mean) + c:

    linear      A <- W A,                    c <- W c + b
    BatchNorm   s = gamma / sqrt(diag(A S A^T) + eps),    A <- s A,    c <- beta

This equals running the tokens through the layers, but costs only products of weight matrices. A BatchNorm in eval mode
scales and shifts by its running statistics instead; if all are in eval mode, mean = 0 and no moments are needed.

Letters: C channels, G groups (left out where there is one), `weight` A, `bias` c.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.layers.eager import is_eager, is_functorch_tensor
from isomorph.layers.pyramid.moments import Moments
from isomorph.layers.pyramid.weight_products import row_variances, scaled_products


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
def _update_statistics(norms: Sequence[_BatchNorm], mean: Tensor, variance: Tensor, count: int) -> None:
    """Update running means and running unbiased variances as torch's BatchNorm does; the norms' rows follow each other.

    Shape: mean, variance (G, R)
    """
    if _is_recomputing():
        return
    rows = [norm.num_features // (mean.shape[0] if mean.ndim == 2 else 1) for norm in norms]
    new = (mean, variance * (count / max(count - 1, 1)))
    changes: dict[float, list[tuple[Tensor, Tensor]]] = {}
    for norm, *values in zip(norms, *(each.split(rows, -1) for each in new), strict=True):
        if norm.running_mean is None or norm.running_var is None or not norm.track_running_stats:
            continue
        assert norm.num_batches_tracked is not None
        _check_vmap(norm.running_mean, mean)
        norm.num_batches_tracked.add_(1)
        for running, value in zip((norm.running_mean, norm.running_var), values, strict=True):
            value = value.reshape(-1).to(running.dtype)
            momentum: Any = norm.momentum
            if momentum is None:  # the average over all batches so far
                momentum = norm.num_batches_tracked.to(running.dtype).reciprocal()
            if not count:  # torch's BatchNorm counts an empty batch but does not update its statistics
                continue
            if is_functorch_tensor(running):  # vmap runs lerp_ once for each sample
                running.add_((value - running) * momentum)
            elif isinstance(momentum, Tensor):
                running.lerp_(value, momentum)
            else:
                changes.setdefault(momentum, []).append((running, value))
    for momentum, pairs in changes.items():
        running_values, new_values = zip(*pairs, strict=True)
        torch._foreach_lerp_(running_values, new_values, momentum)


class Affine(NamedTuple):
    """The map x -> diag(scale) A (x - mean) + c of a chain; without a scale, A (x - mean) + c.

    Shape: weight A (G, out, C), scale (G, out), bias c (G, out)
    """

    weight: Tensor
    scale: Tensor | None
    bias: Tensor

    def scaled(self) -> tuple[Tensor, Tensor]:
        """Return A, with its rows scaled, and c."""
        return (self.weight if self.scale is None else self.weight * self.scale.unsqueeze(-1)), self.bias


def apply_batchnorms(norms: Sequence[_BatchNorm], maps: Sequence[Affine], moments: Moments | None) -> list[Affine]:
    """Apply a BatchNorm to the outputs h = A (x - mean) + c of each map, which have no scale.

    Without moments, all apply their running statistics.

    Source: Ioffe and Szegedy (2015) algorithm 1; Tan et al. (TDRL) eq. 1
    """
    pairs = list(zip(norms, maps, strict=True))
    if moments is None:
        return [_normalise(norm, given, *_running(norm, given.weight)) for norm, given in pairs]
    by_batch = [pair for pair in pairs if uses_batch_statistics(pair[0])]
    normalised = iter(_normalise_by_batch(by_batch, moments) if by_batch else ())
    return [
        next(normalised) if uses_batch_statistics(norm) else _normalise(norm, given, *_running(norm, given.weight))
        for norm, given in pairs
    ]


def _running(norm: _BatchNorm, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the running mean and variance of a BatchNorm. Shape: weight (G, out, C) -> (G, out) each"""
    return _shape_like_rows(norm.running_mean, weight), _shape_like_rows(norm.running_var, weight)  # type: ignore[arg-type]


def _normalise(norm: _BatchNorm, given: Affine, mean: Tensor, variance: Tensor) -> Affine:
    """Apply a BatchNorm with a given mean and variance of its input. Shape: (G, out) each"""
    weight, _, bias = given
    gamma, beta = (None if p is None else _shape_like_rows(p, weight) for p in (norm.weight, norm.bias))
    scale = torch.rsqrt(variance + norm.eps)
    scale = scale if gamma is None else scale * gamma
    bias = (bias - mean) * scale
    return Affine(weight, scale, bias if beta is None else bias + beta)


def _normalise_by_batch(pairs: Sequence[tuple[_BatchNorm, Affine]], moments: Moments) -> list[Affine]:
    """Apply BatchNorms that use the statistics of the batch, all in one where they agree in eps and affine weights."""
    norms, maps = zip(*pairs, strict=True)
    rows = [given.weight.shape[-2] for given in maps]
    variance = row_variances([given.weight for given in maps], moments.covariance)
    mean = torch.cat([given.bias for given in maps], -1)
    _update_statistics(norms, mean.detach(), variance.detach(), moments.total)
    if len({(norm.eps, norm.weight is None, norm.bias is None) for norm in norms}) > 1:
        each = zip(pairs, mean.split(rows, -1), variance.split(rows, -1), strict=True)
        return [_normalise(norm, given, *values) for (norm, given), *values in each]
    scale, bias = torch.rsqrt(variance + norms[0].eps), mean - mean
    if norms[0].weight is not None:
        scale = scale * _join_rows([norm.weight for norm in norms], maps)
    bias = bias * scale
    if norms[0].bias is not None:
        bias = bias + _join_rows([norm.bias for norm in norms], maps)
    parts = zip(maps, scale.split(rows, -1), bias.split(rows, -1), strict=True)
    return [Affine(given.weight, *values) for given, *values in parts]


def _join_rows(vectors: Sequence[Tensor], maps: Sequence[Affine]) -> Tensor:
    """Return the weights or biases of BatchNorms as one. Shape: (out,) each -> (G, R)"""
    return torch.cat([_shape_like_rows(v, given.weight) for v, given in zip(vectors, maps, strict=True)], -1)


def uses_batch_statistics(norm: nn.Module | None) -> bool:
    """True if a module is a BatchNorm that normalises by the batch: in train mode, or without running statistics."""
    return isinstance(norm, _BatchNorm) and (norm.training or norm.running_mean is None)


def collapse_chains(chains: Sequence[Sequence[nn.Module]], moments: Moments | None, start: Tensor) -> list[Affine]:
    """Collapse chains of linear and BatchNorm layers, each BatchNorm after a linear layer, into affine maps.

    The chains advance together, one layer at a time, so that their products can be computed together. `start` is the
    mean of the input, or 0 where no moments are needed.

    Shape: start (G, C)
    """
    maps: dict[int, Affine] = {}
    for depth in range(max(map(len, chains))):
        layers = {index: chain[depth] for index, chain in enumerate(chains) if depth < len(chain)}
        linear = {index: layer for index, layer in layers.items() if isinstance(layer, nn.Linear | nn.Conv2d)}
        norms = {index: layer for index, layer in layers.items() if isinstance(layer, _BatchNorm)}
        after = {index: chains[index][depth + 1 : depth + 2] for index in linear}
        matrices = {index: weight_matrix(layer) for index, layer in linear.items()}
        weights = _multiply(matrices, maps)
        for index, layer in linear.items():
            matrix = matrices[index]
            # batch statistics subtract W c and b again: their gradient is 0, so skip the outer product for W
            by_batch = moments is not None and any(map(uses_batch_statistics, after[index]))
            outer = matrix.detach() if by_batch else matrix
            bias = matvec(outer, maps[index].bias if index in maps else start)
            bias = bias if layer.bias is None else bias + _shape_like_rows(layer.bias, matrix)
            maps[index] = Affine(weights[index], None, bias)
        if norms:
            normed = apply_batchnorms(list(norms.values()), [maps[index] for index in norms], moments)
            maps |= dict(zip(norms, normed, strict=True))
    return [maps[index] for index in range(len(chains))]


def _multiply(matrices: dict[int, Tensor], maps: dict[int, Affine]) -> dict[int, Tensor]:
    """Return W diag(scale) A for each chain, or W where a chain begins. Shape: (G, out, C) each"""
    products = {index: matrix for index, matrix in matrices.items() if index not in maps}
    for index in matrices.keys() & maps.keys():
        if maps[index].scale is None:
            products[index] = matrices[index] @ maps[index].weight
    left = [index for index in matrices if index not in products]
    factors = [(matrices[index], maps[index].scale, maps[index].weight) for index in left]
    return products | dict(zip(left, scaled_products(factors), strict=True))  # type: ignore[arg-type]


def collapse_chain(layers: Sequence[nn.Module], moments: Moments | None, start: Tensor) -> tuple[Tensor, Tensor]:
    """Collapse one chain into A and c, with the rows of A scaled. Shape: start (G, C) -> (G, out, C), (G, out)"""
    return collapse_chains([layers], moments, start)[0].scaled()
