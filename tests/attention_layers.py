"""Every class of attention that surgery knows, as a tiny layer with two inputs: what the law tables run over."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torchvision
from timm import layers, models
from timm.layers import MultiQueryAttention2d
from timm.layers.attention2d import MultiQueryAttentionV2
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.halo_attn import HaloAttn
from torch import nn
from torchvision.models import maxvit as torchvision_maxvit_layers

from isomorph.layers.unfused_multihead import MultiheadLinears
from requirements import optional

C = 16
WINDOW = (4, 4)
TOKENS = (2, 16, C)
WITH_CLASS = (2, 17, C)
CHANNELS_FIRST = (2, C, 4, 6)
CHANNELS_LAST = (2, 4, 6, C)


class Layer(NamedTuple):
    """How to make a layer, and what it is called with: the shape of its tokens, and further arguments.

    `other`: shape and arguments of a call of another size. `mask`: an argument of a call that hides the last tokens.
    `whole`: all laws are tried on it, not only the first ones: one a layout of maps.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    more: tuple[Any, ...] = ()
    other: tuple[Any, ...] | None = None
    mask: dict[str, torch.Tensor] | None = None
    whole: bool = False


LAYERS: dict[str, Layer] = {}


def called_with(shape: tuple[int, ...], *more: Any, **row: Any) -> Callable[[Any], Any]:
    """Decorate the function that makes a layer: add it to LAYERS under the function's name."""

    def add(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        LAYERS[make.__name__] = Layer(make, shape, more, **row)
        return make

    return add


def hide(tokens: int, hidden: int = 3) -> torch.Tensor:
    """A mask that hides the last tokens as keys: where it is True a token is seen."""
    seen = torch.arange(tokens) < tokens - hidden
    return seen.expand(tokens, tokens)


def hide_by_scores(tokens: int) -> torch.Tensor:
    """The same mask as numbers that are added to the scores."""
    zeros = torch.zeros(tokens, tokens, dtype=torch.float64)
    return zeros.masked_fill(~hide(tokens), -torch.inf)


class OnItself(nn.Module):
    """nn.MultiheadAttention as self-attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(C, 4, batch_first=True, **options)

    def forward(self, x, **masks):
        return self.attention(x, x, x, **masks)[0]


LARGER = (1, C, 6, 8)
MASK = hide_by_scores(16)
MASK_OF_WINDOWS = MASK[None].clamp(min=-100.0)


@called_with(WITH_CLASS)
def beit():
    return models.beit.Attention(C, 4, window_size=WINDOW)


@called_with(WITH_CLASS, mask=dict(attn_mask=hide(17)))
def eva():
    return models.eva.EvaAttention(C, 4, scale_norm=False)


@called_with(TOKENS)
def relative_positions():
    return models.vision_transformer_relpos.RelPosAttention(C, 4)


@called_with(TOKENS)
def differential():
    return layers.diff_attention.DiffAttention(C, 2)


@called_with(TOKENS)
def differential_parallel():
    return models.vision_transformer.DiffParallelScalingBlock(C, 2, mlp_ratio=1.0)


@called_with(TOKENS, mask=dict(mask=MASK_OF_WINDOWS))
def swin():
    return models.swin_transformer.WindowAttention(C, 4, window_size=WINDOW)


@called_with(TOKENS)
def swin_v2():
    return models.swin_transformer_v2.WindowAttention(C, WINDOW, 4)


@called_with(TOKENS)
def swin_v2_cr():
    return models.swin_transformer_v2_cr.WindowMultiHeadAttention(C, 4, WINDOW)


@called_with(TOKENS)
def gc_vit():
    return models.gcvit.WindowAttentionGlobal(C, 4, WINDOW, use_global=False)


@called_with(TOKENS)
def davit():
    return models.davit.WindowAttention(C, 4, 4)


@called_with((2, 3, 16, C), whole=True)
def nest():
    return models.nest.Attention(C, 4)


@called_with(CHANNELS_LAST, whole=True)
def sam():
    return models.vision_transformer_sam.Attention(C, 4, use_rel_pos=True, input_size=(4, 6))


@called_with(CHANNELS_LAST, other=((1, 6, 4, C),))
def sam_2():
    return models.hieradet_sam2.MultiScaleAttention(C, C, 4, nn.MaxPool2d(2, 2))


@called_with(CHANNELS_LAST, other=((1, 6, 8, C),))
def maxvit():
    return models.maxxvit.AttentionCl(C, C, 4)


@called_with(CHANNELS_FIRST, other=(LARGER,), whole=True)
def coatnet():
    return models.maxxvit.Attention2d(C, C, 4)


@called_with(CHANNELS_FIRST, other=(LARGER,))
def multi_query():
    return MultiQueryAttention2d(C, C, 4, kv_stride=2)


@called_with(CHANNELS_FIRST, other=(LARGER,), whole=True)
def multi_query_v2():
    return MultiQueryAttentionV2(C, C, 4, key_dim=4, value_dim=4)


@called_with(CHANNELS_FIRST)
def bottleneck():
    return BottleneckAttn(C, C, feat_size=(4, 6), num_heads=4)


@called_with((2, C, 4, 8), other=((1, C, 8, 4),), whole=True)
def halo():
    return HaloAttn(C, num_heads=4, block_size=4, halo_size=1)


@called_with((2, 24, C), [4, 6], other=((1, 32, C), [8, 4]))
def pvt_v2():
    return models.pvt_v2.Attention(C, 4, sr_ratio=2)


@called_with((2, 24, C), (4, 6), other=((1, 30, C), (6, 5)), whole=True)
def twins_windows():
    return models.twins.LocallyGroupedAttn(C, 4, ws=3)


@called_with((2, 24, C), (4, 6))
def twins_pooled():
    return models.twins.GlobalSubSampleAttn(C, 4, sr_ratio=2)


@called_with(TOKENS)
def next_vit():
    return models.nextvit.EfficientAttention(C, head_dim=4)


@called_with(TOKENS, whole=True)
def next_vit_pooled():
    return models.nextvit.EfficientAttention(C, head_dim=4, sr_ratio=2)


@called_with(TOKENS)
def tnt():
    return models.tnt.Attention(C, C, 4)


@called_with(TOKENS)
def convit():
    return models.convit.GPSA(C, 4)


@called_with(TOKENS, other=((1, 36, C),))
def cait():
    return models.cait.TalkingHeadAttn(C, 4)


@called_with(WITH_CLASS, whole=True)
def class_attention():
    return models.cait.ClassAttn(C, 4)


@called_with(WITH_CLASS)
def crossvit():
    return models.crossvit.CrossAttention(C, 4)


@called_with(CHANNELS_LAST)
def volo():
    return models.volo.Attention(C, 4)


@called_with(WITH_CLASS)
def volo_class():
    return models.volo.ClassAttention(C, 4)


@called_with(WITH_CLASS, [4, 4])
def mvit():
    return models.mvitv2.MultiScaleAttention(C, C, (4, 4), 4, mode="conv", stride_kv=(2, 2))


@called_with(TOKENS, [4, 4])
def mvit_pooled_first():
    return models.mvitv2.MultiScaleAttentionPoolFirst(
        C, C, (4, 4), 4, mode="conv", stride_kv=(2, 2), has_cls_token=False
    )


@called_with(TOKENS, whole=True)
def hiera():
    return models.hiera.MaskUnitAttention(C, C, 4, window_size=4, use_mask_unit_attn=True)


@called_with((2, C, 4, 4))
def levit():
    return models.levit.Attention(C, 4, 4, resolution=WINDOW, use_conv=True)


@called_with(TOKENS)
def levit_strided():
    return models.levit.AttentionDownsample(C, C, 4, 4, resolution=WINDOW)


@called_with(TOKENS)
def tiny_vit():
    return models.tiny_vit.Attention(C, 4, 4, resolution=WINDOW)


@called_with(TOKENS)
def efficientformer():
    return models.efficientformer.Attention(C, 4, 4, resolution=4)


@called_with((2, C, 4, 4))
def efficientformer_v2():
    return models.efficientformer_v2.Attention2d(C, 4, 4, resolution=4)


@called_with((2, C, 4, 4))
def efficientformer_v2_strided():
    return models.efficientformer_v2.Attention2dDownsample(C, 4, 4, resolution=4, out_dim=C)


@called_with((2, C, 4, 4))
def efficientvit():
    return models.efficientvit_msra.CascadedGroupAttention(
        C, 4, 4, attn_ratio=1, resolution=4, kernels=(3, 3, 3, 3)
    )


@called_with(CHANNELS_FIRST)
def iformer():
    return models.iformer.SHMA(C)


@called_with(CHANNELS_FIRST)
def shvit():
    return models.shvit.SHSA(C, 8, 8, nn.BatchNorm2d)


@called_with((2, 64, 16, 24))
def cpubone():
    return models.cpubone.ConvAttention(64)


@called_with((2, 64, 16, 24))
def lowformer():
    return models.lowformer.ConvAttention(64)


@called_with(TOKENS, other=((1, 36, C),), mask=dict(key_padding_mask=~hide(16)[:2]), whole=True)
def multihead():
    return OnItself()


@called_with(TOKENS)
def multihead_in_linears():
    layer = OnItself()
    layer.attention = MultiheadLinears(layer.attention)
    return layer


@called_with(TOKENS, mask=dict(attn_mask=MASK))
def multihead_attention_mask():
    return OnItself(bias=False)


@called_with(TOKENS)
def gated_by_timm():
    return layers.Attention(C, 4, gated=True)


@called_with(WITH_CLASS)
def pool_latent():
    return layers.AttentionPoolLatent(C, num_heads=4, mlp_ratio=1.0)


@called_with(CHANNELS_FIRST)
def pool_rotary():
    return layers.RotAttentionPool2d(C, num_heads=4, ref_feat_size=4, pool_type="")


@called_with(CHANNELS_FIRST)
def pool_absolute():
    return layers.AttentionPool2d(C, feat_size=(4, 6), num_heads=4, pool_type="")


@called_with(CHANNELS_FIRST)
def pool_mean_query():
    return layers.SimPool2d(C, num_heads=4)


@called_with(CHANNELS_FIRST)
def non_local():
    return layers.NonLocalAttn(C, rd_channels=8)


@called_with((2, 2, 16, C))
def torchvision_maxvit():
    return torchvision_maxvit_layers.RelativePositionalMultiHeadAttention(C, 4, 16)


def of_transformers(family: str, **options: Any) -> Callable[[], nn.Module]:
    """A tiny vision model of transformers; the test is skipped where transformers is missing."""

    def make() -> nn.Module:
        transformers = optional("transformers", "nlp")
        config = getattr(transformers, f"{family}Config")
        network = getattr(transformers, f"{family}Model")
        return network(config(image_size=32, **options))

    return make


PLAIN = dict(
    num_hidden_layers=2,
    hidden_size=C,
    num_attention_heads=4,
    intermediate_size=C,
    patch_size=8,
)
IN_STAGES = dict(patch_size=4, embed_dim=C, depths=[2], num_heads=[4], window_size=4)
TORCHVISION_VIT = functools.partial(
    torchvision.models.VisionTransformer, 32, 8, 2, 4, C, 2 * C, num_classes=3
)
NETWORKS = {
    "transformers' ViT": of_transformers("ViT", **PLAIN),
    "transformers' DINOv2": of_transformers("Dinov2", **PLAIN),
    "transformers' DINOv2 with registers": of_transformers("Dinov2WithRegisters", **PLAIN),
    "transformers' DINOv3": of_transformers("DINOv3ViT", num_register_tokens=2, **PLAIN),
    "transformers' SigLIP": of_transformers("SiglipVision", **PLAIN),
    "transformers' CLIP": of_transformers("CLIPVision", **PLAIN),
    "transformers' BEiT": of_transformers("Beit", use_relative_position_bias=True, **PLAIN),
    "transformers' Swin": of_transformers("Swin", **IN_STAGES),
    "torchvision's ViT": TORCHVISION_VIT,
}
"""Networks of other libraries, whose attention is recast in its place."""
