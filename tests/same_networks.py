"""Pairs of implementations of one network, narrow and with few blocks: timm, torchvision, transformers, one's own."""

from functools import partial

import timm
import torch
import torch.nn.functional as F
import torchvision
import transformers as hf
from torch import nn

import isomorph  # noqa: F401 (registers its networks)

WIDTH = 24
HEADS = 3
VIT = dict(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=48)
SMALL = dict(embed_dim=WIDTH, depth=2, num_heads=HEADS, mlp_ratio=2.0, num_classes=5)
IMAGE = dict(image_size=32, patch_size=8)


def give_random_weights(model):
    """Draw all weights and statistics: fresh ones hide faults, a bias of 0, a LayerScale of 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for x in model.parameters():
            x += 0.05 * torch.randn(x.shape, generator=generator)
        for name, x in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                x += 0.05 * torch.rand(x.shape, generator=generator)
    return model.eval()


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


def tv(name, **kwargs):
    return getattr(torchvision.models, name)(num_classes=5, **kwargs)


def of_timm(name, **kwargs):
    return timm.create_model(name, num_classes=5, **kwargs)


def hf_resnet(kind="basic"):
    sizes = [64, 128, 256, 512]
    given = dict(embedding_size=64, hidden_sizes=sizes, depths=[1, 1, 1, 1], layer_type=kind)
    return hf.ResNetForImageClassification(hf.ResNetConfig(**given, num_labels=5))


def tv_resnet(block="BasicBlock", **kwargs):
    kind = getattr(torchvision.models.resnet, block)
    return torchvision.models.ResNet(kind, [1, 1, 1, 1], num_classes=5, **kwargs)


def timm_resnet(name="resnet18", **kwargs):
    return of_timm(name, layers=(1, 1, 1, 1), **kwargs)


def tv_bottleneck(**kwargs):
    return tv_resnet("Bottleneck", **kwargs)


def hf_bottleneck():
    given = dict(embedding_size=64, hidden_sizes=[64, 64, 128, 128], depths=[1, 1, 1, 1])
    config = hf.ResNetConfig(**given, layer_type="bottleneck", num_labels=5)
    return hf.ResNetForImageClassification(config)


def timm_bottleneck():
    return timm_resnet("resnet50", channels=(16, 16, 32, 32))


def hf_regnet():
    given = dict(embedding_size=32, hidden_sizes=[48, 104, 208, 440], depths=[1, 3, 6, 6])
    given |= dict(groups_width=8, layer_type="y", num_labels=5)
    return hf.RegNetForImageClassification(hf.RegNetConfig(**given))


def hf_hiera():
    given = dict(embed_dim=12, image_size=[64, 64], depths=[1, 1, 2, 1], num_labels=5)
    return hf.HieraForImageClassification(hf.HieraConfig(**given))


def timm_hiera():
    return of_timm("hiera_tiny_224", img_size=(64, 64), embed_dim=12, stages=(1, 1, 2, 1))


def hf_efficientnet():
    given = dict(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, num_labels=5)
    return hf.EfficientNetForImageClassification(hf.EfficientNetConfig(**given))


def hf_mobilenet2():
    config = hf.MobileNetV2Config(tf_padding=False, num_labels=5, layer_norm_eps=1e-5)
    return hf.MobileNetV2ForImageClassification(config)


def hf_mobilenet1():
    config = hf.MobileNetV1Config(tf_padding=False, layer_norm_eps=1e-5, num_labels=5)
    return hf.MobileNetV1ForImageClassification(config)


def hf_bit():
    given = dict(hidden_sizes=[32, 64, 64, 128], depths=[1, 1, 1, 1], embedding_size=32)
    config = hf.BitConfig(**given, num_groups=4, num_labels=5)
    return hf.BitForImageClassification(config)


def timm_bit():
    norm = partial(timm.layers.GroupNormAct, num_groups=4)
    conv = partial(timm.layers.StdConv2d, eps=1e-8)
    given = dict(channels=(32, 64, 64, 128), stem_chs=32, norm_layer=norm, conv_layer=conv)
    given |= dict(layers=(1, 1, 1, 1), stem_type="fixed", num_classes=5)
    return timm.models.resnetv2.ResNetV2(**given)


def hf_levit():
    given = dict(hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4], depths=[1, 1, 1])
    given |= dict(key_dim=[8, 8, 8], image_size=64, num_labels=5)
    given["down_ops"] = [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]]
    return hf.LevitForImageClassification(hf.LevitConfig(**given))


def timm_levit():
    given = dict(embed_dim=(16, 24, 32), num_heads=(2, 3, 4), depth=(1, 1, 1), key_dim=8)
    return of_timm("levit_128s", img_size=64, **given)


def hf_pvt():
    given = dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_labels=5, image_size=64)
    given["num_attention_heads"] = [1, 2, 3, 4]
    return hf.PvtV2ForImageClassification(hf.PvtV2Config(**given))


def timm_pvt():
    given = dict(embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 3, 4), depths=(1, 1, 1, 1))
    return of_timm("pvt_v2_b1", **given)


def hf_poolformer():
    given = dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_labels=5)
    return hf.PoolFormerForImageClassification(hf.PoolFormerConfig(**given))


def timm_poolformer():
    given = dict(dims=(8, 16, 24, 32), depths=(1, 1, 1, 1), layer_scale_init_values=1e-5)
    given |= dict(downsample_norm=None, mlp_act=nn.GELU, mlp_bias=True, use_mlp_head=False)
    given |= dict(norm_layers=timm.layers.GroupNorm1, res_scale_init_values=None)
    return timm.models.metaformer.MetaFormer(**given, num_classes=5)


def hf_focalnet():
    given = dict(embed_dim=8, depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 64, 64])
    config = hf.FocalNetConfig(**given, image_size=64, num_labels=5)
    return hf.FocalNetForImageClassification(config)


def timm_focalnet():
    return timm.models.focalnet.FocalNet(embed_dim=8, depths=(1, 1, 1, 1), num_classes=5)


def hf_mobilevit():
    given = dict(neck_hidden_sizes=[16, 16, 24, 48, 64, 80, 320])
    given |= dict(hidden_sizes=[64, 80, 96], expand_ratio=2.0, num_labels=5, image_size=64)
    return hf.MobileViTForImageClassification(hf.MobileViTConfig(**given))


def hf_mobilevit2():
    config = hf.MobileViTV2Config(width_multiplier=0.5, image_size=64, num_labels=5)
    return hf.MobileViTV2ForImageClassification(config)


def hf_swiftformer():
    given = dict(depths=[1, 1, 1, 1], embed_dims=[8, 16, 24, 32], num_labels=5)
    return hf.SwiftFormerForImageClassification(hf.SwiftFormerConfig(**given))


def timm_swiftformer():
    return of_timm("swiftformer_xs", layers=[1, 1, 1, 1], embed_dims=[8, 16, 24, 32])


def hf_msn():
    return hf.ViTMSNForImageClassification(hf.ViTMSNConfig(**VIT, **IMAGE, num_labels=5))


def hf_ijepa():
    config = hf.IJepaConfig(**VIT, **IMAGE, num_labels=5, layer_norm_eps=1e-6)
    return hf.IJepaForImageClassification(config)


def timm_without_class_token():
    given = dict(class_token=False, global_pool="avg", fc_norm=False)
    return timm_vit(**given)


def hf_data2vec():
    given = dict(use_relative_position_bias=True, layer_norm_eps=1e-6, num_labels=5)
    config = hf.Data2VecVisionConfig(**VIT, **IMAGE, **given)
    return hf.Data2VecVisionForImageClassification(config)


def hf_metaclip():
    return hf.MetaClip2VisionModel(hf.MetaClip2VisionConfig(**VIT, **IMAGE))


def hf_dinov3_convnext():
    given = dict(depths=[1, 1, 2, 1], hidden_sizes=[8, 16, 24, 32], layer_scale_init_value=0.1)
    return hf.DINOv3ConvNextModel(hf.DINOv3ConvNextConfig(**given))


def timm_features(name, **kwargs):
    return timm.create_model(name, num_classes=0, **kwargs)


def tv_vgg(norm=False):
    sizes = [8, "M", 16, "M", 16, 16, "M", 24, 24, "M", 24, 24, "M"]
    layers = torchvision.models.vgg.make_layers(sizes, batch_norm=norm)
    with torch.device("meta"):  # 120 million weights that are replaced
        model = torchvision.models.VGG(layers, num_classes=5, init_weights=False)
    model.classifier[0] = nn.Linear(24 * 49, 32)
    model.classifier[3] = nn.Linear(32, 32)
    model.classifier[6] = nn.Linear(32, 5)
    return model


class ConvVGG(nn.Module):
    """A VGG whose first linear layers are convolutions, in one's own code."""

    def __init__(self, norm=False):
        super().__init__()
        other = tv_vgg(norm)
        self.body = other.features
        self.wide = nn.Conv2d(24, 32, 7)
        self.hidden = nn.Conv2d(32, 32, 1)
        self.classes = nn.Linear(32, 5)

    def forward(self, x):
        x = F.relu(self.wide(self.body(x)))
        return self.classes(F.relu(self.hidden(x)).flatten(1))


def tv_densenet():
    return torchvision.models.DenseNet(8, (2, 2, 2, 2), 16, num_classes=5)


def timm_densenet():
    return of_timm("densenet121", growth_rate=8, block_config=(2, 2, 2, 2))


def tv_inception():
    return tv("inception_v3", aux_logits=False, init_weights=False)


def timm_coatnet():
    sizes = dict(embed_dim=(8, 16, 32, 64), depths=(1, 1, 1, 1), stem_width=(8, 8))
    pools = dict(conv_pool_type="max2", transformer_pool_type="max2", conv_stride_mode="1x1")
    return of_timm(
        "coatnet_0_224",
        img_size=64,
        head_hidden_size=64,
        conv_attn_act_layer="gelu",
        **sizes,
        **pools,
    )


def own_coatnet():
    sizes = dict(depths=(2, 1, 1, 1, 1), widths=(8, 8, 16, 32, 64))
    return of_timm("coatnet_0", img_size=64, **sizes)


def timm_maxvit():
    sizes = dict(embed_dim=(32, 64), depths=(1, 1), stem_width=16, block_type=("M", "M"))
    acts = dict(conv_act_layer="gelu", transformer_act_layer="gelu", conv_padding="")
    given = dict(conv_pool_type="avg", transformer_rel_pos_type="bias", head_hidden_size=64)
    return of_timm("maxvit_tiny_tf_224", img_size=64, **sizes, **acts, **given)


def tv_maxvit():
    given = dict(input_size=(64, 64), stem_channels=16, partition_size=2, head_dim=32)
    given |= dict(block_channels=[32, 64], block_layers=[1, 1], stochastic_depth_prob=0.0)
    return torchvision.models.MaxVit(**given, num_classes=5)


def timm_convit():
    given = dict(embed_dim=6, num_heads=4, depth=3, local_up_to_layer=2, mlp_ratio=2.0)
    return of_timm("convit_tiny", img_size=32, patch_size=8, **given)


def own_convit():
    given = dict(embed_dim=24, num_heads=4, depth=3, local_up_to_layer=2, mlp_ratio=2.0)
    return of_timm("convit_ti", img_size=32, patch_size=8, **given)


class OwnViT(nn.Module):
    """A ViT in one's own code: patches by unfold and a linear layer, einsum, queries, keys, values in any order."""

    def __init__(self, order="qkv", heads_first=True, eps=1e-6, act=F.gelu, shuffle=False):
        super().__init__()
        self.patches = nn.Linear(192, 24)
        self.token = nn.Parameter(torch.zeros(1, 1, 24))
        self.places = nn.Parameter(torch.zeros(1, 17, 24))
        self.layers = nn.ModuleList(self.make_layer(eps) for _ in range(2))
        self.last = nn.LayerNorm(24, eps)
        self.classes = nn.Linear(24, 5)
        self.order = order
        self.heads_first = heads_first
        self.act = act
        self.shuffle = torch.randperm(24) if shuffle else torch.arange(24)

    @staticmethod
    def make_layer(eps):
        parts = {"a": nn.LayerNorm(24, eps), "b": nn.LayerNorm(24, eps)}
        parts |= {"joint": nn.Linear(24, 72), "out": nn.Linear(24, 24)}
        return nn.ModuleDict(parts | {"up": nn.Linear(24, 48), "down": nn.Linear(48, 24)})

    def attend(self, layer, x):
        joint = layer["joint"](x)
        if self.heads_first:
            parts = joint.unflatten(-1, (3, 3, 8)).unbind(2)
        else:
            parts = joint.unflatten(-1, (3, 8, 3)).unbind(-1)
        named = dict(zip(self.order, parts, strict=True))
        scores = torch.einsum("bihd,bjhd->bhij", named["q"], named["k"]) / 8**0.5
        out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), named["v"])
        return layer["out"](out.flatten(2))

    def forward(self, x):
        patches = x.unfold(2, 8, 8).unfold(3, 8, 8)  # (B, C, 4, 4, 8, 8)
        x = patches.permute(0, 2, 3, 4, 5, 1).reshape(len(x), 16, 192)
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], 1) + self.places
        for layer in self.layers:
            x = x + self.attend(layer, layer["a"](x))
            x = x + layer["down"](self.act(layer["up"](layer["b"](x))))
        return self.classes(self.last(x)[:, 0, self.shuffle])


class NanoViT(nn.Module):
    """A ViT like nanoGPT: one projection for queries, keys and values, no biases, fused attention, tanh-GELU."""

    def __init__(self):
        super().__init__()
        self.wpe = nn.Parameter(torch.zeros(16, 24))
        self.wte = nn.Conv2d(3, 24, 8, 8, bias=False)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            norms = {"ln_1": nn.LayerNorm(24, 1e-6), "ln_2": nn.LayerNorm(24, 1e-6)}
            layers = {"c_attn": nn.Linear(24, 72), "c_proj": nn.Linear(24, 24)}
            mlp = {"c_fc": nn.Linear(24, 48), "c_out": nn.Linear(48, 24)}
            self.blocks.append(nn.ModuleDict(norms | layers | mlp))
        self.ln_f = nn.LayerNorm(24, 1e-6)
        self.lm_head = nn.Linear(24, 5)

    def forward(self, x):
        x = self.wte(x).flatten(2).mT + self.wpe
        for block in self.blocks:
            q, k, v = block["c_attn"](block["ln_1"](x)).split(24, 2)
            heads = [y.view(len(x), 16, 3, 8).transpose(1, 2) for y in (q, k, v)]
            y = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)
            x = x + block["c_proj"](y)
            y = F.gelu(block["c_fc"](block["ln_2"](x)), approximate="tanh")
            x = x + block["c_out"](y)
        return self.lm_head(self.ln_f(x).mean(1))


def timm_like_nano():
    act = partial(nn.GELU, approximate="tanh")
    return timm_vit(class_token=False, global_pool="avg", fc_norm=False, act_layer=act)


PAIRS = {
    "ViT, timm and transformers": (timm_vit, hf_vit, 32),
    "ViT with eps 1e-12, timm and transformers": (timm_vit, lambda: hf_vit(1e-12), 32),
    "ViT, timm and torchvision": (timm_vit, tv_vit, 32),
    "ViT, torchvision and transformers": (tv_vit, hf_vit, 32),
    "ViT of own code, timm": (timm_vit, OwnViT, 32),
    "ViT of own code, transformers": (hf_vit, lambda: OwnViT("kvq"), 32),
    "ViT of own code, torchvision": (tv_vit, lambda: OwnViT("vqk", heads_first=False), 32),
    "nanoGPT-like ViT, timm": (timm_like_nano, NanoViT, 32),
    "ViT MSN, timm and transformers": (timm_vit, hf_msn, 32),
    "I-JEPA, timm and transformers": (timm_without_class_token, hf_ijepa, 32),
    "DeiT distilled, timm and transformers": (timm_deit, hf_deit, 32),
    "DINOv2, timm and transformers": (timm_dinov2, hf_dinov2, 32),
    "DINOv2 with registers": (
        lambda: timm_dinov2("vit_small_patch14_reg4_dinov2"),
        lambda: hf_dinov2(4),
        32,
    ),
    "DINOv3, timm and transformers": (timm_dinov3, hf_dinov3, 32),
    "DINOv3 ConvNeXt, timm and transformers": (
        lambda: timm_features("convnext_tiny", **CONVNEXT),
        hf_dinov3_convnext,
        32,
    ),
    "CLIP, timm and transformers": (timm_clip, hf_clip, 32),
    "MetaCLIP 2, timm and transformers": (timm_clip, hf_metaclip, 32),
    "SigLIP, timm and transformers": (timm_siglip, hf_siglip, 32),
    "BEiT, timm and transformers": (timm_beit, hf_beit, 32),
    "data2vec, timm and transformers": (timm_beit, hf_data2vec, 32),
    "Swin, timm and transformers": (timm_swin, hf_swin, 64),
    "Swin, timm and torchvision": (timm_swin, tv_swin, 64),
    "Swin, torchvision and transformers": (tv_swin, hf_swin, 64),
    "Swin V2, timm and transformers": (lambda: timm_swin(2), lambda: hf_swin(2), 64),
    "Swin V2, timm and torchvision": (lambda: timm_swin(2), lambda: tv_swin(2), 64),
    "Swin V2, torchvision and transformers": (lambda: tv_swin(2), lambda: hf_swin(2), 64),
    "Hiera, timm and transformers": (timm_hiera, hf_hiera, 64),
    "PVT v2, timm and transformers": (timm_pvt, hf_pvt, 64),
    "LeViT, timm and transformers": (timm_levit, hf_levit, 64),
    "PoolFormer, timm and transformers": (timm_poolformer, hf_poolformer, 64),
    "FocalNet, timm and transformers": (timm_focalnet, hf_focalnet, 64),
    "SwiftFormer, timm and transformers": (timm_swiftformer, hf_swiftformer, 64),
    "MobileViT, timm and transformers": (lambda: of_timm("mobilevit_xxs"), hf_mobilevit, 64),
    "MobileViT V2, timm and transformers": (
        lambda: of_timm("mobilevitv2_050"),
        hf_mobilevit2,
        64,
    ),
    "ConvNeXt, timm and transformers": (timm_convnext, hf_convnext, 32),
    "ConvNeXt, timm and torchvision": (timm_convnext, tv_convnext, 32),
    "ConvNeXt, torchvision and transformers": (tv_convnext, hf_convnext, 32),
    "ConvNeXt V2, timm and transformers": (lambda: timm_convnext(2), lambda: hf_convnext(2), 32),
    "ResNet, timm and transformers": (timm_resnet, hf_resnet, 32),
    "ResNet, timm and torchvision": (timm_resnet, tv_resnet, 32),
    "ResNet, torchvision and transformers": (tv_resnet, hf_resnet, 32),
    "ResNet of bottlenecks, timm and transformers": (timm_bottleneck, hf_bottleneck, 32),
    "ResNeXt, timm and torchvision": (
        lambda: timm_resnet("resnext50_32x4d", cardinality=4, base_width=4),
        lambda: tv_bottleneck(groups=4, width_per_group=4),
        32,
    ),
    "BiT, timm and transformers": (timm_bit, hf_bit, 32),
    "RegNetY, timm and torchvision": (
        lambda: of_timm("regnety_004"),
        lambda: tv("regnet_y_400mf"),
        32,
    ),
    "RegNetY, timm and transformers": (lambda: of_timm("regnety_004"), hf_regnet, 32),
    "RegNetX, timm and torchvision": (
        lambda: of_timm("regnetx_004_tv"),
        lambda: tv("regnet_x_400mf"),
        32,
    ),
    "MobileNetV1, timm and transformers": (
        lambda: of_timm("mobilenetv1_100"),
        hf_mobilenet1,
        32,
    ),
    "MobileNetV2, timm and torchvision": (
        lambda: of_timm("mobilenetv2_050"),
        lambda: tv("mobilenet_v2", width_mult=0.5),
        32,
    ),
    "MobileNetV2, timm and transformers": (
        lambda: of_timm("mobilenetv2_100"),
        hf_mobilenet2,
        32,
    ),
    "MobileNetV3 large, timm and torchvision": (
        lambda: of_timm("mobilenetv3_large_100"),
        lambda: tv("mobilenet_v3_large"),
        32,
    ),
    "MobileNetV3 small, timm and torchvision": (
        lambda: of_timm("mobilenetv3_small_100"),
        lambda: tv("mobilenet_v3_small"),
        32,
    ),
    "MNASNet, timm and torchvision": (
        lambda: of_timm("mnasnet_050"),
        lambda: tv("mnasnet0_5"),
        32,
    ),
    "EfficientNet, timm and torchvision": (
        lambda: of_timm("efficientnet_b0"),
        lambda: tv("efficientnet_b0"),
        32,
    ),
    "EfficientNet, timm and transformers": (
        lambda: of_timm("tf_efficientnet_b0"),
        hf_efficientnet,
        64,
    ),
    "EfficientNetV2, timm and torchvision": (
        lambda: of_timm("efficientnetv2_s"),
        lambda: tv("efficientnet_v2_s"),
        32,
    ),
    "DenseNet, timm and torchvision": (timm_densenet, tv_densenet, 32),
    "VGG, own code and torchvision": (ConvVGG, tv_vgg, 224),
    "VGG with norms, own code and torchvision": (lambda: ConvVGG(True), lambda: tv_vgg(True), 224),
    "Inception v3, timm and torchvision": (
        lambda: of_timm("inception_v3", aux_logits=False),
        tv_inception,
        96,
    ),
    "ConViT, timm and isomorph": (timm_convit, own_convit, 32),
    "CoAtNet, timm and isomorph": (timm_coatnet, own_coatnet, 64),
    "MaxViT, timm and torchvision": (timm_maxvit, tv_maxvit, 64),
}
