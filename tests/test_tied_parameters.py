"""Tied parameters stay tied through surgery where both sides still have them, and it is said where they do not."""

import pytest
import timm
import torch
from torch import nn

import isomorph as iso

VIT = dict(img_size=32, patch_size=16, embed_dim=24, depth=3, num_heads=3, num_classes=5)


def two_convs(third=False):
    net = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3 if third else 2)))
    for conv in net[1:]:
        conv.weight = net[0].weight
    return net.eval()


def tied_vit(*names):
    """A ViT whose blocks share parameters, as ALBERT's do."""
    vit = timm.create_model("vit_tiny_patch16_224", **VIT).eval()
    for block in vit.blocks[1:]:
        for name in names:
            path, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(path), leaf, vit.blocks[0].get_parameter(name))
    return vit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_tied_convolutions_are_two_tied_attentions(dtype):
    cnn = two_convs().to(dtype)
    cnn[0].weight.requires_grad_(False)
    tcnn = iso.recast(cnn, iso.ConvToGPSA(), "*")
    assert tcnn[0].weight is tcnn[1].weight is not cnn[0].weight
    assert not tcnn[0].weight.requires_grad
    assert tcnn[0].bias is not tcnn[1].bias
    assert tcnn[0].query.weight is not tcnn[1].query.weight
    note = "0.weight, 1.weight are still tied, but 0, 1 have new parameters that train apart"
    assert iso.surgery.notes(tcnn) == (note,)
    back = iso.revert(tcnn)
    assert back[0].weight is back[1].weight
    with torch.device("meta"):
        meta = iso.recast(two_convs(), iso.ConvToGPSA(), "*")
    assert meta[0].weight is meta[1].weight


def test_what_can_stay_tied_in_attention_does():
    vit = tied_vit("attn.proj.weight", "attn.qkv.weight", "attn.qkv.bias")
    refined = iso.recast(vit, iso.AttentionToRefined(), "blocks.*.attn")
    assert len({id(block.attn.qkv.weight) for block in refined.blocks}) == 1
    assert len({id(block.attn.refine.expand) for block in refined.blocks}) == 3
    assert iso.surgery.notes(refined) == ()
    gated = iso.recast(vit, iso.AttentionToGPSA(), "blocks.*.attn")
    assert len({id(block.attn.proj.weight) for block in gated.blocks}) == 1
    weights = ", ".join(f"blocks.{i}.attn.qkv.weight" for i in range(3))
    assert (
        iso.surgery.notes(gated)[0]
        == f"{weights} were tied; they are no longer tied and train separately"
    )
    assert "qkv.bias" in iso.surgery.notes(gated)[1]
    assert f"note: {weights} were tied" in str(iso.verify(vit, gated, torch.randn(1, 3, 32, 32)))


def test_a_tied_head_is_reported():
    net = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
    net.head.weight = net.embed.weight
    wide = iso.recast(net, iso.LinearToPyramid(), "head")
    assert iso.surgery.notes(wide) == (
        "head.weight was tied to embed.weight; they are no longer tied and train separately",
    )
    assert iso.surgery.notes(net) == ()
    assert iso.surgery.notes(iso.fuse(wide.eval())) == iso.surgery.notes(wide)


def test_a_module_in_two_places_is_not_tied_but_the_same():
    linear = nn.Linear(4, 4)
    wide = iso.recast(nn.Sequential(linear, nn.ReLU(), linear), iso.LinearToPyramid(), "0")
    assert wide[0] is wide[2]
    assert iso.surgery.notes(wide) == ()


def test_what_has_learnt_apart_goes_back_apart_and_says_so():
    tcnn = iso.recast(two_convs(), iso.ConvToGPSA(), "*")
    tcnn[0].value.weight.data += 0.1 * torch.randn(4, 4)
    back = iso.revert(tcnn)
    assert back[0].weight is not back[1].weight
    note = "1.weight was tied to 0.weight; they are no longer tied and train separately"
    assert note in iso.surgery.notes(back)


def vit_of_one_qkv():
    vit = timm.create_model("vit_tiny_patch16_224", **VIT).eval()
    vit.blocks[1].attn.qkv = vit.blocks[0].attn.qkv
    return vit


@pytest.mark.parametrize("where", ["blocks.*.attn", "blocks.0.attn"])
def test_a_module_that_two_blocks_share_stays_shared(where):
    vit = vit_of_one_qkv()
    refined = iso.recast(vit, iso.AttentionToRefined(), where)
    first, second, third = (block.attn.qkv for block in refined.blocks)
    assert first.weight is second.weight
    assert first.bias is second.bias
    assert first.weight is not third.weight
    assert iso.surgery.notes(refined) == ()
    assert len(list(refined.parameters())) == len({id(p) for p in refined.parameters()})
    back = iso.revert(refined)
    assert back.blocks[0].attn.qkv.weight is back.blocks[1].attn.qkv.weight


def test_a_shared_module_that_cannot_stay_shared_is_reported():
    gated = iso.recast(vit_of_one_qkv(), iso.AttentionToGPSA(), "blocks.*.attn")
    note = "blocks.0.attn.qkv.weight, blocks.1.attn.qkv.weight were tied; they are no longer tied and train separately"
    assert note in iso.surgery.notes(gated)


def test_a_shared_block_is_recast_once():
    block = timm.create_model("vit_tiny_patch16_224", **VIT).blocks[0]
    refined = iso.recast(nn.Sequential(block, block).eval(), iso.AttentionToRefined(), "0.attn")
    assert refined[0] is refined[1]
    assert iso.surgery.notes(refined) == ()


@pytest.mark.parametrize("rule", [None, iso.AttentionToRefined()])
def test_a_file_does_not_lose_a_tie(rule, tmp_path):
    plain = tied_vit("attn.qkv.weight")
    model = plain if rule is None else iso.recast(plain, rule, "blocks.*.attn")
    path = tmp_path / "tied.safetensors"
    message = "blocks.1.attn.qkv.weight is tied to blocks.0.attn.qkv.weight, and would not be.*base"
    with pytest.raises(iso.UserError, match=message):
        iso.save(model, path)
    iso.save(model, path, base=plain)
    opened = iso.load(path, base=plain)
    assert opened.blocks[1].attn.qkv.weight is opened.blocks[0].attn.qkv.weight
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(opened(x), model(x), rtol=0, atol=0)
    untied = timm.create_model("vit_tiny_patch16_224", **VIT)
    with pytest.raises(iso.UserError, match="and would not be"):
        iso.save(model, path, base=untied)
    with pytest.raises(
        iso.UserError, match=r"is not tied to blocks\.0\.attn\.qkv\.weight, and would be"
    ):
        iso.save(untied, path, base=plain)
