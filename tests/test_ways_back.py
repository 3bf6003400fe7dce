"""Every fuse, revert, prune and merge: all weights and statistics moved, against the unmerged model in float64."""

import copy
import functools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models import ghostnet, levit, repvit
from timm.models.byobnet import ByoBlockCfg
from timm.utils import reparameterize_model
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import isomorph as iso
from isomorph.layers.pyramid.base import Pyramid
from isomorph.surgery.mobileone import PyramidBlock
from law_rows import (
    MAP,
    OPEN,
    RULES,
    SHUT,
    TOKENS,
    Call,
    alone,
    attention,
    conv,
    deviation,
    disturb,
    mobileone,
    move,
    pair,
    values,
    vit,
)

GATING = ("gate", "position", "centre", "locality")
"""Parameters that decide whether a gated layer is still a convolution or attention; a way back needs them unmoved."""
PLACED = dict(grid_size=(2, 3), prefix_tokens=1)

IN_FLOAT32 = 1e-6
"""Bound for units that timm merges in float32, and for refined attention, whose refiner starts at random."""


class Back(NamedTuple):
    """A model after a rule, the way back, the class that it gives, and how far it may be from the model."""

    make: Callable[[], nn.Module]
    rule: Any
    call: Call
    way: Callable[[nn.Module], nn.Module]
    gives: type[nn.Module]
    where: Any = "layer"
    bound: float = 1e-10


def mobileone_network() -> nn.Module:
    """timm's, of two stages with a depthwise and a pointwise block each."""

    def stage(width, out):
        branches = dict(num_conv_branches=2)
        depthwise = ByoBlockCfg(type="one", d=1, c=width, gs=1, block_kwargs=branches)
        pointwise = ByoBlockCfg(
            type="one", d=1, c=out, gs=0, block_kwargs=dict(kernel_size=1, **branches)
        )
        return depthwise, pointwise

    stages = (stage(8, 12), stage(12, 16))
    return timm.create_model("mobileone_s0", num_classes=3, stem_chs=8, blocks=stages)


def fused(
    make: Callable[[], nn.Module],
    call: Call,
    gives: Any = nn.Linear,
    where: Any = "layer",
    **rule: Any,
) -> Back:
    return Back(make, iso.LinearToPyramid(**rule), call, iso.fuse, gives, where)


def unit(make: Callable[[], nn.Module], call: Call, gives: Any, where: str) -> Back:
    """A pyramid in a unit with a norm, which stays: without an image nothing is merged."""
    row = fused(alone(make), call, gives, where)
    return row._replace(way=partial(iso.fuse, norms=False), bound=IN_FLOAT32)


def merged(model: nn.Module) -> nn.Module:
    return reparameterize_model(iso.fuse(model, norms=False))


def mobileone_row(make: Callable[[], nn.Module], call: Call, where: Any = "layer") -> Back:
    """Pyramids in blocks of MobileOne, whose branches and norms timm merges."""
    return fused(make, call, PyramidBlock, where)._replace(way=merged)


def reverted(
    make: Callable[[], nn.Module], rule: Any, call: Call, gives: Any, where: Any = "layer"
) -> Back:
    refined = isinstance(rule, iso.AttentionToRefined)
    return Back(make, rule, call, iso.revert, gives, where, IN_FLOAT32 if refined else 1e-10)


CONV = conv(6, 8, 3, padding=1)
LINEAR = alone(lambda: nn.Linear(12, 10))
IMAGES = ((2, 3, 32, 32),)
SMALL = vit(depth=1)
SQUARE = ((2, 8, 6, 6),)
NORMED = attention(qk_norm=True, norm_layer=nn.LayerNorm)


def of_conv(rule: Any, make: Callable[[], nn.Module] = CONV) -> Back:
    return reverted(make, rule, MAP, nn.Conv2d)


def of_attention(rule: Any, make: Callable[[], nn.Module] = NORMED) -> Back:
    return reverted(make, rule, TOKENS, Attention)


def in_vit(rule: Any, gives: Any = Attention, where: str = "blocks.0.attn") -> Back:
    return reverted(SMALL, rule, IMAGES, gives, where)


GATED = iso.AttentionToGPSA(**OPEN, **PLACED)
WAYS_BACK = {
    "linear": fused(LINEAR, TOKENS),
    "linear, naive": fused(LINEAR, TOKENS, layout="naive-W4", init="paper"),
    "conv": fused(CONV, MAP, nn.Conv2d),
    "conv, depthwise": fused(conv(6, 6, 3, 2, 1, groups=6), MAP, nn.Conv2d, layout="R-D2W1S"),
    "conv, patchify": fused(vit(depth=1), IMAGES, nn.Conv2d, "patch_embed.proj"),
    "pair": fused(pair, MAP, nn.Conv2d),
    "joint qkv": fused(SMALL, IMAGES, nn.Linear, "blocks.0.attn.qkv"),
    "values alone": fused(SMALL, IMAGES, nn.Linear, "blocks.0.attn.v"),
    "mobileone block, 1x1": fused(mobileone(1), MAP, nn.Sequential),
    "mobileone block": mobileone_row(mobileone(3, group_size=1), MAP),
    "mobileone": mobileone_row(mobileone_network, IMAGES, ["stem", "stages.?.?"]),
    "levit's unit": unit(lambda: levit.LinearNorm(8, 12), ((2, 5, 8),), nn.Linear, "layer.linear"),
    "repvit's unit": unit(lambda: repvit.RepVggDw(8, 3), SQUARE, nn.Conv2d, "layer.conv.c"),
    "ghostnet's unit": unit(lambda: ghostnet.ConvBnAct(8, 12, 3), SQUARE, nn.Conv2d, "layer.conv"),
    "a convolution's new norm": Back(CONV, iso.ConvToConvNorm(), MAP, iso.fuse, nn.Conv2d),
    "GPSA2d": of_conv(iso.ConvToGPSA(**SHUT)),
    "GPSA2d, strided": of_conv(iso.ConvToGPSA(**SHUT), conv(6, 6, 5, 2, 2, groups=6)),
    "WindowGPSA2d": of_conv(iso.ConvToGPSA(content="window", **SHUT)),
    "PositionalConv2d": of_conv(iso.ConvToGPSA(content="none", locality=80.0)),
    "windows": in_vit(iso.AttentionToWindow(window=2)),
    "ViTGPSA": of_attention(GATED),
    "ViTGPSA, in a ViT": in_vit(iso.AttentionToGPSA(**OPEN)),
    "GatedMap": of_attention(GATED, attention(gated=True)),
    "RefinedAttention": of_attention(iso.AttentionToRefined()),
    "LocalAttention": of_attention(iso.AttentionToRefined(ratio=0)),
    "ExpandedAttention": of_attention(iso.AttentionToRefined(reduce=False), attention()),
    "SpatialAttention": in_vit(iso.AttentionToRefined(span="spatial")),
    "JointLinears": in_vit(iso.AttentionToLinears(), nn.Linear, "blocks.0.attn.qkv"),
    "ViTRelativeAttention": of_attention(iso.AttentionToRelative(**PLACED)),
    "pruned to position": Back(
        CONV, iso.ConvToGPSA(gate=60.0, locality=1.0), MAP, iso.prune, iso.layers.PositionalConv2d
    ),
    "pruned to a convolution": Back(CONV, iso.ConvToGPSA(**SHUT), MAP, iso.prune, nn.Conv2d),
    "pruned to attention": Back(attention(), GATED, TOKENS, iso.prune, Attention),
}


def is_needed_unmoved(key: str) -> bool:
    """Whether a parameter decides whether the way back exists."""
    name = key.rpartition(".")[2]
    return name in GATING or ".refine." in f".{key}" or "relative_bias" in key


@functools.cache
def trained(name: str) -> nn.Module:
    """The model of a row after its rule, with everything moved but what the way back needs."""
    torch.manual_seed(0)
    row = WAYS_BACK[name]
    model = iso.recast(disturb(row.make()), row.rule, row.where)
    kept = {}
    for key, parameter in model.named_parameters():
        if is_needed_unmoved(key):
            kept[key] = parameter.detach().clone()
    disturb(model)
    model.load_state_dict(model.state_dict() | kept)
    return model


@pytest.mark.parametrize("name", WAYS_BACK)
@torch.no_grad()
def test_the_way_back_computes_what_the_trained_model_computes(name):
    row = WAYS_BACK[name]
    model = trained(name)
    before = copy.deepcopy(model.state_dict())
    x = values(row.call)
    original = disturb(row.make())
    assert deviation(model(*x), original(*x)) > 1e-3

    back = row.way(model)
    assert deviation(back(*x), model(*x)) < row.bound
    assert row.gives in {type(module) for module in back.modules()}
    for module in back.modules():
        assert not isinstance(module, Pyramid)
        if row.way is merged:
            assert not isinstance(module, _BatchNorm)
    for parameter in back.parameters():
        assert parameter.dtype == torch.float64
    assert not back.training

    after = model.state_dict()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key])


@pytest.mark.parametrize("name", WAYS_BACK)
def test_the_way_back_keeps_dtype_device_and_memory_format(name):
    row = WAYS_BACK[name]
    model = copy.deepcopy(trained(name)).to(torch.float16, memory_format=torch.channels_last)
    back = row.way(model)
    for parameter in back.parameters():
        assert parameter.dtype == torch.float16
        if parameter.ndim == 4:
            assert parameter.is_contiguous(memory_format=torch.channels_last)


REVERTED = [name for name, row in WAYS_BACK.items() if row.way is iso.revert]
HAVE_NO_CONDITION = ("JointLinears", "windows")


@pytest.mark.parametrize("name", [name for name in REVERTED if name not in HAVE_NO_CONDITION])
def test_a_layer_that_left_its_original_is_named_with_its_deviation(name):
    row = WAYS_BACK[name]
    model = copy.deepcopy(trained(name))
    for key, parameter in model.named_parameters():
        if is_needed_unmoved(key):
            move(parameter)
    with pytest.raises(iso.UserError, match=rf"{row.where}.*deviation .*\d"):
        iso.revert(model)


REPARAMETERISED = {  # a network whose blocks merge their branches, and the layers in them that become pyramids
    "repvgg_a0": ({}, "stages.0.*.conv_*.conv"),
    "fastvit_t8": (dict(layers=(1, 1, 1, 1)), "stages.0.blocks.0.*.conv_kxk.*.conv"),
    "repvit_m0_9": ({}, "stages.0.blocks.0.*.conv*.c"),
}


@pytest.mark.parametrize("name", REPARAMETERISED)
@torch.no_grad()
def test_timm_merges_branches_with_pyramids_that_were_not_fused(name):
    options, where = REPARAMETERISED[name]
    net = timm.create_model(name, num_classes=3, **options).eval()
    x = torch.randn(1, 3, 64, 64)
    rule = iso.LinearToPyramid()
    accepted = iso.surgery.acceptance(net, rule, where).accepted
    wide = disturb(iso.recast(net, rule, accepted)).float()
    wide = copy.deepcopy(pickle.loads(pickle.dumps(wide)))
    before = wide(x)
    thin = reparameterize_model(wide)
    assert deviation(thin(x), before) < 1e-4
    assert deviation(wide(x), before) == 0


def classes_of_rules(rows):
    return {type(row.rule) for row in rows.values()}


def test_every_rule_has_a_way_back():
    assert classes_of_rules(WAYS_BACK) == classes_of_rules(RULES)


def test_fuse_takes_a_layer_at_the_root_and_once_where_it_is_shared():
    shared = disturb(iso.layers.PyramidLinear(4, 4))
    x = torch.randn(3, 4, dtype=torch.float64)
    assert type(iso.fuse(shared)) is nn.Linear
    model = nn.Sequential(shared, nn.ReLU(), shared, iso.layers.GPSA2d(4, 4, 3)).eval()
    thin = iso.fuse(model)
    assert thin[0] is thin[2]
    assert isinstance(thin[3], iso.layers.GPSA2d)  # its way back has a condition
    torch.testing.assert_close(thin[:3](x), model[:3](x))


class TwoConvolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, 2, 1)

    def forward(self, x):
        return self.second(self.first(x).relu()).mean((2, 3))


BEFORE = {
    "stride 1": lambda net: iso.unstride(net, "second"),
    "a pyramid": lambda net: iso.recast(net, iso.LinearToPyramid(), where="second"),
    "a norm": lambda net: iso.recast(net, iso.ConvToConvNorm(), where="second"),
}


@pytest.mark.parametrize("edit", BEFORE.values(), ids=BEFORE)
@torch.no_grad()
def test_what_was_changed_before_stays_when_a_later_edit_is_reverted(edit, tmp_path):
    x = torch.randn(2, 3, 17, 23)
    net = TwoConvolutions().eval()
    changed = edit(net).eval()
    inserted = iso.insert(changed, iso.layers.MapAttention, after="second", example=x)
    back = iso.revert(inserted)
    assert iso.edits(back) == iso.edits(changed)
    iso.save(back, tmp_path / "back.safetensors")
    again = iso.load(tmp_path / "back.safetensors", base=TwoConvolutions()).eval()
    assert torch.equal(again(x), changed(x))


@pytest.mark.parametrize("fused_first", [True, False])
@torch.no_grad()
def test_merged_norms_stay_when_a_convolution_is_reverted(fused_first, tmp_path):
    model = disturb(timm.create_model("cifar_resnet20")).float()
    recast = partial(iso.recast, rule=iso.ConvToGPSA("exact"), where="layer3.*.conv?")
    edits = (iso.fuse, recast) if fused_first else (recast, iso.fuse)
    back = iso.revert(edits[1](edits[0](model)))
    iso.save(back, tmp_path / "back.safetensors")
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(iso.load(tmp_path / "back.safetensors").eval()(x), back(x))
    assert deviation(back(x), model(x)) < 1e-4


def test_a_new_classifier_is_saved_where_the_old_one_was_recast(tmp_path):
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=24, num_heads=3)
    wide = iso.recast(vit, iso.LinearToPyramid()).eval()
    assert any("head" in edit.names for edit in iso.edits(wide))
    wide.reset_classifier(7)
    iso.save(wide, tmp_path / "new.safetensors")
    x = torch.randn(1, 3, 32, 32)
    loaded = iso.load(tmp_path / "new.safetensors").eval()
    assert type(loaded.head) is nn.Linear
    assert torch.equal(loaded(x), wide(x))


def test_what_is_fused_inside_a_reverted_layer_leaves_no_edit(tmp_path):
    """nn.MultiheadAttention reads the weight of out_proj without a call, so it cannot be a pyramid there again."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    base = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 16)
    net = iso.recast(base, iso.AttentionToLinears(), where="layers.*.self_attn")
    wide = iso.LinearToPyramid("naive-W1")
    net = iso.recast(net, wide, where="layers.*.self_attn.out_proj").eval()
    back = iso.revert(iso.fuse(net, x))
    assert iso.edits(back) == ()
    assert iso.verify(base, back, x).passed
    iso.save(back, path := tmp_path / "net.safetensors")
    torch.testing.assert_close(iso.load(path, base=base)(x), back(x))


def test_a_revert_is_verified_at_its_own_tolerance_also_before_a_later_edit():
    cnn = timm.create_model("cifar_resnet20").eval()
    net = iso.recast(cnn, iso.ConvToGPSA(init="exact"), where="layer3.0.conv1")
    net = iso.insert(net, iso.layers.MapAttention, after="layer2.2")
    back = iso.revert(net, where="layer3.0.conv1")
    assert iso.verify(net, back, torch.randn(2, 3, 32, 32)).passed
