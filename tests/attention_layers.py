"""Every class of attention that surgery knows, as a tiny layer with two inputs: what the law tables run over."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torchvision
from timm import layers, models
from timm.layers import MultiQueryAttention2d
from timm.layers.attention2d import MultiQueryAttentionV2
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.halo_attn import HaloAttn
from torch import nn
from torchvision.models import maxvit

from isomorph.layers.unfused_multihead import MultiheadLinears

C = 16
WINDOW = (4, 4)
TOKENS = (2, 16, C)
WITH_CLASS = (2, 17, C)
CHANNELS_FIRST = (2, C, 4, 6)
CHANNELS_LAST = (2, 4, 6, C)


class Layer(NamedTuple):
    """How to make a layer, and what it is called with: the shape of its tokens, and further arguments.

    `other`: the shape and arguments of a call of another size. `mask`: an
    argument of a call that hides the last tokens. `heads`: heads of its map. `whole`: all laws are tried on it, not
    only the first ones: one a layout of maps.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    more: tuple[Any, ...] = ()
    other: tuple[tuple[int, ...], tuple[Any, ...]] | None = None
    mask: dict[str, torch.Tensor] | None = None
    whole: bool = False


def hide(tokens: int, hidden: int = 3, floating: bool = False) -> torch.Tensor:
    """A mask that hides the last tokens as keys."""
    seen = (torch.arange(tokens) < tokens - hidden).expand(tokens, tokens)
    return (
        torch.zeros(tokens, tokens, dtype=torch.float64).masked_fill(~seen, -torch.inf)
        if floating
        else seen
    )


def of_transformers(config: str, network: str, **options: Any) -> Callable[[], nn.Module]:
    """A tiny vision model of transformers; the test is skipped where transformers is missing."""

    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        sizes = dict(
            num_hidden_layers=2,
            hidden_size=C,
            num_attention_heads=4,
            intermediate_size=C,
            patch_size=8,
        )
        sizes = (
            dict(image_size=32) | options
            if "depths" in options
            else dict(image_size=32) | sizes | options
        )
        return getattr(transformers, network)(getattr(transformers, config)(**sizes))

    return make


class OnItself(nn.Module):
    """nn.MultiheadAttention as self-attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(C, 4, batch_first=True, **options)

    def forward(self, x, **masks):
        return self.attention(x, x, x, **masks)[0]


def in_linears() -> nn.Module:
    layer = OnItself()
    layer.attention = MultiheadLinears(layer.attention)
    return layer


LARGER = dict(other=((1, C, 6, 8), ()), whole=True)
MASK = dict(mask=hide(16, floating=True)[None].clamp(min=-100.0))
POOLED = dict(mode="conv", stride_kv=(2, 2))
vit = models.vision_transformer
sam = models.vision_transformer_sam
sam2 = models.hieradet_sam2
swin = models.swin_transformer
mvit = models.mvitv2
hiera = models.hiera
msra = models.efficientvit_msra
LAYERS = {
    "beit": Layer(lambda: models.beit.Attention(C, 4, window_size=WINDOW), WITH_CLASS),
    "eva": Layer(
        lambda: models.eva.EvaAttention(C, 4, scale_norm=False),
        WITH_CLASS,
        mask=dict(attn_mask=hide(17)),
    ),
    "relative positions": Layer(
        lambda: models.vision_transformer_relpos.RelPosAttention(C, 4), TOKENS
    ),
    "differential": Layer(lambda: layers.diff_attention.DiffAttention(C, 2), TOKENS),
    "differential, parallel": Layer(
        lambda: vit.DiffParallelScalingBlock(C, 2, mlp_ratio=1.0), TOKENS
    ),
    "swin": Layer(lambda: swin.WindowAttention(C, 4, window_size=WINDOW), TOKENS, mask=MASK),
    "swin v2": Layer(lambda: models.swin_transformer_v2.WindowAttention(C, WINDOW, 4), TOKENS),
    "swin v2 cr": Layer(
        lambda: models.swin_transformer_v2_cr.WindowMultiHeadAttention(C, 4, WINDOW), TOKENS
    ),
    "gc vit": Layer(
        lambda: models.gcvit.WindowAttentionGlobal(C, 4, WINDOW, use_global=False), TOKENS
    ),
    "davit": Layer(lambda: models.davit.WindowAttention(C, 4, 4), TOKENS),
    "nest": Layer(lambda: models.nest.Attention(C, 4), (2, 3, 16, C), whole=True),
    "sam": Layer(
        lambda: sam.Attention(C, 4, use_rel_pos=True, input_size=(4, 6)), CHANNELS_LAST, whole=True
    ),
    "sam 2": Layer(
        lambda: sam2.MultiScaleAttention(C, C, 4, nn.MaxPool2d(2, 2)),
        CHANNELS_LAST,
        other=((1, 6, 4, C), ()),
    ),
    "maxvit": Layer(
        lambda: models.maxxvit.AttentionCl(C, C, 4), CHANNELS_LAST, other=((1, 6, 8, C), ())
    ),
    "coatnet": Layer(lambda: models.maxxvit.Attention2d(C, C, 4), CHANNELS_FIRST, **LARGER),
    "multi query": Layer(
        lambda: MultiQueryAttention2d(C, C, 4, kv_stride=2),
        CHANNELS_FIRST,
        other=((1, C, 6, 8), ()),
    ),
    "multi query v2": Layer(
        lambda: MultiQueryAttentionV2(C, C, 4, key_dim=4, value_dim=4), CHANNELS_FIRST, **LARGER
    ),
    "bottleneck": Layer(
        lambda: BottleneckAttn(C, C, feat_size=(4, 6), num_heads=4), CHANNELS_FIRST
    ),
    "halo": Layer(
        lambda: HaloAttn(C, num_heads=4, block_size=4, halo_size=1),
        (2, C, 4, 8),
        other=((1, C, 8, 4), ()),
        whole=True,
    ),
    "pvt v2": Layer(
        lambda: models.pvt_v2.Attention(C, 4, sr_ratio=2),
        (2, 24, C),
        ([4, 6],),
        other=((1, 32, C), ([8, 4],)),
    ),
    "twins, windows": Layer(
        lambda: models.twins.LocallyGroupedAttn(C, 4, ws=3),
        (2, 24, C),
        ((4, 6),),
        ((1, 30, C), ((6, 5),)),
        whole=True,
    ),
    "twins, pooled": Layer(
        lambda: models.twins.GlobalSubSampleAttn(C, 4, sr_ratio=2), (2, 24, C), ((4, 6),)
    ),
    "next vit": Layer(lambda: models.nextvit.EfficientAttention(C, head_dim=4), TOKENS),
    "next vit, pooled": Layer(
        lambda: models.nextvit.EfficientAttention(C, head_dim=4, sr_ratio=2), TOKENS, whole=True
    ),
    "tnt": Layer(lambda: models.tnt.Attention(C, C, 4), TOKENS),
    "convit": Layer(lambda: models.convit.GPSA(C, 4), TOKENS),
    "cait": Layer(lambda: models.cait.TalkingHeadAttn(C, 4), TOKENS, other=((1, 36, C), ())),
    "class attention": Layer(lambda: models.cait.ClassAttn(C, 4), WITH_CLASS, whole=True),
    "crossvit": Layer(lambda: models.crossvit.CrossAttention(C, 4), WITH_CLASS),
    "volo": Layer(lambda: models.volo.Attention(C, 4), CHANNELS_LAST),
    "volo, class": Layer(lambda: models.volo.ClassAttention(C, 4), WITH_CLASS),
    "mvit": Layer(
        lambda: mvit.MultiScaleAttention(C, C, (4, 4), 4, **POOLED), WITH_CLASS, ([4, 4],)
    ),
    "mvit, pooled first": Layer(
        lambda: mvit.MultiScaleAttentionPoolFirst(C, C, (4, 4), 4, **POOLED, has_cls_token=False),
        TOKENS,
        ([4, 4],),
    ),
    "hiera": Layer(
        lambda: hiera.MaskUnitAttention(C, C, 4, window_size=4, use_mask_unit_attn=True),
        TOKENS,
        whole=True,
    ),
    "levit": Layer(
        lambda: models.levit.Attention(C, 4, 4, resolution=WINDOW, use_conv=True), (2, C, 4, 4)
    ),
    "levit, strided": Layer(
        lambda: models.levit.AttentionDownsample(C, C, 4, 4, resolution=WINDOW), TOKENS
    ),
    "tiny vit": Layer(lambda: models.tiny_vit.Attention(C, 4, 4, resolution=WINDOW), TOKENS),
    "efficientformer": Layer(
        lambda: models.efficientformer.Attention(C, 4, 4, resolution=4), TOKENS
    ),
    "efficientformer v2": Layer(
        lambda: models.efficientformer_v2.Attention2d(C, 4, 4, resolution=4), (2, C, 4, 4)
    ),
    "efficientformer v2, strided": Layer(
        lambda: models.efficientformer_v2.Attention2dDownsample(C, 4, 4, resolution=4, out_dim=C),
        (2, C, 4, 4),
    ),
    "efficientvit": Layer(
        lambda: msra.CascadedGroupAttention(
            C, 4, 4, attn_ratio=1, resolution=4, kernels=(3, 3, 3, 3)
        ),
        (2, C, 4, 4),
    ),
    "iformer": Layer(lambda: models.iformer.SHMA(C), CHANNELS_FIRST),
    "shvit": Layer(lambda: models.shvit.SHSA(C, 8, 8, nn.BatchNorm2d), CHANNELS_FIRST),
    "cpubone": Layer(lambda: models.cpubone.ConvAttention(64), (2, 64, 16, 24)),
    "lowformer": Layer(lambda: models.lowformer.ConvAttention(64), (2, 64, 16, 24)),
    "multihead": Layer(
        OnItself,
        TOKENS,
        other=((1, 36, C), ()),
        mask=dict(key_padding_mask=~hide(16)[:2]),
        whole=True,
    ),
    "multihead, in linears": Layer(in_linears, TOKENS),
    "multihead, attention mask": Layer(
        functools.partial(OnItself, bias=False),
        TOKENS,
        mask=dict(attn_mask=hide(16, floating=True)),
    ),
    "gated by timm": Layer(lambda: layers.Attention(C, 4, gated=True), TOKENS),
    "pool, latent": Layer(
        lambda: layers.AttentionPoolLatent(C, num_heads=4, mlp_ratio=1.0), WITH_CLASS
    ),
    "pool, rotary": Layer(
        lambda: layers.RotAttentionPool2d(C, num_heads=4, ref_feat_size=4, pool_type=""),
        CHANNELS_FIRST,
    ),
    "pool, absolute": Layer(
        lambda: layers.AttentionPool2d(C, feat_size=(4, 6), num_heads=4, pool_type=""),
        CHANNELS_FIRST,
    ),
    "pool, mean query": Layer(lambda: layers.SimPool2d(C, num_heads=4), CHANNELS_FIRST),
    "non-local": Layer(lambda: layers.NonLocalAttn(C, rd_channels=8), CHANNELS_FIRST),
    "torchvision maxvit": Layer(
        lambda: maxvit.RelativePositionalMultiHeadAttention(C, 4, 16), (2, 2, 16, C)
    ),
}

TORCHVISION_VIT = functools.partial(
    torchvision.models.VisionTransformer, 32, 8, 2, 4, C, 2 * C, num_classes=3
)
NETWORKS = {
    "transformers' ViT": of_transformers("ViTConfig", "ViTModel"),
    "transformers' DINOv2": of_transformers("Dinov2Config", "Dinov2Model"),
    "transformers' DINOv2 with registers": of_transformers(
        "Dinov2WithRegistersConfig", "Dinov2WithRegistersModel"
    ),
    "transformers' DINOv3": of_transformers(
        "DINOv3ViTConfig", "DINOv3ViTModel", num_register_tokens=2
    ),
    "transformers' SigLIP": of_transformers("SiglipVisionConfig", "SiglipVisionModel"),
    "transformers' CLIP": of_transformers("CLIPVisionConfig", "CLIPVisionModel"),
    "transformers' BEiT": of_transformers(
        "BeitConfig", "BeitModel", use_relative_position_bias=True
    ),
    "transformers' Swin": of_transformers(
        "SwinConfig",
        "SwinModel",
        patch_size=4,
        embed_dim=C,
        depths=[2],
        num_heads=[4],
        window_size=4,
    ),
    "torchvision's ViT": TORCHVISION_VIT,
}
"""Networks of other libraries, whose attention is recast in its place."""
