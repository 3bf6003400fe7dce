"""One small model of every family and of every rule, for laws that hold for all."""

import functools

import timm
import torch

import isomorph as iso
from isomorph.models.coatnet import CoAtNet

SMALL = dict(embed_dim=36, depth=2, img_size=64, num_heads=4)
COATNET = dict(
    depths=(2, 1, 1, 1, 1), widths=(8, 8, 16, 32, 32), head_dim=16, num_classes=3, img_size=64
)
CONVIT = dict(
    embed_dim=32,
    num_heads=4,
    depth=2,
    local_up_to_layer=1,
    patch_size=8,
    img_size=32,
    num_classes=10,
)
SPATIAL = dict(span="spatial", init="paper")
RULES = {
    "gpsa exact": (iso.AttentionToGPSA(gate=0.0), "blocks.*.attn"),
    "gpsa paper": (iso.AttentionToGPSA("paper"), "blocks.*.attn"),
    "refined": (iso.AttentionToRefined(init="paper"), "blocks.*.attn"),
    "refined spatial": (iso.AttentionToRefined(**SPATIAL), "blocks.*.attn"),
    "refined spatial, recomputed": (
        iso.AttentionToRefined(**SPATIAL, recompute=True),
        "blocks.*.attn",
    ),
    "refined row+column": (
        iso.AttentionToRefined(span="row+column", init="paper"),
        "blocks.*.attn",
    ),
    "refined local": (iso.AttentionToRefined(ratio=0, init="paper"), "blocks.*.attn"),
    "refined, all maps": (iso.AttentionToRefined(reduce=False, init="paper"), "blocks.*.attn"),
    "pyramids": (iso.LinearToPyramid(), ["blocks.*.attn.qkv", "blocks.*.mlp.fc?"]),
}


def vit(**kwargs):
    return timm.create_model(
        "vit_tiny_patch16_224", num_classes=3, **{"dynamic_img_size": True, **SMALL, **kwargs}
    )


def recast(rule, **kwargs):
    made = iso.recast(vit(**kwargs), *RULES[rule])
    assert iso.edits(made)
    return made


def named(name, **kwargs):
    return timm.create_model(name, num_classes=3, **kwargs)


MODELS = {
    "convit": functools.partial(named, "convit_ti", **SMALL, local_up_to_layer=1),
    "refined_vit": functools.partial(named, "refined_vit_b", **SMALL, init="paper"),
    "refined_vit shared": functools.partial(named, "refined_vit_s", **SMALL, init="paper"),
    "refined_vit spatial": functools.partial(
        named, "refined_vit_b", **SMALL, span="spatial", init="paper"
    ),
    "refined_vit released": functools.partial(named, "refined_vit_s_released", **SMALL),
    "coatnet": functools.partial(CoAtNet, **COATNET),
    "coatnet post": functools.partial(CoAtNet, **COATNET, relative="post"),
    "tdrl_vit": functools.partial(named, "tdrl_vit_ti", **SMALL),
    "tdrl_vit distilled": functools.partial(named, "tdrl_vit_ti_distilled", **SMALL),
    "vanillanet": functools.partial(named, "vanillanet_5", dims=(8, 8, 8, 8)),
    "cifar_resnet": functools.partial(named, "cifar_resnet20"),
    "t_cifar_resnet": functools.partial(named, "t_cifar_resnet20"),
    "t_resnet": functools.partial(
        named, "t_resnet50d", layers=(1, 1, 1, 1), channels=(8, 8, 8, 8), stem_width=8
    ),
    **{f"vit, {rule}": functools.partial(recast, rule) for rule in RULES},
}
MODELS["vit"] = vit


def build(name):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for parameter in model.parameters():
        parameter.data += 0.1 * parameter.data.std(correction=0) * torch.randn_like(parameter)
    return model.eval()


def images(name, part=1):
    """Two images of as many patches, one the other's shape turned over; `part` of the usual size."""
    side = 8 if "cifar" in name else 32
    shapes = [(2 * side // part, side // part), (side // part, 2 * side // part)]
    return [torch.randn(1, 3, *shape).double() for shape in shapes]
