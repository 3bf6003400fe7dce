"""Pairs of implementations of one network, narrow and with few blocks: timm, torchvision, transformers, one's own."""

import timm
import torchvision
import transformers as hf

WIDTH = 24
HEADS = 3
VIT = dict(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=48)
SMALL = dict(embed_dim=WIDTH, depth=2, num_heads=HEADS, mlp_ratio=2.0, num_classes=5)
IMAGE = dict(image_size=32, patch_size=8)


def timm_vit(name="vit_tiny_patch16_224", **kwargs):
    return timm.create_model(name, **{**SMALL, "img_size": 32, "patch_size": 8, **kwargs})


def hf_vit(eps=1e-6, **kwargs):
    config = hf.ViTConfig(**VIT, **IMAGE, num_labels=5, layer_norm_eps=eps, **kwargs)
    return hf.ViTForImageClassification(config)


def tv_vit():
    return torchvision.models.VisionTransformer(32, 8, 2, HEADS, WIDTH, 48, num_classes=5)


def hf_deit():
    config = hf.DeiTConfig(**VIT, **IMAGE, num_labels=5, layer_norm_eps=1e-6)
    return hf.DeiTForImageClassificationWithTeacher(config)


def timm_deit():
    return timm_vit("deit_tiny_distilled_patch16_224")


def hf_dinov2(registers=0, swiglu=False, eps=1e-6):
    given = {name: value for name, value in VIT.items() if name != "intermediate_size"}
    given |= dict(mlp_ratio=2, layer_norm_eps=eps, use_swiglu_ffn=swiglu, layerscale_value=0.1)
    if registers:
        config = hf.Dinov2WithRegistersConfig(**given, **IMAGE, num_register_tokens=registers)
        return hf.Dinov2WithRegistersModel(config)
    return hf.Dinov2Model(hf.Dinov2Config(**given, **IMAGE))


def timm_dinov2(name="vit_small_patch14_dinov2", **kwargs):
    return timm_vit(name, num_classes=0, **kwargs)


def hf_dinov3():
    config = hf.DINOv3ViTConfig(**VIT, **IMAGE, num_register_tokens=4, layer_norm_eps=1e-5)
    return hf.DINOv3ViTModel(config)


def timm_dinov3():
    return timm_vit("vit_small_patch16_dinov3_qkvb", num_classes=0, global_pool="token")


def hf_clip():
    return hf.CLIPVisionModel(hf.CLIPVisionConfig(**VIT, **IMAGE))


def timm_clip():
    return timm_vit("vit_base_patch16_clip_quickgelu_224", num_classes=0)


def hf_siglip():
    return hf.SiglipVisionModel(hf.SiglipVisionConfig(**VIT, **IMAGE))


def timm_siglip():
    return timm_vit("vit_base_patch16_siglip_224", num_classes=0)


def hf_beit():
    given = dict(num_labels=5, use_relative_position_bias=True, layer_norm_eps=1e-6)
    return hf.BeitForImageClassification(hf.BeitConfig(**VIT, **IMAGE, **given))


def timm_beit():
    return timm_vit("beit_base_patch16_224")


SWIN = dict(embed_dim=12, depths=(2, 2), num_heads=(2, 4), window_size=4)


def hf_swin(version=1):
    given = dict(image_size=64, patch_size=4, num_labels=5, layer_norm_eps=1e-5, **SWIN)
    if version == 2:
        return hf.Swinv2ForImageClassification(hf.Swinv2Config(**given))
    return hf.SwinForImageClassification(hf.SwinConfig(**given))


def timm_swin(version=1):
    name = "swin_tiny_patch4_window7_224" if version == 1 else "swinv2_tiny_window8_256"
    return timm.create_model(name, img_size=64, num_classes=5, **SWIN)


def tv_swin(version=1):
    given = dict(patch_size=[4, 4], embed_dim=12, depths=[2, 2], num_heads=[2, 4])
    given |= dict(window_size=[4, 4], num_classes=5)
    if version == 2:
        swin = torchvision.models.swin_transformer
        given |= dict(block=swin.SwinTransformerBlockV2, downsample_layer=swin.PatchMergingV2)
    return torchvision.models.SwinTransformer(**given)


CONVNEXT = dict(depths=(1, 1, 2, 1), dims=(8, 16, 24, 32))


def hf_convnext(version=1):
    given = dict(depths=[1, 1, 2, 1], hidden_sizes=[8, 16, 24, 32], num_labels=5)
    if version == 2:
        return hf.ConvNextV2ForImageClassification(hf.ConvNextV2Config(**given))
    return hf.ConvNextForImageClassification(hf.ConvNextConfig(**given))


def timm_convnext(version=1):
    name = "convnext_tiny" if version == 1 else "convnextv2_tiny"
    return timm.create_model(name, num_classes=5, **CONVNEXT)


def tv_convnext():
    setting = torchvision.models.convnext.CNBlockConfig
    sides = [(8, 16, 1), (16, 24, 1), (24, 32, 2), (32, None, 1)]
    return torchvision.models.ConvNeXt([setting(*each) for each in sides], num_classes=5)


def hf_resnet(kind="basic"):
    given = dict(embedding_size=64, depths=[2, 2, 2, 2], layer_type=kind, num_labels=5)
    sizes = [64, 128, 256, 512] if kind == "basic" else [256, 512, 1024, 2048]
    depths = [2, 2, 2, 2] if kind == "basic" else [3, 4, 6, 3]
    given |= dict(hidden_sizes=sizes, depths=depths)
    return hf.ResNetForImageClassification(hf.ResNetConfig(**given))


def tv(name, **kwargs):
    return getattr(torchvision.models, name)(num_classes=5, **kwargs)


def of_timm(name, **kwargs):
    return timm.create_model(name, num_classes=5, **kwargs)


def hf_regnet():
    given = dict(embedding_size=32, hidden_sizes=[48, 104, 208, 440], depths=[1, 3, 6, 6])
    given |= dict(groups_width=8, layer_type="y", num_labels=5)
    return hf.RegNetForImageClassification(hf.RegNetConfig(**given))


PAIRS = {
    "ViT, timm and transformers": (timm_vit, hf_vit, 32),
    "ViT, timm and torchvision": (timm_vit, tv_vit, 32),
    "ViT, torchvision and transformers": (tv_vit, hf_vit, 32),
    "DeiT distilled, timm and transformers": (timm_deit, hf_deit, 32),
    "DINOv2, timm and transformers": (timm_dinov2, hf_dinov2, 32),
    "DINOv2 with registers": (
        lambda: timm_dinov2("vit_small_patch14_reg4_dinov2"),
        lambda: hf_dinov2(4),
        32,
    ),
    "DINOv3, timm and transformers": (timm_dinov3, hf_dinov3, 32),
    "CLIP, timm and transformers": (timm_clip, hf_clip, 32),
    "SigLIP, timm and transformers": (timm_siglip, hf_siglip, 32),
    "BEiT, timm and transformers": (timm_beit, hf_beit, 32),
    "Swin, timm and transformers": (timm_swin, hf_swin, 64),
    "Swin, timm and torchvision": (timm_swin, tv_swin, 64),
    "Swin, torchvision and transformers": (tv_swin, hf_swin, 64),
    "Swin V2, timm and transformers": (lambda: timm_swin(2), lambda: hf_swin(2), 64),
    "Swin V2, timm and torchvision": (lambda: timm_swin(2), lambda: tv_swin(2), 64),
    "ConvNeXt, timm and transformers": (timm_convnext, hf_convnext, 32),
    "ConvNeXt, timm and torchvision": (timm_convnext, tv_convnext, 32),
    "ConvNeXt V2, timm and transformers": (lambda: timm_convnext(2), lambda: hf_convnext(2), 32),
    "ResNet-18, timm and transformers": (lambda: of_timm("resnet18"), hf_resnet, 32),
    "ResNet-18, timm and torchvision": (lambda: of_timm("resnet18"), lambda: tv("resnet18"), 32),
    "RegNetY, timm and torchvision": (
        lambda: of_timm("regnety_004"),
        lambda: tv("regnet_y_400mf"),
        32,
    ),
    "RegNetY, timm and transformers": (lambda: of_timm("regnety_004"), hf_regnet, 32),
    "MobileNetV2": (lambda: of_timm("mobilenetv2_100"), lambda: tv("mobilenet_v2"), 32),
    "MobileNetV3": (
        lambda: of_timm("mobilenetv3_large_100"),
        lambda: tv("mobilenet_v3_large"),
        32,
    ),
    "EfficientNet": (lambda: of_timm("efficientnet_b0"), lambda: tv("efficientnet_b0"), 32),
    "DenseNet": (lambda: of_timm("densenet121"), lambda: tv("densenet121"), 32),
    "VGG": (lambda: of_timm("vgg11_bn"), lambda: tv("vgg11_bn"), 224),
}
