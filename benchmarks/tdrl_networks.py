"""The networks of the TDRL study by name: small ViTs, ResNet-20 and MobileOne-S0, plain, with pyramids or branches."""

import timm
import torch
import torch.nn.functional as F
from timm.models.byobnet import LayerFn, MobileOneBlock
from timm.utils.model import reparameterize_model
from torch import Tensor, nn

import isomorph as iso
from isomorph.models.tdrl_vit import PYRAMID_LAYERS

PARTS = {
    "qkv": PYRAMID_LAYERS[:1],
    "v": ("blocks.*.attn.v",),
    "mlp": PYRAMID_LAYERS[1:],
    "fc1": PYRAMID_LAYERS[1:2],
    "qkv-fc1": PYRAMID_LAYERS[:2],
}
BLOCKS = ("stem", "stages.?.?", "stages.?.??")
CONVOLUTIONS = {"cifar_resnet20": ("layer?.*.conv?",), "mobileone_s0": BLOCKS}
PATCH = {"vit": 8, "vit patch 4": 4}
"""The ViTs by name, with the height and width of their patches: 16 and 64 tokens."""


def build(network: str, form: str, seed: int, size: int = 32) -> nn.Module:
    """Return an untrained network for images of this height and width.

    `form` is "plain", "repvgg" (of MobileOne: its own branches, computed as one convolution), or a layout of
    `LinearToPyramid` followed by options: a rectification, same-function (pyramids are initialised as in the paper
    otherwise), one of `PARTS`; jax, which initialises all other layers as JAX's ViT, or xavier, only the linear ones of
    the blocks (with small-proj: except the output projections of attention); drop-path, at a rate of 0.1 in the last
    block.
    """
    torch.manual_seed(seed)
    branched = network == "mobileone_s0"
    layout, *options = form.split()
    start = "jax" if "jax" in options else ""
    dropped = 0.1 if "drop-path" in options else 0.0
    model = vit(PATCH[network], start, dropped) if network in PATCH else timm.create_model(network, num_classes=10)
    if start and "small-proj" in options:
        for block in model.blocks:  # type: ignore[union-attr]
            nn.init.trunc_normal_(block.attn.proj.weight, std=0.02)
    if branched and size == 32:
        model = at_stride_16(model)
    if layout == "repvgg":
        return model if branched else add_branches(model)
    if "xavier" in options:
        model = xavier(model, ("attn.proj",) if "small-proj" in options else ())
    if layout == "plain":
        return remove_branches(model) if branched else model
    part = next((PARTS[option] for option in options if option in PARTS), PYRAMID_LAYERS)
    rectify = next((o for o in options if o in ("none", "rescale", "batchnorm")), "paper")
    init = "same-function" if "same-function" in options else "paper"
    rule = iso.LinearToPyramid(layout, init=init, rectify=rectify)
    return iso.recast(model, rule, where=CONVOLUTIONS.get(network, part))


class PatchProjection(nn.Conv2d):
    """A patch embedding as a linear layer on patches, which vmap stacks well; a convolution would become a grouped one.

    Shape: x (B, 3, H, W) -> (B, C, H / p, W / p)
    """

    def forward(self, x: Tensor) -> Tensor:
        high, wide = self.kernel_size
        patches = x.unflatten(3, (-1, wide)).unflatten(2, (-1, high)).permute(0, 2, 4, 1, 3, 5)
        return F.linear(patches.flatten(3), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def vit(patch: int = 8, start: str = "", drop_path: float = 0.0) -> nn.Module:
    """Return timm's ViT of width 64, with 6 blocks of 4 heads, for 32 x 32 images; `start` is timm's `weight_init`."""
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=patch, embed_dim=64, depth=6, num_heads=4, class_token=False,
        global_pool="avg", num_classes=10, weight_init=start,
        drop_path_rate=drop_path,
    )  # fmt: skip
    model.patch_embed.proj.__class__ = PatchProjection
    for block in model.blocks:
        block.attn.fused_attn = not torch.cuda.is_available()  # vmap, which is for GPUs, cannot stack the fused form
    return model


def xavier(model: nn.Module, but: tuple[str, ...] = ()) -> nn.Module:
    """Initialise the linear layers of the blocks as pyramids are, but those whose names end so."""
    for name, module in model.blocks.named_modules():  # type: ignore[union-attr]
        if isinstance(module, nn.Linear) and not name.endswith(but):
            nn.init.xavier_uniform_(module.weight)
    return model


def add_branches(model: nn.Module) -> nn.Module:
    """Replace conv + BatchNorm in the blocks of a CIFAR ResNet by timm's 3x3, 1x1 and identity branches."""
    for module in list(model.modules()):
        for number in (1, 2):
            conv = getattr(module, f"conv{number}", None)
            if module is not model and isinstance(conv, nn.Conv2d):
                block = MobileOneBlock(conv.in_channels, conv.out_channels, 3, conv.stride[0], layers=LayerFn())
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
            model.set_submodule(name, nn.Sequential(first.conv, nn.BatchNorm2d(first.conv.out_channels), block.act))
    return model


def fused(model: nn.Module) -> nn.Module:
    """Return the network for inference, with one layer for each pyramid or block of branches."""
    return reparameterize_model(iso.fuse(model), inplace=True)
