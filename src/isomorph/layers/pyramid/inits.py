"""Initial values of pyramids: drawn for training from scratch, or those of a given layer."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.errors import UserError
from isomorph.layers.pyramid.base import Pyramid, set_affine
from isomorph.layers.pyramid.batchnorm import apply_matrix, fold, weight_matrix


@torch.no_grad()
def init_as_mae(model: nn.Module) -> None:
    """Draw Xavier-uniform weights for every matrix, zeros for biases; filters are one matrix, as in MAE's code."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight.view(len(layer.weight), -1))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def init_random(pyramid: Pyramid) -> None:
    """Draw the weights of all layers as MAE does, and reset BatchNorms.

    Source: MAE, whose code TDRL trains with; the paper itself does not say
    """
    init_as_mae(pyramid)
    for norm in pyramid.norms:
        norm.reset_parameters()


@torch.no_grad()
def init_from_affine(pyramid: Pyramid, weight: Tensor, bias: Tensor) -> None:
    """Initialise a pyramid so that it computes y = weight x + bias in eval mode and its branches can be trained.

    The skip computes the map and the last layer of every branch is zero; without a skip, the branches share the map. A
    BatchNorm on the path is the identity for white inputs, such as the output of a LayerNorm. In train mode it
    normalises by the actual batch, so recalibrate it on data first.

    Shape: weight (out, C), bias (out,), with a leading group axis where there are groups
    """
    init_random(pyramid)
    groups = 1 if pyramid.window is None else pyramid.window.groups
    weight = weight.reshape(groups, -1, weight.shape[-1]) / pyramid.output_scale
    bias = bias.reshape(groups, -1) / pyramid.output_scale
    if pyramid.skip is not None:
        set_affine(pyramid.skip, weight, bias)
        for branch in pyramid.branches:
            nn.init.zeros_(branch[-1].weight)  # type: ignore[index]
    else:
        _distribute_map(pyramid, weight, bias)
    if pyramid.norm is not None:
        _make_identity(pyramid.norm, weight, bias)


def _make_identity(norm: _BatchNorm, weight: Tensor, bias: Tensor) -> None:
    """Set a BatchNorm to the identity on weight x + bias for white x. Raises: UserError for one without weights."""
    if norm.weight is None or norm.running_mean is None or norm.running_var is None:
        raise UserError(
            "a BatchNorm without weights or running statistics cannot be the identity; use affine=True",
        )
    norm.running_mean.copy_(bias.flatten())
    norm.running_var.copy_(weight.square().sum(-1).flatten())
    norm.weight.copy_((norm.running_var + norm.eps).sqrt())
    norm.bias.copy_(norm.running_mean)


def _distribute_map(pyramid: Pyramid, weight: Tensor, bias: Tensor) -> None:
    """Initialise branches without a skip so that they sum to the map, and no two of them are equal."""
    branches: list[list[Any]] = [list(branch) for branch in pyramid.branches]  # type: ignore[call-overload]
    own_bias = bias / len(branches)
    if isinstance(branches[0][-1], _BatchNorm):
        scale = weight.square().mean().sqrt()
        noise = torch.randn(len(branches), *weight.shape).to(weight) * scale
        for (linear, norm), extra in zip(branches, noise - noise.mean(0), strict=True):
            own_weight = weight / len(branches) + extra
            set_affine(linear, own_weight, own_bias)
            _make_identity(norm, own_weight, own_bias)
        return
    # (G, C, C), first the rows that span those of the map
    basis = torch.linalg.svd(weight.double(), full_matrices=True).Vh
    for *inner, last in branches:
        for layer in inner[::2]:
            _draw_orthogonal(layer)
        first = weight_matrix(inner[0]).double()
        width = first.shape[-2]
        rotation = torch.linalg.qr(first[..., :width]).Q  # (G, width, width)
        rows = rotation @ basis[..., :width, :]
        set_affine(inner[0], rows, bias.new_zeros(rows.shape[:-1]))
        chain, inner_bias = fold(inner)
        outer = weight.double() / len(branches) @ torch.linalg.pinv(chain.double())
        set_affine(last, outer, own_bias - apply_matrix(outer, inner_bias.double()))


def _draw_orthogonal(layer: nn.Linear | nn.Conv2d) -> None:
    """Draw orthogonal weights, for each group apart."""
    groups = getattr(layer, "groups", 1)
    for group in layer.weight.view(groups, -1, *layer.weight.shape[1:]):
        nn.init.orthogonal_(group)
