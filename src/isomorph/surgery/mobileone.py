"""Compute the parallel branches of MobileOne's blocks as one convolution in training, and merge them for inference."""

import copy
from typing import Any

import torch
from timm.layers import ConvNormAct, register_notrace_module
from timm.models.byobnet import MobileOneBlock
from torch import Tensor, nn

from isomorph.layers.pyramid.batchnorm import uses_batch_statistics
from isomorph.layers.pyramid.conv import PyramidConv2d, Unit, convolve_units
from isomorph.layers.pyramid.moments import sync_group
from isomorph.layers.pyramid.tokens import Window
from isomorph.surgery.linear_layers import is_plain_norm, linear_mismatch
from isomorph.surgery.plain_layers import describe_attachments, overridden_methods

_BRANCHES = ("conv_kxk.", "conv_scale", "identity")
"""How the names of the parts of a block's branches begin."""


def block_mismatch(block: MobileOneBlock) -> str | None:
    """Return how a block differs from timm's MobileOneBlock with its branches, or None."""
    if block.reparam_conv is not None:
        return "it is already fused; recast its reparam_conv instead"
    if isinstance(block, CombinedBlock):
        return "its branches are computed as one convolution already"
    if methods := " and ".join(overridden_methods(block, MobileOneBlock)):
        return f"{type(block).__name__} overrides {methods} of timm's MobileOneBlock"
    if type(block.drop_path) is not nn.Identity:
        return "it has stochastic depth, which drops branches; create the model with drop_path_rate=0"
    branches = [(name, part) for name, part in block.named_modules() if name.startswith(_BRANCHES)]
    for name, part in branches:
        if attached := describe_attachments(part):
            return f"its {name} has {attached}, which training would skip"
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

    Branches that do not read the same patches, as after an edit of one of them, are computed as timm does.

    Shape: x (B, C, H, W) -> (B, out, H', W')
    Raises: ValueError when training on a single position.
    Source: Vasu et al., MobileOne (2023), section 3.2; TDRL A.4; differs: computed in closed form, exactly
    """

    def forward(self, x: Tensor) -> Tensor:
        window = None if self.reparam_conv is not None else shared_window(self)
        units = [] if window is None else self.units()
        if window is None or not any(uses_batch_statistics(unit.norm) for unit in units):
            return super().forward(x)
        y = convolve_units(x, units, window, sync_group(self))
        return super().forward(x) if y is None else self.act(self.attn(y))

    def units(self) -> list[Unit]:
        """Return the branches."""
        scale = [] if self.conv_scale is None else [self.conv_scale]
        units = [Unit(branch.conv, branch.bn) for branch in (*self.conv_kxk, *scale)]
        return units if self.identity is None else [*units, Unit(None, self.identity)]


def shared_window(block: MobileOneBlock) -> Window | None:
    """Return the window of a block's convolutions, or None if its branches do not all read patches of that window.

    A 1x1 convolution and the identity have to read the middle of each patch.
    """
    convs = [getattr(branch, "conv", None) for branch in block.conv_kxk]
    windows = {_window(conv) for conv in convs if type(conv) in (nn.Conv2d, PyramidConv2d)}
    window = windows.pop() if len(windows) == 1 else None
    if window is None or not all(type(conv) in (nn.Conv2d, PyramidConv2d) for conv in convs):
        return None
    scale: Any = block.conv_scale
    if scale is None and block.identity is None:
        return window
    high, wide = window.kernel_size
    margin = (window.padding[0] - high // 2, window.padding[1] - wide // 2)
    middle = window._replace(kernel_size=(1, 1), padding=margin)
    conv = getattr(scale, "conv", None)
    scaled = scale is None or (type(conv) is nn.Conv2d and _window(conv) == middle)
    odd = high % 2 == wide % 2 == 1
    return window if odd and scaled and (block.identity is None or margin == (0, 0)) else None


def _window(conv: Any) -> Window | None:
    """Return the window of a convolution or of a pyramid; None for other layers, and for padding given as text."""
    if type(conv) is PyramidConv2d:
        return conv.window
    if type(conv) is not nn.Conv2d or isinstance(conv.padding, str):
        return None
    return Window(conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)  # type: ignore[arg-type]


def combine(block: MobileOneBlock) -> CombinedBlock:
    """Return a copy of a block that computes its branches as one convolution."""
    combined: Any = copy.deepcopy(block)
    combined.__class__ = CombinedBlock
    return combined


def is_pointwise_block(block: MobileOneBlock) -> bool:
    """True if all branches of a block are 1x1 convolutions, so that the block is one linear map of every pixel."""
    return block.conv_kxk[0].conv.kernel_size == (1, 1)


@torch.no_grad()
def merge_branches(block: MobileOneBlock) -> nn.Conv2d:
    """Merge all branches of a MobileOne block in eval mode into one convolution."""
    fused = copy.deepcopy(block).double().eval()
    with next(block.parameters()).device:  # where timm makes the convolution
        fused.reparameterize()
    return fused.reparam_conv.to(next(block.parameters()).dtype)
