"""MobileOne's blocks of parallel branches: with pyramids in them, and 1x1 blocks as one convolution."""

import copy
from typing import Any

import torch
from timm.layers import ConvNormAct, register_notrace_module
from timm.models.byobnet import MobileOneBlock
from torch import Tensor, nn

from isomorph.layers.pyramid.batchnorm import fold, normalise
from isomorph.layers.pyramid.conv import convolve_normalised
from isomorph.surgery.plain_layers import (
    conv_like,
    is_plain_norm,
    linear_mismatch,
    override_reason,
)


@register_notrace_module
class PyramidBlock(MobileOneBlock):
    """MobileOne's block with pyramids for its k x k convolutions, which are one convolution in training too.

    Shape: x (B, C, H, W) -> (B, out, H', W')
    Source: Vasu et al., MobileOne (2023), section 3.2; TDRL A.4; differs: computed in closed form, exactly
    """

    def forward(self, x: Tensor) -> Tensor:
        y = None
        if self.reparam_conv is None:
            y = convolve_normalised(x, self.conv_kxk)
        if y is None:
            return super().forward(x)
        for part in (self.conv_scale, self.identity):
            if part is not None:
                y = y + part(x)
        return self.act(self.attn(y))


def block_mismatch(block: MobileOneBlock) -> str | None:
    """Return how a block differs from timm's MobileOneBlock with its branches, or None."""
    if block.reparam_conv is not None:
        return "it is already fused; recast its reparam_conv instead"
    reason = override_reason(block, MobileOneBlock)
    if reason:
        return reason
    if type(block.drop_path) is not nn.Identity:
        return (
            "it has stochastic depth, which drops branches; create the model with drop_path_rate=0"
        )
    branches: list[Any] = list(block.conv_kxk)
    if block.conv_scale is not None:
        branches.append(block.conv_scale)
    for branch in branches:
        if override_reason(branch, ConvNormAct) or branch.aa is not None:
            return "one of its branches is not a convolution and a BatchNorm alone"
        reason = linear_mismatch(branch.conv)
        if reason:
            return f"one of its branches: {reason}"
    norms = [branch.bn for branch in branches]
    if block.identity is not None:
        norms.append(block.identity)
    if not all(map(is_plain_norm, norms)):
        return "its branches have norms other than plain BatchNorm"
    return None


@torch.no_grad()
def merge_branches(block: MobileOneBlock) -> nn.Conv2d:
    """Return the convolution that the branches of a 1x1 block are in eval mode."""
    exact: Any = copy.deepcopy(block).double().eval()
    first = exact.conv_kxk[0].conv
    maps = [fold([branch.conv, branch.bn]) for branch in exact.conv_kxk]
    if exact.identity is not None:
        eye = torch.eye(first.weight.shape[1]).to(first.weight).expand(first.groups, -1, -1)
        maps.append(normalise(exact.identity, eye, eye.new_zeros(eye.shape[:2])))
    weights, biases = zip(*maps, strict=True)  # (G, out, C), (G, out)
    weight = nn.Parameter(sum(weights).view_as(first.weight))
    bias = nn.Parameter(sum(biases).flatten())
    return conv_like(first, weight, bias).to(next(block.parameters()).dtype)
