"""ResNet-20 and MobileOne-S0 for CIFAR-10, plain, with pyramids, or with RepVGG's or MobileOne's branches."""

import timm
from timm.models.byobnet import LayerFn, MobileOneBlock
from torch import nn

import isomorph as iso

BLOCKS = ("stem", "stages.?.?", "stages.?.??")
CONVOLUTIONS = {"cifar_resnet20": ("layer?.*.conv?",), "mobileone_s0": BLOCKS}


def build(network: str, form: str, size: int = 32) -> nn.Module:
    """Return an untrained network for images of this height and width.

    `form` is "plain", "repvgg" (of MobileOne: its own branches), or a layout of `LinearToPyramid`.
    """
    branched, model = network == "mobileone_s0", timm.create_model(network, num_classes=10)
    if branched and size == 32:
        model = at_stride_16(model)
    if form == "repvgg":
        return model if branched else add_branches(model)
    if form == "plain":
        return remove_branches(model) if branched else model
    return iso.recast(model, iso.LinearToPyramid(form, init="paper"), where=CONVOLUTIONS[network])


def add_branches(model: nn.Module) -> nn.Module:
    """Replace conv + BatchNorm in the blocks of a CIFAR ResNet by timm's 3x3, 1x1 and identity branches."""
    for module in list(model.modules()):
        for number in (1, 2):
            conv = getattr(module, f"conv{number}", None)
            if module is not model and isinstance(conv, nn.Conv2d):
                block = MobileOneBlock(
                    conv.in_channels, conv.out_channels, 3, conv.stride[0], layers=LayerFn()
                )
                block.act = nn.Identity()
                block.stride = conv.stride  # read by the shortcut
                setattr(module, f"conv{number}", block)
                setattr(module, f"bn{number}", nn.Identity())
    return model


def at_stride_16(model: nn.Module) -> nn.Module:
    """Let the stem of a MobileOne keep the size of a 32 x 32 image."""
    for module in model.stem.modules():  # type: ignore[union-attr]
        if isinstance(module, nn.Conv2d):
            module.stride = (1, 1)
    return model


def remove_branches(model: nn.Module) -> nn.Module:
    """Replace each block of a MobileOne by its first convolution with BatchNorm, and the activation."""
    for name, block in list(model.named_modules()):
        if isinstance(block, MobileOneBlock):
            first = block.conv_kxk[0]
            model.set_submodule(
                name, nn.Sequential(first.conv, nn.BatchNorm2d(first.conv.out_channels), block.act)
            )
    return model
