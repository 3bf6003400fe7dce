"""MobileOne's blocks of parallel branches: merged into one convolution, or with pyramids as their convolutions."""

import copy

import torch
from timm.layers import ConvNormAct
from timm.models.byobnet import MobileOneBlock
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.surgery.fuse import Fuse
from isomorph.surgery.layer_checks import overridden_methods
from isomorph.surgery.linear_chains import absorb_conv_biases, is_plain_norm, linear_mismatch


def block_mismatch(block: MobileOneBlock) -> str | None:
    """Return how a block differs from timm's MobileOneBlock with its branches, or None."""
    if methods := " and ".join(overridden_methods(block, MobileOneBlock)):
        return f"{type(block).__name__} overrides {methods} of timm's MobileOneBlock"
    if block.reparam_conv is not None:
        return "it is already fused; recast its reparam_conv instead"
    if type(block.drop_path) is not nn.Identity:
        return "it has stochastic depth (drop_path)"
    for name, part in block.conv_kxk.named_modules():
        if isinstance(part, nn.Conv2d) and (reason := linear_mismatch(part)):
            return f"its conv_kxk.{name}: {reason}"
        if isinstance(part, ConvNormAct) and overridden_methods(part, ConvNormAct):
            return f"its conv_kxk.{name} overrides methods of timm's ConvNormAct"
    norms = [*block.conv_kxk.modules(), block.identity] if is_pointwise_block(block) else []
    if any(isinstance(part, _BatchNorm) and not is_plain_norm(part) for part in norms):
        return "its branches have norms other than plain BatchNorm"
    return None


class CombinedBlock(MobileOneBlock):
    """MobileOne's block with pyramids as its convolutions."""

    def reparameterize(self) -> None:
        """Merge the branches, as timm's `reparameterize_model` asks for; it ignores the biases of pyramids."""
        for name, branch in enumerate(self.conv_kxk):
            if Fuse().accepts(branch):
                self.conv_kxk[name] = Fuse().build(branch)
        super().reparameterize()


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
