"""AttentionToRefined next to the other rules, and what it cannot recast."""

import pytest
import timm
import torch
from timm.layers import Attention
from torch import nn

import isomorph as iso
from isomorph.surgery import build_rule
from test_attention_to_gpsa import vit


def test_dropout_norms_and_frozen_weights_are_kept():
    model = vit(qk_norm=True, attn_drop_rate=0.3, proj_drop_rate=0.2)
    model.blocks[0].attn.qkv.requires_grad_(False)
    new = iso.recast(model, iso.AttentionToRefined(), "blocks.0.attn").blocks[0].attn
    assert (new.attn_drop.p, new.proj_drop.p) == (0.3, 0.2)
    assert isinstance(new.q_norm, nn.LayerNorm)
    assert not new.qkv.weight.requires_grad
    assert new.refine.expand.requires_grad


def test_it_stands_beside_the_other_forms():
    """Refined attention with pyramids for its projection; gated attention elsewhere; monitored."""
    model = vit()
    new = iso.recast(model, iso.AttentionToRefined(span="spatial"), "blocks.0.attn")
    new = iso.recast(new, iso.AttentionToGPSA(), "blocks.1.attn")
    new = iso.recast(new, iso.LinearToPyramid(), "blocks.0.attn.qkv")
    x = torch.randn(1, 3, 224, 224)
    iso.verify(model, new, x)
    assert iso.analysis.logit_stats(new, x)["blocks.0.attn"].entropy.shape == (3,)
    torch.testing.assert_close(iso.fuse(new.eval())(x), new(x), atol=1e-4, rtol=1e-4)
    with pytest.raises(iso.UserError, match="SpatialAttention is a layer of isomorph already; revert it first"):
        iso.recast(new, iso.AttentionToGPSA(), "blocks.0.attn")


def test_targets_that_cannot_be_refined_are_refused():
    alone = nn.Sequential(Attention(12, 3))
    iso.recast(alone, iso.AttentionToRefined(), "0")
    with pytest.raises(iso.UserError, match="the grid of its tokens is unknown"):
        iso.recast(alone, iso.AttentionToRefined(span="spatial"), "0")
    placed = iso.AttentionToRefined(span="spatial", grid_size=[2, 3], prefix_tokens=1)
    iso.verify(alone, iso.recast(alone, placed, "0"), torch.randn(2, 7, 12))
    gated = nn.Sequential(Attention(12, 3, gated=True))
    iso.verify(gated, iso.recast(gated, iso.AttentionToRefined(), "0"), torch.randn(2, 7, 12))
    bare = nn.Sequential(Attention(12, 3, proj_bias=False))
    for rule in (iso.AttentionToRefined(reduce=False), iso.AttentionToRefined()):
        iso.verify(bare, iso.recast(bare, rule, "0"), torch.randn(2, 7, 12))
    pyramids = iso.recast(alone, iso.LinearToPyramid(), "0.qkv")
    with pytest.raises(iso.UserError, match=r"JointPyramid and Linear, not nn\.Linear"):
        iso.recast(pyramids, iso.AttentionToRefined(), "0")
    both = iso.recast(iso.recast(alone, iso.AttentionToRefined(), "0"), iso.LinearToPyramid(), "0.qkv")
    with pytest.raises(iso.UserError, match="fuse the model first"):
        iso.revert(both)
    iso.verify(alone, iso.revert(iso.fuse(both.eval())), torch.randn(2, 7, 12))
    with pytest.raises(iso.UserError, match="gated or normalised"):
        iso.recast(gated, iso.AttentionToRefined(reduce=False), "0")
    with pytest.raises(iso.UserError, match="AttentionToRefined recasts attention"):
        iso.recast(timm.create_model("resnet18"), iso.AttentionToRefined(), "layer1.*")
    with pytest.raises(iso.UserError, match="AttentionToRefined has no layout; it has ratio, kernel"):
        build_rule("AttentionToRefined", layout="P-W2S")
