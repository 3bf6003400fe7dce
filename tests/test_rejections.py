"""What `recast` rejects: a model, a rule and `where`, and the words that its one line must have."""

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models import xcit
from torch import nn
from torchvision.models.swin_transformer import ShiftedWindowAttention

import isomorph as iso
from attention_layers import LAYERS, C
from law_rows import VIT
from refusals import refused

GATED = iso.AttentionToGPSA()
REFINED = iso.AttentionToRefined()
CONV = iso.ConvToGPSA()
PYRAMID = iso.LinearToPyramid()
SPATIAL = iso.AttentionToRefined(span="spatial")
RELATIVE = iso.AttentionToRelative()
ALL_MAPS = iso.AttentionToRefined(reduce=False)
RECOMPUTED = iso.AttentionToRefined(recompute=True)


class Restandardised(nn.Conv2d):
    """Computes with another weight than it holds, as timm's StdConv2d does."""

    def forward(self, x):
        return nn.functional.conv2d(x, self.weight - self.weight.mean())


class Beit(nn.Module):
    """Reads the weight of its projection."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(4))


class ByHead(nn.Module):
    """Deals its outputs to heads first, as LeViT does."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.key_dim = 2


def cnn():
    return timm.create_model("cifar_resnet20")


def vit(**options):
    return timm.create_model("vit_tiny_patch16_224", **VIT | options)


def attention(drop=None, **options):
    layer = Attention(12, 3, **options)
    layer.attn_drop = drop or layer.attn_drop
    return layer


def hooked(module):
    module.register_forward_pre_hook(lambda *_: None)
    return module


def alone(make):
    return lambda: nn.Sequential(make())


def conv(*args, **options):
    return alone(lambda: nn.Conv2d(4, 4, *args, **options))


def of(name):
    return alone(LAYERS[name].make)


def once(rule, model=vit, where="blocks.*.attn"):
    return lambda: iso.recast(model(), rule, where)


normed = nn.utils.parametrizations.weight_norm
NEAR = "nearest names: "
WEIGHTS = "blocks.*.attn.v"
REJECTED = {
    # the arguments
    "a class": (cnn, iso.ConvToGPSA, "layer3.*", "is not a rule", "ConvToGPSA("),
    "no model": (lambda: "resnet18", CONV, "*", "'resnet18' is not a model"),
    # what it selects
    "one glob of two": (
        cnn,
        CONV,
        ["layer3.*.conv1", "layr2.*.conv1"],
        "'layr2.*.conv1' in `where`",
        NEAR,
        "layer2",
    ),
    "a predicate": (
        cnn,
        CONV,
        lambda *_: False,
        "<lambda> matches no module; its layers: conv1, ",
        " 4 more",
    ),
    "a norm": (
        cnn,
        CONV,
        "layer3.*.bn1",
        "recasts Conv2d",
        "only other classes",
        f"{NEAR}layer3.*.conv1",
    ),
    "a block that is missing": (
        vit,
        PYRAMID,
        ["blocks.0.attn.v", "blocks.7.attn.v"],
        "'blocks.7.attn.v' in `where`",
    ),
    # convolutions
    "another forward": (
        alone(lambda: Restandardised(4, 4, 3)),
        CONV,
        "0",
        "0: ",
        "overrides forward of nn.Conv2d",
    ),
    "weight norm": (alone(lambda: normed(nn.Conv2d(4, 4, 3))), CONV, "0", "param"),
    "an even kernel": (conv(2), CONV, "0", "0: ", "2x2", "even"),
    "dilation": (conv(3, dilation=2), CONV, "0", "dilation=(2, 2)"),
    "hooks": (alone(lambda: hooked(nn.Conv2d(4, 4, 3))), CONV, "0", "0 has hooks", "would be lost"),
    # linear layers
    "a weight that is read": (Beit, PYRAMID, "qkv", "Beit reads its weight"),
    "outputs by head": (alone(ByHead), PYRAMID, "0.q", "orders the outputs by head"),
    "a pyramid": (
        once(PYRAMID, where="*.attn.v"),
        PYRAMID,
        "*.attn.v",
        "blocks.0.attn.v: ",
        "already a pyramid",
    ),
    # attention
    "no grid, gated": (
        alone(attention),
        GATED,
        "0",
        "grid of its tokens is unknown",
        "AttentionToGPSA grid_size",
    ),
    "two grids": (
        lambda: nn.ModuleList([vit(), vit()]),
        GATED,
        "1.blocks.*.attn",
        "several patch embeddings",
    ),
    "dropped patches": (lambda: vit(patch_drop_rate=0.25), GATED, "blocks.*.attn", "drops patches"),
    "dropout, hooks": (
        alone(lambda: attention(hooked(nn.Dropout()))),
        REFINED,
        "0",
        "attn_drop has hooks",
        "remove",
    ),
    "pyramids inside": (
        once(PYRAMID, alone(attention), "0.qkv"),
        REFINED,
        "0",
        "JointPyramid",
        "not an nn.Linear",
    ),
    "twice, an edit": (once(REFINED, of("swin"), "0"), GATED, "0", "edited already", "revert"),
    "no map": (alone(lambda: xcit.XCA(C, 4)), REFINED, "0", "0: ", "XCA attends between channels"),
    "a hidden mask": (
        alone(lambda: ShiftedWindowAttention(C, [2, 2], [1, 1], 4)),
        REFINED,
        "0",
        "hide their mask",
    ),
    "batches counted twice": (of("shvit"), RECOMPUTED, "0", "twice in the BatchNorm"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_it_is_rejected_in_one_line_that_says_why(name):
    make, rule, where, *words = REJECTED[name]
    said = refused(".", iso.recast, make(), rule, where)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("model", ["mobileone_s0", "resnet18", "vit_tiny_patch16_224"])
@pytest.mark.parametrize("rule", [PYRAMID, CONV, REFINED], ids=lambda rule: type(rule).__name__)
def test_by_default_what_the_rule_does_not_accept_is_skipped_and_listed(model, rule):
    """The outermost of modules inside each other are taken; what is excluded stays, with all inside."""
    small = dict(depth=1, img_size=32) if "vit" in model else {}
    net = timm.create_model(model, num_classes=3, **small).eval()
    found = iso.surgery.acceptance(net, rule)
    if not found.accepted:
        refused("recasts|does not fit", iso.recast, net, rule)
        return
    new = iso.recast(net, rule)
    names = iso.edits(new)[0].names
    assert set(names) <= set(found.accepted)
    for name in found.accepted:
        if name:
            assert any(f"{name}.".startswith(f"{taken}.") for taken in names)
    noted = [note for note in iso.surgery.notes(new) if note.startswith("not recast, as ")]
    assert len(noted) == bool(found.rejected)
    assert not found.rejected or next(iter(found.rejected)) in noted[0]
    if len(names) == 1:
        refused("exclude leaves out the others", iso.targets, net, rule, exclude=names[0])
        return
    without = iso.targets(net, rule, exclude=names[0])
    assert without == [name for name in names[1:] if not name.startswith(f"{names[0]}.")]


def test_exclude_is_checked_as_where_is_and_targets_are_not_nested():
    found = iso.targets(cnn(), CONV, "layer3.*", exclude=lambda name, _: "conv2" in name)
    assert found == [f"layer3.{i}.conv1" for i in range(3)]
    refused(
        "'layr3' in `exclude` matches no module; nearest names: layer3",
        iso.targets,
        cnn(),
        CONV,
        exclude=["layr3"],
    )
    refused("exclude=5 selects nothing", iso.targets, cnn(), CONV, exclude=5)
    refused("matches no module", iso.targets, cnn(), CONV, "layer3.*", exclude="layer3")
    refused("is inside target layer3", iso.unstride, cnn(), ["layer3", "layer3.0"])
