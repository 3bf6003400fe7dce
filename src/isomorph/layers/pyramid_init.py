"""How a pyramid is born: freshly drawn, or computing a given affine map in eval mode, ready to learn."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers.affine_chain import collapse_chain, matrix, times
from isomorph.layers.pyramid import Pyramid


@torch.no_grad()
def draw(pyramid: Pyramid) -> None:
    """Every linear layer Xavier-uniform without bias, every BatchNorm at rest: the start of a network from scratch.

    Source: MAE, whose code TDRL trains with; the paper itself is silent
    """
    for layer in pyramid.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, _BatchNorm):
            layer.reset_parameters()


@torch.no_grad()
def carry(pyramid: Pyramid, weight: Tensor, bias: Tensor) -> None:
    """Makes the pyramid compute y = weight x + bias in eval mode; its branches are drawn, and free to learn.

    With a skip, the skip carries the map and every branch ends in zeros, so train mode computes it too. Without one the
    branches share the map. A BatchNorm in the way (on queries and keys, in the naive layout) is at rest for inputs that
    are white, as behind a LayerNorm: in train mode it normalises by what comes, so recalibrate it on data first.

    Shape: weight (out, C), bias (out,), with a leading group axis where there are groups
    """
    draw(pyramid)
    weight, bias = weight / pyramid.factor, bias / pyramid.factor
    if pyramid.skip is not None:
        assign(pyramid.skip, weight, bias)
        for branch in pyramid.branches:
            nn.init.zeros_(branch[-1].weight)  # type: ignore[index]
    else:
        share(pyramid, weight, bias)
    if pyramid.norm is not None:
        rest(pyramid.norm, weight, bias)


def assign(layer: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor) -> None:
    """Sets a layer's map. Shape: weight (G, out, C), bias (G, out)"""
    layer.weight.copy_(weight.reshape(layer.weight.shape))
    assert layer.bias is not None
    layer.bias.copy_(bias.flatten())


def rest(norm: _BatchNorm, weight: Tensor, bias: Tensor) -> None:
    """Makes a BatchNorm of weight x + bias the identity: statistics of white inputs, undone by its own weights."""
    if norm.weight is None or norm.running_mean is None or norm.running_var is None:
        raise UserError("a BatchNorm without weights or statistics cannot be brought to rest; make the pyramid affine")
    norm.running_mean.copy_(bias.flatten())
    norm.running_var.copy_(weight.square().sum(-1).flatten())
    norm.weight.copy_((norm.running_var + norm.eps).sqrt())
    norm.bias.copy_(norm.running_mean)


def share(pyramid: Pyramid, weight: Tensor, bias: Tensor) -> None:
    """Deals the map out to branches without a skip, no two of them alike."""
    branches: list[list[Any]] = [list(branch) for branch in pyramid.branches]  # type: ignore[call-overload]
    parts = len(branches)
    if isinstance(branches[0][-1], _BatchNorm):
        noise = torch.randn(parts, *weight.shape).to(weight) * weight.square().mean().sqrt()
        for (linear, norm), extra in zip(branches, noise - noise.mean(0), strict=True):
            assign(linear, weight / parts + extra, bias / parts)
            rest(norm, weight / parts + extra, bias / parts)
        return
    basis = torch.linalg.svd(weight.double(), full_matrices=True).Vh  # (G, C, C), rows that span those of the map first
    for *inner, last in branches:
        for layer in inner:
            rotate(layer)
        kept = matrix(inner[0]).shape[-2]
        turn = torch.linalg.qr(matrix(inner[0]).double()[..., :kept]).Q  # (G, kept, kept)
        assign(inner[0], turn @ basis[..., :kept, :], bias.new_zeros(turn.shape[:-1]))
        for layer in inner:
            layer.eval()
        chain, centre = collapse_chain(inner, None, weight.new_zeros(weight.shape[:-2] + weight.shape[-1:]))
        outer = weight.double() / parts @ torch.linalg.pinv(chain.double())
        assign(last, outer, bias / parts - times(outer, centre.double()))
        for layer in inner:
            layer.train(pyramid.training)


def rotate(layer: nn.Module) -> None:
    """Orthonormal rows or columns, group by group, of a linear layer; a BatchNorm is left alone."""
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        return
    for group in layer.weight.view(getattr(layer, "groups", 1), -1, *layer.weight.shape[1:]):
        nn.init.orthogonal_(group)
