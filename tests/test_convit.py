"""ConViT against timm's models of the same weights, against a plain ViT, and at any image shape."""

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer

import isomorph as iso
from isomorph.analysis.cost import count_macs
from isomorph.checkpoints.model import load_weights
from isomorph.layers import GPSA, PSA
from law_rows import noisy
from refusals import refused

PEERS = {"convit_ti": "convit_tiny", "convit_s": "convit_small", "convit_b": "convit_base"}
SMALL = dict(embed_dim=36, num_heads=9, depth=4, local_up_to_layer=3, num_classes=5)


def small(**kwargs):
    return timm.create_model("convit_ti", **{**SMALL, **kwargs}).eval()


def rectangular_peer(peer, size):
    """timm's ConViT made to work on a rectangle: its geometry replaced by the right one, its embedding resized."""
    grid = (size[0] // 16, size[1] // 16)
    peer.patch_embed.set_input_size(size)
    peer.pos_embed.data = resample_abs_pos_embed(
        peer.pos_embed.data, list(grid), [14, 14], num_prefix_tokens=0
    )
    rows, columns = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    dy = rows.flatten()[None, :] - rows.flatten()[:, None]
    dx = columns.flatten()[None, :] - columns.flatten()[:, None]
    for block in peer.blocks[:10]:
        block.attn.rel_indices = torch.stack([dx, dy, dx**2 + dy**2], dim=-1)[None].float()
    return peer


def test_public_checkpoints_give_timms_logits_at_any_size(tmp_path):
    """timm's ConViT as it is, and made to work on a rectangle."""
    name = "convit_ti"
    peer = noisy(timm.create_model(PEERS[name], num_classes=20), 0.03).eval()
    torch.save({"model": peer.state_dict()}, tmp_path / "public.pth")
    born = timm.create_model(name, num_classes=20, img_size=(288, 192)).eval()
    resized = timm.create_model(name, num_classes=20, img_size=224).eval()
    for model in (born, resized):
        load_weights(model, tmp_path / "public.pth")
    x = torch.randn(1, 3, 224, 224)
    wide = torch.randn(2, 3, 288, 192)
    with torch.no_grad():
        expected = peer(x)
        assert expected.std() > 0.1
        torch.testing.assert_close(resized(x), expected, atol=1e-4, rtol=0)
        at_call = resized(wide)
        resized.set_input_size((288, 192))
        expected = rectangular_peer(peer, (288, 192))(wide)
        for logits in (born(wide), at_call, resized(wide)):
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert born.pos_embed.shape == resized.pos_embed.shape == (1, 18 * 12, born.embed_dim)
    assert timm.get_pretrained_cfg(name).hf_hub_id == f"timm/{PEERS[name]}.fb_in1k"
    assert not timm.get_pretrained_cfg("convit_s_plus").has_weights


@pytest.mark.parametrize("other", [dict(local_up_to_layer=0), dict(embed_dim=72)])
def test_other_checkpoints(other, tmp_path):
    torch.save(small(**other).state_dict(), tmp_path / "other.pth")
    with pytest.raises(iso.UserError):
        load_weights(small(), tmp_path / "other.pth")


@pytest.mark.parametrize(
    ("name", "giga", "digit"),
    [
        ("convit_ti", 1, 0.5),
        ("convit_s", 5.4, 0.05),
        ("convit_b", 17, 0.5),
        ("convit_s_plus", 10, 0.6),
    ],
)
def test_multiply_accumulates_are_those_of_table_1(name, giga, digit):
    """The table leaves out the two products of attention, N^2 C each: they are taken off here."""
    with torch.device("meta"):
        model = timm.create_model(name)
    products = 12 * 2 * 196**2 * model.embed_dim / 1e9
    assert count_macs(model, (3, 224, 224)) / 1e9 - products == pytest.approx(giga, abs=digit)


def test_without_gpsa_it_is_a_plain_vit():
    model = small(local_up_to_layer=0, qkv_bias=True)
    vit = VisionTransformer(
        embed_dim=36, num_heads=9, depth=4, num_classes=5, no_embed_class=True
    ).eval()
    vit.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 224, 224)
    torch.testing.assert_close(model(x), vit(x))


def test_the_first_blocks_are_the_formula_and_the_class_token_joins_after_them():
    """The network spelt out block by block from its parts, on a rectangle."""
    model = noisy(small(), 0.05)
    x = torch.randn(2, 3, 64, 96)
    grid = (4, 6)
    embedding = resample_abs_pos_embed(model.pos_embed, list(grid), [14, 14], num_prefix_tokens=0)
    h = model.patch_embed.proj(x).flatten(2).transpose(1, 2) + embedding
    for i, block in enumerate(model.blocks):
        if i == 3:
            h = torch.cat([model.cls_token.expand(2, -1, -1), h], dim=1)
        attended = block.attn(block.norm1(h), grid) if i < 3 else block.attn(block.norm1(h))
        h = h + attended
        h = h + block.mlp(block.norm2(h))
    torch.testing.assert_close(model(x), model.head(model.norm(h)[:, 0]))
    last, taken = model.forward_intermediates(x, return_prefix_tokens=True)
    assert [prefix.shape[1] for _, prefix in taken] == [0, 0, 0, 1]
    assert {tuple(patches.shape) for patches, _ in taken} == {(2, 36, 4, 6)}
    torch.testing.assert_close(last, model.norm(h))
    torch.testing.assert_close(taken[-1][0].flatten(2), h[:, 1:].transpose(1, 2))
    tokens = model.get_intermediate_layers(x, n=[0, 3])
    assert [tuple(t.shape) for t in tokens] == [(2, 24, 36)] * 2
    refused(
        "attn_mask is not supported", model.get_intermediate_layers, x, attn_mask=torch.ones(24, 24)
    )


def test_no_norm_has_to_copy_its_tokens():
    """Patches come with channels outermost; a norm copies such tokens first, in every block."""
    model = small()
    seen = []
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_pre_hook(
                lambda _, arguments: seen.append(arguments[0].is_contiguous())
            )
    model(torch.randn(2, 3, 64, 48))
    assert seen == [True] * 9


def test_set_input_size_changes_the_patch_too():
    model = small(img_size=64)
    model.set_input_size(32, 8)
    assert model.patch_embed.grid_size == (4, 4)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)
    assert {info["reduction"] for info in model.feature_info} == {8}
    for m in model.modules():
        if isinstance(m, GPSA):
            assert m.grid_size == (4, 4)


def test_any_rectangle_without_positions():
    model = small(
        use_pos_embed=False,
        class_token=False,
        global_pool="avg",
        local_up_to_layer=4,
        dtype=torch.bfloat16,
    )
    assert not {"pos_embed", "cls_token"} & model.state_dict().keys()
    for size in ((16, 16), (48, 32)):
        y = model(torch.randn(2, 3, *size, dtype=torch.bfloat16))
        assert y.shape == (2, 5)
        assert y.dtype == torch.bfloat16


def test_born_convolutional_or_not():
    model = small(locality_strength=3.0, gate=2.0)
    layer = model.blocks[0].attn
    assert torch.equal(layer.v.weight, torch.eye(36))
    assert torch.equal(layer.locality, torch.full((9,), 3.0))
    assert torch.equal(layer.gate, torch.full((9,), 2.0))
    assert layer.centre.tolist() == [[y, x] for y in (-1, 0, 1) for x in (-1, 0, 1)]
    random = small(local_init=False, gate=0.0).blocks[0].attn
    assert random.v.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert random.position.abs().max() < 0.1
    assert torch.equal(random.gate, torch.zeros(9))
    model.init_weights()
    assert torch.equal(layer.v.weight, torch.eye(36))
    born = small(weight_init="skip", locality_strength=3.0, gate=2.0).blocks[1].attn
    assert torch.equal(born.v.weight, torch.eye(36))
    assert torch.equal(born.gate, layer.gate)


def test_with_psa_it_is_the_same_network_but_for_the_softmax(tmp_path):
    model = small(local_attention="psa", locality_strength=3.0)
    x = torch.randn(2, 3, 48, 32)
    layers = [block.attn for block in model.blocks[:3]]
    for layer in layers:
        assert type(layer) is PSA
    gated = small(locality_strength=3.0, gate=50.0)
    missing, unexpected = gated.load_state_dict(model.state_dict(), strict=False)
    assert unexpected == []
    assert {name.rpartition(".")[2] for name in missing} == {"gate"}
    for network in (model, gated):
        for block in network.blocks[:3]:
            block.attn.qk.weight.data.zero_()
    torch.testing.assert_close(model(x), gated(x))
    model.set_input_size((48, 32))
    assert layers[1].grid_size == (3, 2)
    iso.save(model, tmp_path / "psa.safetensors")
    torch.testing.assert_close(iso.load(tmp_path / "psa.safetensors")(x), model(x))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(num_heads=6), "num_heads 6 is not a square"),
        (dict(local_up_to_layer=4), "no block for the class token"),
        (dict(attn_drop_rate=0.1), "attn_drop_rate"),
        (dict(reg_tokens=2, local_up_to_layer=0), "reg_tokens"),
        (dict(local_attention="sa"), "local_attention 'sa'"),
    ],
)
def test_impossible_networks(kwargs, message):
    refused(message, small, **kwargs)


def test_impossible_sizes_leave_the_model_as_it_was():
    model = small(img_size=64)
    for size in (8, (24, 64)):
        refused("16 x 16 patch", model.set_input_size, size)
    for shape in ((1, 3, 8, 64), (1, 3, 40, 64), (3, 64, 64)):
        refused("image", model, torch.randn(shape))
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)
