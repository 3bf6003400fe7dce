"""Similarity between the branches of pyramids (TDRL Fig. 2 c)."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.analysis.batches import batches
from isomorph.analysis.cka import hsic, matching_batches
from isomorph.analysis.layer_attention import capture_inputs
from isomorph.errors import UserError
from isomorph.layers import JointPyramid
from isomorph.layers.pyramid.base import Pyramid
from isomorph.layers.pyramid.batchnorm import fold
from isomorph.layers.pyramid.moments import measure_moments
from isomorph.layers.pyramid.tokens import read_tokens
from isomorph.surgery.where import outermost_modules


def branch_similarity(model: nn.Module, data: Tensor | Iterable[Any]) -> dict[str, Tensor]:
    """Return the linear CKA between the branches of every pyramid, the skip branch last, in eval mode.

    For one batch the samples are its tokens: with S the covariance of the layer's input, branches A and B have
    |A S B^T|^2 / (|A S A^T| |B S B^T|). For a loader the samples are images, with all outputs of a branch as features,
    and unbiased HSIC is summed over batches as in `cka`; batches of fewer than 4 images are skipped.

    The value is 0 for a branch whose output is 0, as with `init="same-function"` for all but the skip, and where a
    pyramid of a joint layer has fewer branches than another.

    Shape: batch (B, C, H, W) or a loader of such -> {name: (branches, branches)}; for a joint layer
    (pyramids, branches, branches), without its linear parts
    Source: TDRL Fig. 2 (c); for a loader Nguyen, Raghu, Kornblith (2021), eq. 2 to 4
    Raises: UserError if the model has no pyramid, or no batch of a loader has 4 images.

    Example:
        >>> cnn = timm.create_model("cifar_resnet20")
        >>> wide = iso.recast(cnn, iso.LinearToPyramid("P-W2S", init="paper"), where="linear")
        >>> tuple(iso.analysis.branch_similarity(wide, torch.randn(4, 3, 32, 32))["linear"].shape)
        (3, 3)
    """
    layers = outermost_modules(model, lambda module: isinstance(module, Pyramid | JointPyramid))
    if not layers:
        raise UserError("the model has no pyramids, or is already fused; recast it with LinearToPyramid first")
    if isinstance(data, Tensor):
        return capture_inputs(model, data, _token_cka, layers)
    device, sums = next(model.parameters()).device, dict[str, Tensor]()
    for (batch,) in matching_batches((batch,) for batch in batches(data)):
        measure = partial(_image_hsic, images=len(batch))
        for name, inner in capture_inputs(model, batch.to(device), measure, layers).items():
            sums[name] = sums.get(name, torch.zeros_like(inner)) + inner
    return {name: normalise_hsic(inner) for name, inner in sums.items()}


def _token_cka(layer: Any, x: Tensor) -> Tensor:
    """Return the CKA between the branches of one layer, with its tokens as samples.

    Shape: -> (branches, branches), or (pyramids, branches, branches)
    """
    window = getattr(layer, "window", None)
    covariance = measure_moments(x, window and window._replace(groups=1)).covariance[0].double()

    def inner(weights: list[Tensor]) -> Tensor:
        values = covariance.new_zeros(len(weights), len(weights))
        for i, product in enumerate(weight @ covariance for weight in weights):
            for j, other in enumerate(weights[: i + 1]):  # |A S B^T| = |B S A^T|
                values[i, j] = values[j, i] = (product @ other.mT).norm() ** 2
        return values

    return normalise_hsic(_apply_to_pyramids(layer, inner))


def _image_hsic(layer: Any, x: Tensor, images: int) -> Tensor:
    """Return unbiased HSIC between the branches of one layer, with images as samples.

    The windows of an image follow each other in x. Shape: as `_token_cka`
    """
    window = getattr(layer, "window", None)
    tokens = read_tokens(x, window and window._replace(groups=1))[0].double()  # (B N, C)

    def gram(weight: Tensor) -> Tensor:
        y = (tokens @ weight.mT).view(images, -1)  # (B, N out)
        y = y - y.mean(0)
        return (y @ y.T).fill_diagonal_(0.0)

    def inner(weights: list[Tensor]) -> Tensor:
        grams = torch.stack([gram(weight) for weight in weights])  # (branches, B, B)
        return hsic(grams, grams)

    return _apply_to_pyramids(layer, inner)


def _apply_to_pyramids(layer: Any, inner: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Return `inner(branch weights)` of a pyramid, or of every pyramid of a joint layer, padded with 0."""
    if not isinstance(layer, JointPyramid):
        return inner(_branch_weights(layer))
    matrices = [inner(_branch_weights(part)) for part in layer.pyramids if isinstance(part, Pyramid)]
    most = max(map(len, matrices))
    return torch.stack([nn.functional.pad(each, (0, most - len(each)) * 2) for each in matrices])


def _branch_weights(pyramid: Pyramid) -> list[Tensor]:
    """Return the weight matrix of every branch in eval mode, over all groups. Shape: (out, C) each"""
    return [torch.block_diag(*fold(chain)[0].double()) for chain in pyramid.chains]


def normalise_hsic(inner: Tensor) -> Tensor:
    """Return CKA from the inner products (HSIC) of all pairs. Shape: (*, branches, branches)"""
    own = inner.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    scale = own.unsqueeze(-1) * own.unsqueeze(-2)
    return torch.where(scale > 0, inner / scale, 0.0)
