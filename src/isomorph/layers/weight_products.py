"""Products of weights for chains of linear layers and BatchNorms: symmetric products, variances of rows.

Letters: M rows of a product, C channels, G groups (left out where there is one).
"""

from typing import Any

import torch
from torch import Tensor

NARROWEST_BLOCK = 96
"""Smallest width of the blocks of a symmetric product."""

VARIANCE_FLOOR_ULPS = 4
"""Smallest variance that can be told from 0, in rounding units of the sum of its terms."""


def symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left^T right, known to be symmetric: on a CPU compute the blocks above the diagonal and mirror them.

    Halving the width again and again saves up to 0.44 of the work, in larger blocks than strips of equal width.

    Shape: left, right (M, C) -> (C, C); groups may lead
    """
    width = right.shape[-1]
    if width < 2 * NARROWEST_BLOCK or right.ndim > 2 or right.device.type != "cpu":
        return left.mT @ right
    product = left.new_empty(width, width)  # from left: under vmap it is the one that always has a sample axis
    spans = [(0, width)]
    while spans:
        start, stop = spans.pop()
        middle = (start + stop) // 2
        if stop - start < 2 * NARROWEST_BLOCK:
            product[start:stop, start:stop] = left[:, start:stop].mT @ right[:, start:stop]
            continue
        block = left[:, start:middle].mT @ right[:, middle:stop]
        product[start:middle, middle:stop], product[middle:stop, start:middle] = block, block.mT
        spans += [(start, middle), (middle, stop)]
    return product


def _scale_by(gradient: Tensor, factor: Any) -> Tensor:
    """Return the product, computed in place unless a second derivative may be needed."""
    return gradient * factor if torch.is_grad_enabled() else gradient.mul_(factor)


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
        d_covariance = symmetric_product(scaled, weight) if ctx.needs_input_grad[1] else None
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
