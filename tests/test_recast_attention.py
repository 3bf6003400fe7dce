"""Recast attention: what is its own to each rule, besides the laws of all rules (test_recast_laws.py)."""

import copy
import pickle

import pytest
import timm
import torch
from timm.layers import Attention
from torch import nn

import isomorph as iso
from isomorph.layers import GPSA, ViTGPSA

WHERE = "blocks.[01].attn"


def vit(**options):
    model = timm.create_model("deit_tiny_patch16_224", **dict(num_classes=7, depth=2) | options)
    for parameter in model.parameters():
        parameter.data += 0.1 * parameter.data.std(correction=0) * torch.randn_like(parameter)
    return model.eval()


def test_the_grid_follows_the_image():
    model = vit(dynamic_img_size=True)
    new = iso.recast(model, iso.AttentionToGPSA(locality=2.0, gate=0.0), WHERE)
    iso.verify(
        model,
        iso.recast(model, iso.AttentionToGPSA(), WHERE),
        [torch.randn(1, 3, 224, 224), torch.randn(1, 3, 64, 160)],
    )
    x = torch.randn(1, 3, 64, 160)
    by_hand = copy.deepcopy(new)
    for hooks in (by_hand.patch_embed._forward_pre_hooks,):
        hooks.clear()
    for layer in (by_hand.blocks[0].attn, by_hand.blocks[1].attn):
        layer.grid_size = (4, 10)
    torch.testing.assert_close(new(x), by_hand(x))
    for layer in (by_hand.blocks[0].attn, by_hand.blocks[1].attn):
        layer.grid_size = (10, 4)
    assert not torch.allclose(new(x), by_hand(x), atol=1e-4)
    for twin in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        twin(torch.randn(1, 3, 160, 64))
        assert twin.blocks[0].attn.grid_size == (10, 4)
    assert new.blocks[0].attn.grid_size == (4, 10)
    new.set_input_size((96, 32))
    assert new(torch.randn(1, 3, 96, 32)).shape == (1, 7)


def test_class_tokens_have_no_place():
    """With gates shut to content the patches look by place only; the class token still looks by content."""
    new = iso.recast(vit(), iso.AttentionToGPSA(locality=4.0, gate=40.0), "blocks.0.attn")
    layer, x = new.blocks[0].attn, torch.randn(1, 197, 192)
    attention = layer.attention(x)
    assert attention[..., 1:, 0].abs().max() < 1e-12  # no patch looks at the class token
    plain = layer.to_attention(atol=torch.inf)
    qkv = plain.qkv(x).unflatten(-1, (3, 3, 64)).permute(2, 0, 3, 1, 4)
    content = torch.softmax(qkv[0] @ qkv[1].transpose(-2, -1) / 8, dim=-1)
    torch.testing.assert_close(attention[:, :, 0], content[:, :, 0])
    torch.testing.assert_close(attention.sum(-1), torch.ones(1, 3, 197))
    middle = 1 + 7 * 14 + 7
    assert attention[0, :, middle].argmax(-1).tolist() == [middle - 1, middle, middle + 1]  # a 1 x 3 window


@pytest.mark.parametrize(("heads", "window"), [(3, (1, 3)), (6, (2, 3)), (12, (3, 4)), (16, (4, 4)), (7, (1, 7))])
def test_heads_form_the_squarest_window(heads, window):
    centre = ViTGPSA(heads * 4, heads, (5, 5)).centre
    assert (len(set(centre[:, 0].tolist())), len(set(centre[:, 1].tolist()))) == window
    torch.testing.assert_close(centre.mean(0), torch.zeros(2))


def test_born_as_the_paper():
    model = vit()
    layer = iso.recast(model, iso.AttentionToGPSA("paper"), "blocks.0.attn").blocks[0].attn
    assert torch.equal(layer.v.weight, torch.eye(192))
    assert torch.equal(layer.v.bias, torch.zeros(192))
    assert torch.equal(layer.gate, torch.ones(3))
    assert torch.equal(layer.qk.weight, model.blocks[0].attn.qkv.weight[:384])
    assert torch.equal(layer.proj.weight, model.blocks[0].attn.proj.weight)


def test_a_convit_is_a_recast_vit():
    """The named model, and a ViT without a class token recast as in the paper, are one function."""
    shape = dict(embed_dim=36, num_heads=9, depth=3, class_token=False, global_pool="avg", num_classes=5, img_size=64)
    plain = timm.create_model("convit_ti", local_up_to_layer=0, **shape).eval()
    by_hand = iso.recast(plain, iso.AttentionToGPSA("paper"), "blocks.[01].attn")
    named = timm.create_model("convit_ti", local_up_to_layer=2, **shape).eval()
    named.load_state_dict(by_hand.state_dict())
    x = torch.randn(2, 3, 96, 64)
    torch.testing.assert_close(named(x), by_hand(x))


def test_a_recast_convit_saves_and_loads(tmp_path):
    new = iso.recast(timm.create_model("convit_ti", num_classes=3), iso.AttentionToGPSA(), "blocks.1*.attn").eval()
    iso.save(new, tmp_path / "new.safetensors")
    x = torch.randn(1, 3, 64, 96)
    assert torch.equal(iso.load(tmp_path / "new.safetensors")(x), new(x))


def test_anneals_open():
    new = iso.recast(vit(), iso.AttentionToGPSA(), WHERE)
    anneal = iso.Anneal(10, stop=(2.0, 1.0))
    anneal.apply(new, 0)
    assert new.blocks[0].attn.gate.tolist() == [-15.0] * 3  # still the attention
    anneal.apply(new, 10)
    layer = new.blocks[0].attn
    assert layer.gate.tolist() == [1.0] * 3
    assert layer.locality.tolist() == [2.0] * 3
    assert layer.centre.tolist() == [[0, -1], [0, 0], [0, 1]]
    with pytest.raises(iso.UserError, match="was not recast"):
        iso.Anneal(10).apply(timm.create_model("convit_ti"), 0)
    with pytest.raises(iso.UserError, match="whole number"):
        iso.Anneal(1.5)


def test_a_grid_of_the_rules_own_is_kept():
    new = iso.recast(vit(img_size=64), iso.AttentionToGPSA(grid_size=(3, 3), prefix_tokens=1), WHERE)
    with pytest.raises(ValueError, match="17 tokens do not fill the 3 x 3 grid after 1 prefix"):
        new(torch.randn(1, 3, 64, 64))


def test_what_is_frozen_stays_frozen():
    model = vit()
    model.blocks[0].attn.qkv.requires_grad_(False)
    layer = iso.recast(model, iso.AttentionToGPSA(), WHERE).blocks[0].attn
    assert not any(p.requires_grad for p in (*layer.qk.parameters(), *layer.v.parameters()))
    assert all(p.requires_grad for p in (*layer.proj.parameters(), layer.gate, layer.position))


def test_masks_are_refused():
    with pytest.raises(ValueError, match="does not support attn_mask"):
        ViTGPSA(24, 3, (2, 2))(torch.randn(1, 4, 24), is_causal=True)


def test_dials_of_a_layer():
    layer = GPSA(36, 9, (4, 4))
    layer.set_gating(locality=3.0, gate=-2.0)
    assert torch.equal(layer.locality, torch.full((9,), 3.0))
    assert layer.centre.tolist() == [[y, x] for y in (-1, 0, 1) for x in (-1, 0, 1)]
    with pytest.raises(ValueError, match="locality 0"):
        layer.set_gating(locality=0)
    layer.position.data[:2] = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 2.0]])  # no peak, and a valley
    assert layer.centre[:2].isnan().all()
    layer.set_gating(locality=1.0)
    assert layer.centre.tolist() == [[y, x] for y in (-1, 0, 1) for x in (-1, 0, 1)]


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


def test_refined_attention_with_pyramids_is_fused_before_it_is_reverted():
    alone, x = nn.Sequential(Attention(12, 3)), torch.randn(2, 7, 12)
    both = iso.recast(iso.recast(alone, iso.AttentionToRefined(), "0"), iso.LinearToPyramid(), "0.qkv")
    with pytest.raises(iso.UserError, match="fuse the model first"):
        iso.revert(both)
    iso.verify(alone, iso.revert(iso.fuse(both.eval())), x)
