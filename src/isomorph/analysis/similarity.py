"""How alike representations are: centred kernel alignment, of any features and of the branches of pyramids."""

from typing import Any

import torch
from torch import Tensor, nn

from isomorph.analysis.taps import visit
from isomorph.errors import UserError
from isomorph.layers import JointPyramid
from isomorph.layers.affine_chain import collapse_chain
from isomorph.layers.moments import measure
from isomorph.layers.pyramid import Pyramid
from isomorph.surgery.recast import outermost


def linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """Centred kernel alignment of two sets of features of the same samples: 1 alike up to rotation, 0 unrelated.

    |Y^T X|^2 / (|X^T X| |Y^T Y|), columns centred. Shape: x (samples, p), y (samples, q) -> ()
    Source: Kornblith et al. (2019) eq. 3, as TDRL Fig. 2 (c) measures branches
    Raises: UserError when the samples are not as many.
    """
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise UserError(f"CKA compares (samples, features) of the same samples, not {tuple(x.shape)}, {tuple(y.shape)}")
    x, y = (t.double() - t.double().mean(0) for t in (x, y))
    if len(x) < max(x.shape[1], y.shape[1]):  # fewer samples than features: the same number from their Gram matrices
        inner = (x @ x.T * (y @ y.T)).sum()
        return inner / ((x @ x.T).norm() * (y @ y.T).norm())
    return (y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())


def branch_similarity(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Linear CKA between the branches of every pyramid, the skip last, on what it really receives, in eval mode.

    0 where a branch is silent, as all but the skip are when born with the same function. Computed from the covariance S
    of the input: branches A and B have |A S B^T|^2 / (|A S A^T| |B S B^T|).

    Shape: batch (B, C, H, W) -> {name: (branches, branches)}; of a joint pyramid (pyramids, branches, branches)
    Source: TDRL Fig. 2 (c)
    Raises: UserError when the model has no pyramid.
    """
    layers = outermost(model, lambda module: isinstance(module, Pyramid | JointPyramid))
    if not layers:
        raise UserError("the model has no pyramids; recast it with LinearToPyramid, or it is fused already")
    return visit(model, batch, look, layers)


def look(layer: Any, x: Tensor) -> Tensor:
    """Similarities within one layer."""
    if isinstance(layer, JointPyramid):
        covariance = measure(x).covariance
        return torch.stack([similarities(pyramid, covariance) for pyramid in layer.pyramids])  # type: ignore[arg-type]
    window = getattr(layer, "window", None)
    return similarities(layer, measure(x, window and window._replace(groups=1)).covariance)


def similarities(pyramid: Pyramid, covariance: Tensor) -> Tensor:
    """Linear CKA of all pairs of branches, over all groups. Shape: (C, C) -> (branches, branches)"""
    maps = [collapse_chain(chain, None, pyramid.origin())[0].double() for chain in pyramid.chains]
    maps = [a if a.ndim == 2 else torch.block_diag(*a) for a in maps]  # (out, C)
    covariance = covariance.double()
    inner = torch.stack([torch.stack([(a @ covariance @ b.mT).norm() ** 2 for b in maps]) for a in maps])
    own = inner.diagonal().sqrt()
    return torch.where(inner > 0, inner / (own[:, None] * own), 0.0)
