"""Packed attention in plain layers: every call of nn.MultiheadAttention, other tools on its layers, and back."""

import itertools

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from refusals import refused


class LowRank(nn.Module):
    """A linear layer with a low-rank addition, as adapters make it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2)
        self.up = nn.Linear(2, base.out_features)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Cross(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 4, **options)

    def forward(self, *args, **kwargs):
        return self.attention(*args, **kwargs)


@pytest.mark.parametrize(
    "options", [{}, dict(batch_first=True), dict(kdim=8, vdim=10, bias=False), dict(dropout=0.2)]
)
def test_every_call_is_equal_and_packed_again(options):
    torch.manual_seed(0)
    model = Cross(**options).double().eval()
    new = iso.recast(model, iso.AttentionToLinears(), "attention")
    back = iso.revert(new)
    assert back.state_dict().keys() == model.state_dict().keys()
    sizes = (12, options.get("kdim", 12), options.get("vdim", 12))
    q, k, v = (torch.randn(5, 5, size, dtype=torch.float64) for size in sizes)
    hidden = (torch.arange(5) > 2).expand(5, 5)
    masks = [
        {},
        dict(key_padding_mask=hidden),
        dict(attn_mask=torch.randn(5, 5, dtype=torch.float64)),
    ]
    masks += [
        dict(
            attn_mask=torch.triu(torch.full((5, 5), -torch.inf, dtype=torch.float64), 1),
            is_causal=True,
        )
    ]
    for mask, need in itertools.product(
        masks, (dict(need_weights=False), {}, dict(average_attn_weights=False))
    ):
        expected = model(q, k, v, **mask, **need)
        for other in (new, back):
            found = other(q, k, v, **mask, **need)
            assert (found[1] is None) == (expected[1] is None)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b)
    torch.testing.assert_close(new(q[0], k[0], v[0]), model(q[0], k[0], v[0]))


def test_adapters_act_inside_torch_s_encoder_and_keep_it_from_being_packed():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(12, 4, 24, batch_first=True), 2
    ).eval()
    new = iso.recast(encoder, iso.AttentionToLinears(), "layers.*.self_attn")
    x = torch.randn(2, 5, 12)
    with torch.no_grad():
        torch.testing.assert_close(new(x), encoder(x))
        new.layers[0].self_attn.v_proj = LowRank(new.layers[0].self_attn.v_proj)
        assert not torch.allclose(new(x), encoder(x))
    refused("its v_proj is a LowRank", lambda: iso.revert(new))


def test_other_rules_apply_to_the_parts():
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).eval()
    parts = iso.recast(vit, iso.AttentionToLinears(), "blocks.*.attn.qkv")
    wide = iso.recast(parts, iso.LinearToPyramid(), "blocks.*.attn.qkv.v")
    x = torch.randn(2, 3, 32, 32)
    assert iso.verify(vit, wide, x).passed
    assert iso.verify(vit, iso.fuse(wide, norms=False), x).passed
    encoder = nn.TransformerEncoderLayer(12, 4, 24, batch_first=True).eval()
    refinable = iso.recast(encoder, iso.AttentionToLinears(), "self_attn")
    for rule, where in (
        (iso.AttentionToRefined(), "self_attn"),
        (iso.LinearToPyramid(), "self_attn.v_proj"),
    ):
        assert iso.verify(encoder, iso.recast(refinable, rule, where), torch.randn(2, 5, 12)).passed


def trained(model):
    return sorted(name for name, x in model.named_parameters() if x.requires_grad)


def test_packed_parameters_that_are_frozen_in_part_stay_so():
    model = nn.Sequential(nn.MultiheadAttention(16, 4, batch_first=True))
    model.requires_grad_(False)
    model[0].out_proj.requires_grad_(True)
    linears = iso.recast(model, iso.AttentionToLinears(), where="0")
    assert trained(linears) == ["0.out_proj.bias", "0.out_proj.weight"]
    assert trained(iso.revert(linears)) == trained(model)
    other_widths = nn.Sequential(nn.MultiheadAttention(16, 4, kdim=12, vdim=10))
    other_widths[0].q_proj_weight.requires_grad_(False)
    linears = iso.recast(other_widths, iso.AttentionToLinears(), where="0")
    assert trained(iso.revert(linears)) == trained(other_widths)
    model.requires_grad_(True)
    model[0].out_proj.requires_grad_(False)
    assert trained(iso.revert(iso.recast(model, iso.AttentionToLinears(), where="0"))) == trained(
        model
    )


@pytest.mark.parametrize("rule", [iso.AttentionToGPSA(), iso.AttentionToLinears()])
def test_biases_alone_stay_trained(rule):
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=24)
    for name, parameter in vit.named_parameters():
        parameter.requires_grad_(name.endswith("qkv.bias"))
    is_joint = isinstance(rule, iso.AttentionToLinears)
    new = iso.recast(vit, rule, where="blocks.0.attn.qkv" if is_joint else "blocks.0.attn")
    of_layers = [name for name in trained(new) if not name.endswith(("gate", "position"))]
    assert of_layers
    assert all(name.endswith(".bias") for name in of_layers)
    if is_joint:
        assert trained(iso.revert(new)) == ["blocks.0.attn.qkv.bias"]


def test_a_causal_hint_without_its_mask_is_refused():
    attention = nn.Sequential(nn.MultiheadAttention(12, 4, batch_first=True))
    new = iso.recast(attention, iso.AttentionToLinears(), "0")
    x = torch.randn(2, 5, 12)
    with pytest.raises(ValueError, match="attn_mask"):
        new[0](x, x, x, is_causal=True)
