"""MobileOne's blocks of parallel branches: with pyramids in them, and merged into one convolution."""

import copy
from typing import Any

from timm.layers import ConvNormAct, register_notrace_module
from timm.models.byobnet import MobileOneBlock
from torch import Tensor, nn

from isomorph.layers.pyramid.conv import convolve_normalised
from isomorph.surgery.plain_layers import is_plain_norm, linear_mismatch, overridden_methods


@register_notrace_module
class PyramidBlock(MobileOneBlock):
    """MobileOne's block with pyramids for its k x k convolutions, which are one convolution in training too.

    Shape: x (B, C, H, W) -> (B, out, H', W')
    Source: Vasu et al., MobileOne (2023), section 3.2; TDRL A.4; differs: computed in closed form, exactly
    """

    def forward(self, x: Tensor) -> Tensor:
        y = None if self.reparam_conv is not None else convolve_normalised(x, self.conv_kxk)
        if y is None:
            return super().forward(x)
        others = (part(x) for part in (self.conv_scale, self.identity) if part is not None)
        return self.act(self.attn(sum(others, y)))


def block_mismatch(block: MobileOneBlock) -> str | None:
    """Return how a block differs from timm's MobileOneBlock with its branches, or None."""
    if block.reparam_conv is not None:
        return "it is already fused; recast its reparam_conv instead"
    if methods := " and ".join(overridden_methods(block, MobileOneBlock)):
        return f"{type(block).__name__} overrides {methods} of timm's MobileOneBlock"
    if type(block.drop_path) is not nn.Identity:
        return "it has stochastic depth, which drops branches; create the model with drop_path_rate=0"
    branches: list[Any] = [*block.conv_kxk, *filter(None, [block.conv_scale])]
    for branch in branches:
        if overridden_methods(branch, ConvNormAct) or branch.aa is not None:
            return "one of its branches is not a convolution and a BatchNorm alone"
        if reason := linear_mismatch(branch.conv):
            return f"one of its branches: {reason}"
    if not all(map(is_plain_norm, [*(branch.bn for branch in branches), *filter(None, [block.identity])])):
        return "its branches have norms other than plain BatchNorm"
    return None


def merge_branches(block: MobileOneBlock) -> nn.Conv2d:
    """Merge all branches of a MobileOne block in eval mode into one convolution."""
    fused = copy.deepcopy(block).double().eval()
    with next(block.parameters()).device:  # where timm makes the convolution
        fused.reparameterize()
    return fused.reparam_conv.to(next(block.parameters()).dtype)
