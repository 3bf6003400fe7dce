"""Architectures of timm that have the tensors of a checkpoint."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import timm

from isomorph.checkpoints.arguments import build_empty, layer_names, shapes_fit
from isomorph.errors import UserError

_COMMON = {
    "layer1.0.conv1.weight": (
        *("resnet18", "resnet34", "resnet26", "resnet50", "resnet101", "resnet152", "wide_resnet50_2"),
        *("resnet18d", "resnet34d", "resnet26d", "resnet50d", "resnet101d", "resnet152d", "resnetrs50"),
        *("resnext50_32x4d", "resnext101_32x8d", "seresnet50", "cifar_resnet20", "cifar_resnet56"),
    ),
    "blocks.0.attn.qkv.weight": (
        *("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224", "vit_large_patch16_224"),
        *("vit_small_patch32_224", "vit_base_patch32_224", "vit_base_patch8_224", "vit_small_patch14_dinov2"),
        *("vit_base_patch14_dinov2", "deit3_small_patch16_224", "deit3_base_patch16_224", "beit_base_patch16_224"),
        *("deit_tiny_distilled_patch16_224", "deit_small_distilled_patch16_224", "cait_xxs24_224"),
    ),
    "stages.0.blocks.0.conv_dw.weight": (
        *("convnext_atto", "convnext_femto", "convnext_pico", "convnext_nano", "convnext_tiny", "convnext_small"),
        *("convnext_base", "convnext_large", "convnextv2_atto", "convnextv2_nano", "convnextv2_tiny"),
    ),
    "conv_stem.weight": (
        *("efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3", "efficientnet_b4"),
        *("mobilenetv2_100", "mobilenetv3_small_100", "mobilenetv3_large_100", "tf_efficientnetv2_s", "mnasnet_100"),
    ),
    "layers.0.blocks.0.attn.qkv.weight": (
        *("swin_tiny_patch4_window7_224", "swin_small_patch4_window7_224", "swin_base_patch4_window7_224"),
    ),
    "features.0.weight": ("vgg11", "vgg13", "vgg16", "vgg19", "vgg11_bn", "vgg13_bn", "vgg16_bn", "vgg19_bn"),
    "features.denseblock1.denselayer1.conv1.weight": ("densenet121", "densenet169", "densenet201", "densenet161"),
    "s1.b1.conv1.conv.weight": ("regnetx_002", "regnety_002", "regnety_008", "regnety_016", "regnety_032"),
}
"""Common architectures, by the name of a tensor that only they have; of several with equal tensors, the usual one."""


def guess_architecture(tensors: Mapping[str, Any]) -> str | None:
    """Return the name of a common model whose tensors have exactly these names and shapes; None if there is none.

    Classifier, position embedding and the first convolution, which depend on classes and images, may differ in shape.
    """
    candidates = (name for marker, names in _COMMON.items() if marker in tensors for name in names)
    return next((name for name in candidates if _fits(name, tensors)), None)


def _fits(name: str, tensors: Mapping[str, Any]) -> bool:
    """True if a model has these tensors, apart from those that depend on classes and images."""
    config = timm.get_pretrained_cfg(name)
    without = [f"{layer}." for entry in (config.classifier, config.first_conv) for layer in layer_names(entry)]
    with suppress(UserError):
        return shapes_fit(build_empty(name, {}), tensors, [*without, "pos_embed"])
    return False


def architecture_hint(tensors: Mapping[str, Any]) -> str:
    """Return what to give as --arch, in words: the architecture with these tensors, or where to look."""
    if name := guess_architecture(tensors):
        return f"its tensors are those of {name}: give --arch {name}"
    return "give --arch NAME, one of timm.list_models(); another model opens in Python: iso.load(path, base=MyModel())"
