"""Similarity between the branches of pyramids (TDRL Fig. 2 c)."""

from typing import Any

import torch
from torch import Tensor, nn

from isomorph.analysis.layer_attention import capture_inputs
from isomorph.errors import UserError
from isomorph.layers import JointPyramid
from isomorph.layers.pyramid.base import Pyramid
from isomorph.layers.pyramid.batchnorm import fold
from isomorph.layers.pyramid.moments import measure_moments
from isomorph.operations import unwrap
from isomorph.surgery.modules import outermost_modules


def branch_similarity(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Return the linear CKA between the branches of every pyramid, the skip branch last, in eval mode.

    The samples are the tokens of a batch: with S the covariance of the layer's input, branches A and B have
    |A S B^T|^2 / (|A S A^T| |B S B^T|). It is 0 for a branch whose output is 0, as with `init="same-function"` for all
    but the skip, and where a pyramid of a joint layer has fewer branches than another.

    Shape: batch (B, C, H, W) -> {name: (branches, branches)}; for a joint layer (pyramids, branches, branches), without
    its linear parts
    Source: TDRL Fig. 2 (c)
    Raises: UserError if the model has no pyramid.

    >>> cnn = timm.create_model("cifar_resnet20")
    >>> wide = iso.recast(cnn, iso.LinearToPyramid("P-W2S", init="paper"), where="linear")
    >>> tuple(iso.analysis.branch_similarity(wide, torch.randn(4, 3, 32, 32))["linear"].shape)
    (3, 3)
    """
    model = unwrap(model, to_copy=False)
    layers = outermost_modules(model, lambda module: isinstance(module, Pyramid | JointPyramid))
    if not layers:
        raise UserError(
            "the model has no pyramids, or is already fused; recast it with LinearToPyramid first",
        )
    return capture_inputs(model, batch, _token_cka, layers)


def _token_cka(layer: Any, x: Tensor) -> Tensor:
    """Return the CKA between the branches of one layer. Shape: -> (branches, branches), for a joint layer one each"""
    window = getattr(layer, "window", None)
    if window is not None:
        window = window._replace(groups=1)
    covariance = measure_moments(x, window).covariance[0].double()

    def similarities(pyramid: Pyramid) -> Tensor:
        weights = []
        for chain in pyramid.chains:
            by_group, _ = fold(chain)
            weights.append(torch.block_diag(*by_group.double()))  # (out, C)
        inner = covariance.new_zeros(len(weights), len(weights))
        for i, weight in enumerate(weights):
            product = weight @ covariance
            for j in range(i + 1):  # |A S B^T| = |B S A^T|
                inner[i, j] = inner[j, i] = (product @ weights[j].mT).norm() ** 2
        norms = inner.diagonal().sqrt()
        scale = torch.outer(norms, norms)
        return torch.where(scale > 0, inner / scale, 0.0)

    if not isinstance(layer, JointPyramid):
        return similarities(layer)
    matrices = [similarities(part) for part in layer.pyramids if isinstance(part, Pyramid)]
    num_branches = max(map(len, matrices))
    padded = [nn.functional.pad(matrix, (0, num_branches - len(matrix)) * 2) for matrix in matrices]
    return torch.stack(padded)
