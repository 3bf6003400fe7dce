"""AttentionToRefined: any ViT of timm refines its maps, the same function at birth, and finds its way back."""

import copy
import pickle

import pytest
import timm
import torch
from timm.layers import Attention
from torch import nn

import isomorph as iso
from isomorph.layers import RefinedAttention
from isomorph.surgery import build_rule
from test_attention_to_gpsa import VITS, size_of, vit

FORMS = {
    "both": dict(),
    "ratio 6": dict(ratio=6, kernel=5),
    "talking heads": dict(ratio=1, kernel=1),
    "local alone": dict(ratio=0),
    "without reduction": dict(reduce=False),
    "spatial": dict(span="spatial"),
    "row and column": dict(span="row+column"),
    "recomputed": dict(recompute=True),
}


@pytest.mark.parametrize("name", VITS)
def test_equal_at_birth(name):
    model = vit(name)
    where = "blocks.*.attns.*.attn" if "18x2" in name else "blocks.[01].attn"
    new = iso.recast(model, iso.AttentionToRefined(), where)
    report = iso.verify(model, new, torch.randn(2, 3, *size_of(model)), atol=1e-5)
    assert len(report.targets) == (4 if "18x2" in name else 2)
    assert all(isinstance(new.get_submodule(target.name), RefinedAttention) for target in report.targets)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_equal_saved_and_reverted(form, tmp_path):
    model = vit("vit_small_patch16_224", dynamic_img_size=True)
    rule = iso.AttentionToRefined(**FORMS[form])
    new = iso.recast(model, rule, "blocks.*.attn")
    batches = [torch.randn(1, 3, 224, 224), torch.randn(2, 3, 64, 160)]
    report = iso.verify(model, new, batches)
    assert report.fp64 < 1e-6
    new(batches[1]).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for n, p in new.named_parameters() if ".refine." in n)
    assert rule == eval(repr(rule), {"AttentionToRefined": iso.AttentionToRefined})
    iso.save(new, tmp_path / "refined.safetensors")
    again = iso.load(tmp_path / "refined.safetensors").eval()
    torch.testing.assert_close(again(batches[1]), new(batches[1]))
    for twin in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        torch.testing.assert_close(twin(batches[1]), new(batches[1]))
    back = iso.revert(new)
    assert not iso.edits(back)
    assert {type(block.attn) for block in back.blocks} == {Attention}
    iso.verify(model, back, batches[1])


def test_no_way_back_for_what_has_been_refined():
    new = iso.recast(vit(), iso.AttentionToRefined(init="paper"), "blocks.0.attn")
    with pytest.raises(
        iso.UserError, match=r"blocks\.0\.attn: this layer is not plain attention: the relative deviation is"
    ):
        iso.revert(new)


def test_dropout_norms_and_frozen_weights_are_kept():
    model = vit("vit_tiny_patch16_224", attn_drop_rate=0.3, proj_drop_rate=0.2)
    model.blocks[0].attn.qkv.requires_grad_(False)
    new = iso.recast(model, iso.AttentionToRefined(), "blocks.0.attn").blocks[0].attn
    assert (new.attn_drop.p, new.proj_drop.p) == (0.3, 0.2)
    assert isinstance(new.q_norm, nn.LayerNorm)
    assert not new.qkv.weight.requires_grad
    assert new.refine.expand.requires_grad
    half = iso.recast(vit().bfloat16(), iso.AttentionToRefined(), "blocks.0.attn")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert type(iso.revert(half).blocks[0].attn) is Attention


def test_it_stands_beside_the_other_forms():
    """Refined attention with pyramids for its projection; gated attention elsewhere; monitored."""
    model = vit("vit_small_patch16_224")
    new = iso.recast(model, iso.AttentionToRefined(span="spatial"), "blocks.0.attn")
    new = iso.recast(new, iso.AttentionToGPSA(), "blocks.1.attn")
    new = iso.recast(new, iso.LinearToPyramid(), "blocks.0.attn.qkv")
    x = torch.randn(1, 3, 224, 224)
    iso.verify(model, new, x)
    assert iso.analysis.logit_stats(new, x)["blocks.0.attn"].entropy.shape == (6,)
    torch.testing.assert_close(iso.fuse(new.eval())(x), new(x), atol=1e-4, rtol=1e-4)
    with pytest.raises(iso.UserError, match="SpatialAttention is a layer of isomorph already; revert it first"):
        iso.recast(new, iso.AttentionToGPSA(), "blocks.0.attn")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(ratio=-1), "ratio -1 must be a whole number"),
        (dict(ratio=1.5), "ratio 1.5"),
        (dict(ratio=True), "ratio True"),
        (dict(reduce="no"), "reduce 'no' must be true or false"),
        (dict(kernel=2), "kernel 2 must be odd"),
        (dict(span="image"), "span 'image' is unknown"),
        (dict(init="exact"), "init 'exact' is unknown"),
        (dict(ratio=0, reduce=False), "reduce=False needs a ratio"),
        (dict(span="spatial", reduce=False), "span='spatial' needs reduce=True"),
    ],
)
def test_impossible_forms_are_refused(fields, said):
    with pytest.raises(iso.UserError, match=said):
        iso.AttentionToRefined(**fields)


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


def test_a_shared_attention_is_refined_once():
    attention = Attention(12, 3)
    model = nn.Sequential(attention, nn.LayerNorm(12), attention)
    new = iso.recast(model, iso.AttentionToRefined(), "0")
    assert new[0] is new[2]
    iso.verify(model, new, torch.randn(1, 4, 12))
