"""Recast attention: what is its own to each rule, besides the laws of all rules (test_recast_laws.py)."""

import copy
import pickle

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.eva import EvaAttention
from torch import nn

import isomorph as iso
from isomorph.layers import ViTRelativeAttention

WHERE = "blocks.[01].attn"


def vit(**options):
    sizes = dict(num_classes=7, depth=2, img_size=64, embed_dim=48, num_heads=3)
    model = timm.create_model("deit_tiny_patch16_224", **sizes | options)
    for parameter in model.parameters():
        parameter.data += 0.1 * parameter.data.std(correction=0) * torch.randn_like(parameter)
    return model.eval()


def test_the_grid_follows_the_image():
    model = vit(dynamic_img_size=True)
    x = torch.randn(1, 3, 64, 160)
    new = iso.recast(model, iso.AttentionToGPSA(locality=2.0, gate=0.0), WHERE)
    iso.verify(
        model, iso.recast(model, iso.AttentionToGPSA(), WHERE), [torch.randn(1, 3, 64, 64), x]
    )
    by_hand = copy.deepcopy(new)
    by_hand.patch_embed._forward_pre_hooks.clear()
    for grid, same in (((4, 10), True), ((10, 4), False)):
        for block in by_hand.blocks:
            block.attn.grid_size = grid
        assert torch.allclose(new(x), by_hand(x), atol=1e-4) == same
    for twin in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        twin(torch.randn(1, 3, 160, 64))
        assert twin.blocks[0].attn.grid_size == (10, 4)
    assert new.blocks[0].attn.grid_size == (4, 10)
    new.set_input_size((96, 32))
    assert new(torch.randn(1, 3, 96, 32)).shape == (1, 7)


def test_class_tokens_have_no_place():
    """With gates shut to content the patches look by place only; the class token still looks by content."""
    new = iso.recast(vit(), iso.AttentionToGPSA(locality=4.0, gate=40.0), "blocks.0.attn")
    layer = new.blocks[0].attn
    x = torch.randn(1, 17, 48)
    attention = layer.attention(x)
    assert attention[..., 1:, 0].abs().max() < 1e-12  # no patch looks at the class token
    plain = layer.to_attention(atol=torch.inf)
    q, k, _ = plain.qkv(x).unflatten(-1, (3, 3, 16)).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(attention[:, :, 0], torch.softmax(q @ k.mT / 4, dim=-1)[:, :, 0])
    torch.testing.assert_close(attention.sum(-1), torch.ones(1, 3, 17))
    middle = 1 + 2 * 4 + 2
    # a 1 x 3 window
    assert attention[0, :, middle].argmax(-1).tolist() == [middle - 1, middle, middle + 1]


def test_the_initialisation_of_the_paper():
    model = vit()
    layer = iso.recast(model, iso.AttentionToGPSA("paper"), "blocks.0.attn").blocks[0].attn
    assert torch.equal(layer.v.weight, torch.eye(48))
    assert torch.equal(layer.v.bias, torch.zeros(48))
    assert torch.equal(layer.gate, torch.ones(3))
    assert torch.equal(layer.qk.weight, model.blocks[0].attn.qkv.weight[:96])
    assert torch.equal(layer.proj.weight, model.blocks[0].attn.proj.weight)


def test_a_convit_is_a_recast_vit_and_is_recast_saved_and_loaded(tmp_path):
    """The named model, and a ViT without a class token recast as in the paper, are one function."""
    shape = dict(
        embed_dim=36,
        num_heads=9,
        depth=3,
        class_token=False,
        global_pool="avg",
        num_classes=5,
        img_size=64,
    )
    plain = timm.create_model("convit_ti", local_up_to_layer=0, **shape).eval()
    by_hand = iso.recast(plain, iso.AttentionToGPSA("paper"), "blocks.[01].attn")
    named = timm.create_model("convit_ti", local_up_to_layer=2, **shape).eval()
    x = torch.randn(2, 3, 96, 64)
    named.load_state_dict(by_hand.state_dict())
    torch.testing.assert_close(named(x), by_hand(x))
    new = iso.recast(
        timm.create_model("convit_ti", num_classes=3), iso.AttentionToGPSA(), "blocks.1*.attn"
    ).eval()
    iso.save(new, tmp_path / "new.safetensors")
    assert torch.equal(iso.load(tmp_path / "new.safetensors")(x), new(x))


def test_it_stands_beside_the_other_forms():
    """Refined attention with pyramids for its projection; gated attention elsewhere; fused, then reverted."""
    model = vit()
    x = torch.randn(1, 3, 64, 64)
    new = iso.recast(model, iso.AttentionToRefined(span="spatial"), "blocks.0.attn")
    new = iso.recast(new, iso.AttentionToGPSA(), "blocks.1.attn")
    new = iso.recast(new, iso.LinearToPyramid(), "blocks.0.attn.qkv")
    iso.verify(model, new, x)
    assert iso.analysis.logit_stats(new, x)["blocks.0.attn"].entropy.shape == (3,)
    with pytest.raises(iso.UserError, match="fuse the model first"):
        iso.revert(new)
    fused = iso.fuse(new.eval())
    torch.testing.assert_close(fused(x), new(x), atol=1e-4, rtol=1e-4)
    iso.verify(model, iso.revert(fused), x)


def test_relative_scores_are_those_of_the_slow_formula():
    layer = Attention(12, 3, qkv_bias=True).double().eval()
    new = iso.recast(
        nn.Sequential(layer), iso.AttentionToRelative(grid_size=(3, 4), prefix_tokens=2), "0"
    )[0]
    table = nn.init.normal_(new.relative_bias)  # (nh, 5, 7): offsets -2..2 and -3..3
    x = torch.randn(2, 14, 12, dtype=torch.float64)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT / 2
    for i, j in ((i, j) for i in range(12) for j in range(12)):
        rows = i // 4 - j // 4
        columns = i % 4 - j % 4
        scores[:, :, 2 + i, 2 + j] += table[:, rows + 2, columns + 3]
    torch.testing.assert_close(new.attention(x), scores.softmax(-1))
    torch.testing.assert_close(
        new(x), layer.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    )


def test_the_table_of_relative_scores_follows_the_image():
    new = iso.recast(vit(dynamic_img_size=True), iso.AttentionToRelative(), WHERE)
    for layer in (module for module in new.modules() if isinstance(module, ViTRelativeAttention)):
        nn.init.normal_(layer.relative_bias)
    small = torch.randn(1, 3, 32, 48)
    large = torch.randn(1, 3, 64, 80)
    first = new(small)
    assert iso.attention_maps(new, large)["blocks.1.attn"].shape == (1, 3, 21, 21)
    torch.testing.assert_close(new(small), first)
    assert new.no_weight_decay() >= {"pos_embed"}
    assert "relative_bias" in new.blocks[0].attn.no_weight_decay()


def test_no_prefix_tokens_can_be_given_of_a_layer_that_has_one_by_default():
    layer = nn.Sequential(EvaAttention(24, 3, qk_norm=False, norm_layer=nn.LayerNorm)).eval()
    new = iso.recast(layer, iso.AttentionToGPSA(grid_size=(4, 4), prefix_tokens=0), "0")
    assert new[0].prefix_tokens == 0
    iso.verify(layer, new, torch.randn(2, 16, 24))
