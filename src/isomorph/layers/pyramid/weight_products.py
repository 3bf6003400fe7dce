"""Products of weights for chains of linear layers and BatchNorms, for all chains of a layer together.

Few large products instead of many small ones: on a GPU each small one costs a launch. Matrices of equal shape are
stacked where copying them is cheaper than that (`_stacks`).

Letters: M rows of a product, R rows of all weights, C channels, G groups (left out where there is one).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isomorph.layers.eager import on_cpu

NARROWEST_BLOCK = 96
"""Smallest width of the blocks of a symmetric product."""

VARIANCE_FLOOR_ULPS = 4
"""Smallest variance that can be told from 0, in rounding units of the sum of its terms."""

LARGEST_STACKED = 2**16
"""Entries of the largest matrices that are stacked on a CPU; larger ones are multiplied one by one."""

LARGEST_RECOMPUTED = 2**18
"""Entries of the largest weight A whose product A S is computed again for the backward pass, instead of saved."""


def _stacks(like: Tensor) -> bool:
    """True if matrices of this size are better copied into one than multiplied one by one."""
    return not saves_work(like) or like.numel() <= LARGEST_STACKED


def saves_work(like: Tensor) -> bool:
    """True where arithmetic is what takes the time: on a CPU, and on the meta device, on which it is counted."""
    return on_cpu(like) or like.is_meta


def symmetric_product(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """Return the sum of left^T right, known to be symmetric: on a CPU compute the upper blocks and mirror them.

    Halving the width again and again saves up to 0.44 of the work, in larger blocks than strips of equal width.

    Shape: left, right (M, C) each -> (C, C); groups may lead
    """
    width, pairs = rights[0].shape[-1], list(zip(lefts, rights, strict=True))
    if width < 2 * NARROWEST_BLOCK or rights[0].ndim > 2 or not saves_work(rights[0]):
        return _sum_products([(left.mT, right) for left, right in pairs])
    product = lefts[0].new_empty(width, width)  # from left: under vmap it is the one that always has a sample axis
    spans = [(0, width)]
    while spans:
        start, stop = spans.pop()
        halved = stop - start >= 2 * NARROWEST_BLOCK
        middle = (start + stop) // 2 if halved else stop
        after = middle if halved else start
        block = _sum_products([(left[:, start:middle].mT, right[:, after:stop]) for left, right in pairs])
        product[start:middle, after:stop] = block
        if halved:
            product[middle:stop, start:middle] = block.mT
            spans += [(start, middle), (middle, stop)]
    return product


def _sum_products(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of the products of pairs of matrices."""
    total = pairs[0][0] @ pairs[0][1]
    for left, right in pairs[1:]:
        total = torch.addmm(total, left, right) if total.ndim == 2 else torch.baddbmm(total, left, right)
    return total


class _RowVariances(torch.autograd.Function):
    """Compute diag(A S A^T) of the rows of all weights A; of large weights, save A S for the backward pass.

    The result is at least a few rounding units of diag(A diag(S) A^T). Without that floor, channels that cancel almost
    exactly would get variance 0, and BatchNorm would amplify them. A row at the floor gets no gradient.

    Shape: covariance S (G, C, C), weights A (G, rows, C) -> variance (G, R), a mask of rows above the floor, A S
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(covariance: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        matrices = _merge_rows(weights)
        products = [weight @ covariance for weight in matrices]
        spread = covariance.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # (G, C, 1)
        pairs = list(zip(matrices, products, strict=True))
        variance = _join([(product * weight).sum(-1) for weight, product in pairs])  # (G, R)
        floor = _join([(weight.square() @ spread).squeeze(-1) for weight in matrices])
        floor = floor * (VARIANCE_FLOOR_ULPS * torch.finfo(covariance.dtype).eps)
        saved = products if weights[0].numel() > LARGEST_RECOMPUTED else []
        return torch.maximum(variance, floor), variance >= floor, *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros for A S
        ctx.save_for_backward(*output[1:], *inputs)
        ctx.saved_products = len(output) - 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        above_floor, *saved = ctx.saved_tensors
        products, (covariance, *weights) = saved[: ctx.saved_products], saved[ctx.saved_products :]
        if grad is None:
            return None, *(None for _ in weights)
        matrices = _merge_rows(weights)
        if torch.is_grad_enabled() or not products:  # a second derivative needs how they follow from the weights
            products = [weight @ covariance for weight in matrices]
        rows = [weight.shape[-2] for weight in matrices]
        slopes = (grad * above_floor).unsqueeze(-1).split(rows, -2)  # (G, rows, 1) each
        d_weights = [product * (2 * slope) for product, slope in zip(products, slopes, strict=True)]
        if len(matrices) < len(weights):
            d_weights = list(d_weights[0].split([weight.shape[-2] for weight in weights], -2))
        d_covariance = None
        if ctx.needs_input_grad[0]:
            scaled = [weight * slope for weight, slope in zip(matrices, slopes, strict=True)]
            d_covariance = symmetric_product(scaled, matrices)
        return d_covariance, *d_weights


def _merge_rows(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights as one matrix if they are better stacked. Shape: (G, rows, C) each -> (G, R, C)"""
    return [torch.cat(list(weights), -2)] if len(weights) > 1 and _stacks(weights[0]) else list(weights)


def _join(vectors: Sequence[Tensor]) -> Tensor:
    """Return vectors as one. Shape: (G, rows) each -> (G, R)"""
    return vectors[0] if len(vectors) == 1 else torch.cat(list(vectors), -1)


class _ScaledProducts(torch.autograd.Function):
    """Compute (W diag(scale)) A of several factors of equal shape as one product, saving only the factors.

    Shape: n of W (G, out, hidden), then of scale (G, hidden), then of A (G, hidden, C) -> (n, G, out, C)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*factors: Tensor) -> Tensor:
        weight, scale, inner = _stack_thirds(factors)
        return (weight * scale.unsqueeze(-2)) @ inner

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        weight, scale, inner = _stack_thirds(ctx.saved_tensors)
        d_inner = (weight * scale.unsqueeze(-2)).mT @ grad
        d_weight = grad @ inner.mT  # of W diag(scale)
        d_scale = (d_weight * weight).sum(-2)
        d_weight = d_weight * scale.unsqueeze(-2) if torch.is_grad_enabled() else d_weight.mul_(scale.unsqueeze(-2))
        return *d_weight.unbind(), *d_scale.unbind(), *d_inner.unbind()


def _stack_thirds(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each third of a sequence of tensors as one; a single tensor is not copied. Shape: n of (*) -> (n, *)"""
    count = len(tensors) // 3
    thirds = (tensors[start : start + count] for start in range(0, len(tensors), count))
    return [each[0].unsqueeze(0) if count == 1 else torch.stack(list(each)) for each in thirds]


def row_variances(weights: Sequence[Tensor], covariance: Tensor) -> Tensor:
    """Return the variance of every output of several linear layers over the batch, one layer after the other.

    Shape: weight (G, rows, C) each, covariance (G, C, C) -> (G, R)
    """
    return _RowVariances.apply(covariance, *weights)[0]


def scaled_products(factors: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """Return (W diag(scale)) A for each (W, scale, A), those of equal shape together.

    Shape: (G, out, hidden), (G, hidden), (G, hidden, C) -> (G, out, C) each
    """
    alike: dict[tuple[torch.Size, ...], list[int]] = {}
    for index, (weight, _, inner) in enumerate(factors):
        alike.setdefault((weight.shape, inner.shape), []).append(index)
    found: dict[int, Tensor] = {}
    for members in alike.values():
        together = [members] if _stacks(factors[members[0]][0]) else [[index] for index in members]
        for part in together:
            columns = zip(*(factors[index] for index in part), strict=True)
            products = _ScaledProducts.apply(*(each for column in columns for each in column)).unbind()
            found |= dict(zip(part, products, strict=True))
    return [found[index] for index in range(len(factors))]
