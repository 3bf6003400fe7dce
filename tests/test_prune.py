"""Pruned layers equal those with closed gates; models pruned, saved and trained."""

import copy
import json

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from command_line import isomorph
from isomorph.layers import (
    GPSA,
    GPSA2d,
    PositionalAttention,
    PositionalConv2d,
    ViTGPSA,
    ViTPositionalAttention,
)
from isomorph.layers.gated.positions import window_centres
from isomorph.surgery.prune import Prune
from refusals import refused
from test_gpsa import perturbed

WHOLE = {
    "map": (lambda: GPSA2d(20, 6, 3, 2, 0), (2, 20, 9, 8), PositionalConv2d),
    "tokens": (lambda: GPSA(36, 9, (5, 7), qkv_bias=True), (2, 35, 36), PositionalAttention),
    "ViT with prefix tokens": (
        lambda: ViTGPSA(36, 6, (5, 7), True, 2),
        (2, 37, 36),
        ViTPositionalAttention,
    ),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_closed_layer_is_position_alone(case):
    make, shape, kind = WHOLE[case]
    whole = perturbed(make().double())
    whole.set_gating(gate=60.0)
    if isinstance(whole, ViTGPSA):
        whole.q_norm = nn.LayerNorm(6).double()
        whole.k_norm = nn.LayerNorm(6).double()
    pruned = Prune("position").build(iso.surgery.Site(whole))
    assert type(pruned) is kind
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(pruned(x), whole(x), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(pruned.attention(x), whole.attention(x), rtol=1e-11, atol=1e-12)
    for name in ("position_share", "locality", "centre"):
        torch.testing.assert_close(getattr(pruned, name), getattr(whole, name))
    expected = torch.autograd.grad(whole(x).square().sum(), x)
    actual = torch.autograd.grad(pruned(x).square().sum(), x)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    pruned(x).sum().backward()
    for p in pruned.parameters():
        assert p.grad is not None
    if x.ndim == 3:
        assert pruned(x, grid_size=(7, 5)).shape == x.shape
        with pytest.raises(ValueError, match="do not fill the 6 x 6 grid"):
            pruned(x, grid_size=(6, 6))


def test_a_layer_on_its_taps_becomes_the_convolution():
    def becomes(tolerance=1e-6):
        return iso.surgery.prunable_layers(nn.Sequential(layer), tolerance).get("0")

    conv = nn.Conv2d(8, 6, 3, 2, 1)
    layer = iso.ConvToGPSA().build(iso.surgery.Site(conv))
    assert becomes() == "convolution"
    torch.testing.assert_close(
        Prune("convolution").build(iso.surgery.Site(layer)).weight, conv.weight
    )
    layer.centre.data[0] = torch.tensor([0.0, 1.0])  # two heads on one tap: still a convolution
    both = iso.prune(nn.Sequential(layer))[0]
    assert type(both) is nn.Conv2d
    torch.testing.assert_close(
        both(torch.ones(1, 8, 9, 7)), layer(torch.ones(1, 8, 9, 7)), atol=1e-4, rtol=1e-4
    )
    layer.centre.data[0] = torch.tensor([0.0, 2.0])  # outside of the window: not one
    assert becomes() == "position"
    layer.centre.data[0] = torch.tensor([0.4, 1.0])  # between two pixels
    assert becomes() == "position"
    layer.set_gating(locality=3.0)
    layer.centre.data.copy_(window_centres((3, 3)))
    assert becomes(0.1) == "position"
    assert becomes(0.2) == "convolution"  # 0.82 of the attention at locality 3 is on the tap
    layer.gate.data[4] = 0.0
    assert becomes(0.2) is None


def small_tcnn(gate=9.0, locality=5.0):
    cnn = timm.create_model("cifar_resnet20").eval()
    tcnn = iso.recast(cnn, iso.ConvToGPSA(locality=locality, gate=9.0), "layer3.0.conv?")
    tcnn.layer3[0].conv1.gate.data[3] = gate
    return tcnn


def small_convit():
    vit = timm.create_model(
        "convit_ti", img_size=32, patch_size=8, depth=3, local_up_to_layer=2
    ).eval()
    vit.blocks[0].attn.set_gating(gate=9.0)
    return vit


def small_vit():
    vit = timm.create_model("deit_tiny_patch16_224", img_size=32, depth=3, num_classes=10).eval()
    vit = iso.recast(vit, iso.AttentionToGPSA(locality=1.0, gate=0.0), "blocks.*.attn")
    vit.blocks[0].attn.set_gating(gate=9.0)
    vit.blocks[1].attn.set_gating(gate=-9.0)
    vit.blocks[2].attn.set_gating(gate=-9.0)
    vit.blocks[2].attn.gate.data[0] = -4.0  # a share of 0.018: one head is enough to keep the layer
    return vit


MODELS = {
    "T-CNN": (
        lambda: small_tcnn(4.0),
        {"layer3.0.conv1": "GPSA2d", "layer3.0.conv2": "PositionalConv2d"},
    ),
    "model with its own edits": (
        lambda: timm.create_model("t_cifar_resnet20", init="exact"),
        {"layer3.1.conv1": "Conv2d"},
    ),
    "ConViT": (small_convit, {"blocks.0.attn": "PositionalAttention", "blocks.1.attn": "GPSA"}),
    "ViT": (
        small_vit,
        {
            "blocks.0.attn": "ViTPositionalAttention",
            "blocks.1.attn": "Attention",
            "blocks.2.attn": "ViTGPSA",
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_pruned_model_is_an_ordinary_model(name, tmp_path):
    make, expected = MODELS[name]
    model = make()
    images = torch.randn(2, 3, 32, 32)
    before = copy.deepcopy(model.state_dict())
    pruned = iso.prune(model)
    assert iso.verify(model, pruned, images, atol=0.02).passed
    assert {layer: type(pruned.get_submodule(layer)).__name__ for layer in expected} == expected
    for key, tensor in before.items():
        assert torch.equal(tensor, model.state_dict()[key])
    pruned.eval()
    iso.save(pruned, tmp_path / "pruned.safetensors")
    loaded = iso.load(tmp_path / "pruned.safetensors").eval()
    torch.testing.assert_close(loaded(images), pruned(images))
    optimizer = torch.optim.SGD(iso.training.parameter_groups(loaded.train(), lr=1e-3))
    loaded(images).square().sum().backward()
    optimizer.step()
    for p in loaded.parameters():
        assert p.grad is not None
    iso.save(loaded, tmp_path / "trained.safetensors")


def test_the_command(tmp_path):
    iso.save(small_tcnn(), tmp_path / "t.safetensors")
    done = isomorph("prune", "t.safetensors", "--out", "j.safetensors", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    first = out["layers"][0]
    assert first["layer"] == "layer3.0.conv1"
    assert first["becomes"] == "position"
    for before, after in (first["parameters"], out["macs"]):
        assert after < before


@pytest.mark.parametrize("gate", [20.0, -20.0])
def test_pyramids_in_gated_attention_are_named(gate):
    wide = iso.recast(small_vit(), iso.LinearToPyramid(), "blocks.0.attn.qk")
    wide.blocks[0].attn.set_gating(gate=gate)
    refused("blocks.0.attn: its qk is a JointPyramid", iso.prune, wide)


def test_frozen_queries_and_keys_stay_frozen():
    layer = ViTGPSA(36, 6, (5, 7), True, 2)
    layer.qk.requires_grad_(False)
    layer.set_gating(gate=60.0)
    pruned = iso.prune(nn.Sequential(layer))[0]
    frozen = {name for name, p in pruned.named_parameters() if not p.requires_grad}
    assert frozen == {f"{part}.{kind}" for part in "qk" for kind in ("weight", "bias")}
