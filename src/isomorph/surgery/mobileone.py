"""MobileOne's blocks of parallel branches: computed as one convolution in training, and merged into one."""

import copy
from typing import Any

import torch
from timm.layers import ConvNormAct, register_notrace_module
from timm.models.byobnet import MobileOneBlock
from torch import Tensor, nn

from isomorph.layers.affine_chain import uses_batch_statistics
from isomorph.layers.branched_conv import Unit, convolve_units
from isomorph.layers.pyramid import sync_group
from isomorph.layers.tokens import Window, parse_statistics
from isomorph.surgery.fuse import Fuse
from isomorph.surgery.layer_checks import overridden_methods
from isomorph.surgery.linear_chains import absorb_conv_biases, is_plain_norm, linear_mismatch


def block_mismatch(block: MobileOneBlock) -> str | None:
    """Return how a block differs from timm's MobileOneBlock with its branches, or None."""
    if block.reparam_conv is not None:
        return "it is already fused; recast its reparam_conv instead"
    if isinstance(block, CombinedBlock):
        return "its branches are computed as one convolution already"
    if methods := " and ".join(overridden_methods(block, MobileOneBlock)):
        return f"{type(block).__name__} overrides {methods} of timm's MobileOneBlock"
    if type(block.drop_path) is not nn.Identity:
        return "it has stochastic depth (drop_path)"
    branches = [(name, part) for name, part in block.named_modules() if name.startswith(("conv_kxk.", "conv_scale"))]
    for name, part in branches:
        if isinstance(part, nn.Conv2d) and (reason := linear_mismatch(part)):
            return f"its {name}: {reason}"
        if isinstance(part, ConvNormAct) and (overridden_methods(part, ConvNormAct) or part.aa is not None):
            return f"its {name} is not a convolution and a BatchNorm alone"
    norms = [part.bn for _, part in branches if isinstance(part, ConvNormAct)]
    if not all(map(is_plain_norm, norms if block.identity is None else [*norms, block.identity])):
        return "its branches have norms other than plain BatchNorm"
    return None


@register_notrace_module
class CombinedBlock(MobileOneBlock):
    """MobileOne's block whose branches are one convolution in training too; convolutions may be pyramids.

    Source: Vasu et al., MobileOne (2023), section 3.2; TDRL A.4; differs: computed in closed form, exactly
    """

    statistics = 1.0
    """The part of the images, or of the positions in a 1x1 block, of which BatchNorms take mean and variance."""

    def forward(self, x: Tensor) -> Tensor:
        units = self.units()
        if self.reparam_conv is not None or not any(uses_batch_statistics(unit.norm) for unit in units):
            return super().forward(x)
        conv = self.conv_kxk[0].conv
        window = Window(conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)
        return self.act(self.attn(convolve_units(x, units, window, self.statistics, sync_group(self))))

    def units(self) -> list[Unit]:
        """Return the branches; none after merging."""
        if self.reparam_conv is not None:
            return []
        scale = [] if self.conv_scale is None else [self.conv_scale]
        units = [Unit(branch.conv, branch.bn) for branch in (*self.conv_kxk, *scale)]
        return units if self.identity is None else [*units, Unit(None, self.identity)]

    def reparameterize(self) -> None:
        """Merge the branches, as timm's `reparameterize_model` asks for; it ignores the biases of pyramids."""
        for name, branch in enumerate(self.conv_kxk):
            if Fuse().accepts(branch):
                self.conv_kxk[name] = Fuse().build(branch)
        super().reparameterize()


def combine(block: MobileOneBlock, statistics: float | str) -> CombinedBlock:
    """Return a copy of a block that computes its branches as one convolution, with statistics of a part of a batch."""
    combined: Any = copy.deepcopy(block)
    combined.__class__, combined.statistics = CombinedBlock, parse_statistics(statistics)
    return combined


def is_pointwise_block(block: MobileOneBlock) -> bool:
    """True if all branches of a block are 1x1 convolutions, so that the block is one linear map of every pixel."""
    return block.conv_kxk[0].conv.kernel_size == (1, 1)


@torch.no_grad()
def merge_branches(block: MobileOneBlock) -> nn.Conv2d:
    """Merge all branches of a MobileOne block in eval mode into one convolution."""
    fused = copy.deepcopy(block).double().eval()
    absorb_conv_biases(fused)
    fused.reparameterize()
    return fused.reparam_conv.to(next(block.parameters()).dtype)
