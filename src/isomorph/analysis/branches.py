"""How alike the branches of pyramids are, on one batch or over a loader (TDRL Fig. 2 c)."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.analysis.batches import batches
from isomorph.analysis.capture import capture_inputs
from isomorph.analysis.cka import matching_batches, hsic
from isomorph.errors import UserError
from isomorph.layers import JointPyramid
from isomorph.layers.affine_chain import collapse_chain
from isomorph.layers.moments import measure_moments, read_tokens
from isomorph.layers.pyramid import Pyramid
from isomorph.surgery.recast import outermost_modules


def branch_similarity(model: nn.Module, data: Tensor | Iterable[Any]) -> dict[str, Tensor]:
    """Linear CKA between the branches of every pyramid, the skip last, on what it really receives, in eval mode.

    Of one batch the samples are its tokens: with S the covariance of the input, branches A and B have
    |A S B^T|^2 / (|A S A^T| |B S B^T|). Over a loader they are its images, each with all that a branch makes of it, and
    unbiased HSIC is summed batch by batch, as `cka` does it: batches of fewer than 4 images are skipped.

    0 where a branch is silent, as all but the skip are when initialised with the same function, and where a pyramid of
    a joint layer has fewer branches than another.

    Shape: a batch (B, C, H, W), or a loader of such -> {name: (branches, branches)}; of a joint layer
    (pyramids, branches, branches), its linear parts left out
    Source: TDRL Fig. 2 (c); over a loader Nguyen, Raghu, Kornblith (2021), eq. 2 to 4
    Raises: UserError when the model has no pyramid, or no batch of a loader has 4 images.
    """
    layers = outermost_modules(model, lambda module: isinstance(module, Pyramid | JointPyramid))
    if not layers:
        raise UserError("the model has no pyramids; recast it with LinearToPyramid, or it is fused already")
    if isinstance(data, Tensor):
        return capture_inputs(model, data, _token_cka, layers)
    device, sums = next(model.parameters()).device, dict[str, Tensor]()
    for (batch,) in matching_batches((batch,) for batch in batches(data)):
        look = partial(_image_hsic, images=len(batch))
        for name, found in capture_inputs(model, batch.to(device), look, layers).items():
            sums[name] = sums.get(name, torch.zeros_like(found)) + found
    return {name: normalise_hsic(inner) for name, inner in sums.items()}


def _token_cka(layer: Any, x: Tensor) -> Tensor:
    """CKA within one layer, its tokens the samples.

    Shape: -> (branches, branches), or (pyramids, branches, branches)
    """
    window = getattr(layer, "window", None)
    covariance = measure_moments(x, window and window._replace(groups=1)).covariance.double()

    def inner(maps: list[Tensor]) -> Tensor:
        return torch.stack([torch.stack([(a @ covariance @ b.mT).norm() ** 2 for b in maps]) for a in maps])

    return normalise_hsic(_apply_to_pyramids(layer, inner))


def _image_hsic(layer: Any, x: Tensor, images: int) -> Tensor:
    """Unbiased HSIC within one layer, the images the samples, whose windows follow each other. Shape: as `_token_cka`"""
    window = getattr(layer, "window", None)
    tokens = read_tokens(x, window and window._replace(groups=1)).double()  # (B N, C)

    def gram(weight: Tensor) -> Tensor:
        y = (tokens @ weight.mT).view(images, -1)  # (B, N out)
        y = y - y.mean(0)
        return (y @ y.T).fill_diagonal_(0.0)

    def inner(maps: list[Tensor]) -> Tensor:
        grams = torch.stack([gram(weight) for weight in maps])  # (branches, B, B)
        return hsic(grams, grams)

    return _apply_to_pyramids(layer, inner)


def _apply_to_pyramids(layer: Any, inner: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """What `inner` gives of the linear maps of a pyramid, or of every pyramid of a joint layer, filled up with 0."""
    if not isinstance(layer, JointPyramid):
        return inner(_branch_maps(layer))
    found = [inner(_branch_maps(part)) for part in layer.pyramids if isinstance(part, Pyramid)]
    most = max(map(len, found))
    return torch.stack([nn.functional.pad(each, (0, most - len(each)) * 2) for each in found])


def _branch_maps(pyramid: Pyramid) -> list[Tensor]:
    """The weight of every branch in eval mode, over all groups. Shape: (out, C) each"""
    maps = [collapse_chain(chain, None, pyramid.zero_mean())[0].double() for chain in pyramid.chains]
    return [a if a.ndim == 2 else torch.block_diag(*a) for a in maps]


def normalise_hsic(inner: Tensor) -> Tensor:
    """CKA from the inner products of all pairs. Shape: (*, branches, branches)"""
    own = inner.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    scale = own.unsqueeze(-1) * own.unsqueeze(-2)
    return torch.where(scale > 0, inner / scale, 0.0)
