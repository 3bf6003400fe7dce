"""Recasting and recast layers under torch's modes, defaults and tracers."""

import copy

import pytest
import timm
import torch

import isomorph as iso
from isomorph.layers import modes
from isomorph.models.input_sizes import random_inputs
from isomorph.surgery.reference_calls import own_example

CONTENTS = [iso.ConvToGPSA(content=content) for content in ("global", "window", "none")]
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def cnn():
    return timm.create_model("cifar_resnet20").eval()


def vit():
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=1, num_heads=3
    ).eval()


IN_CNN = dict.fromkeys([*CONTENTS, iso.LinearToPyramid()], (cnn, "layer3.2.conv?"))
IN_VIT = dict.fromkeys(
    [iso.AttentionToGPSA(), iso.AttentionToRefined(), iso.AttentionToRelative()], (vit, "*.attn")
)
RULES = IN_CNN | IN_VIT


def in_bfloat16(call):
    torch.set_default_dtype(torch.bfloat16)
    try:
        return call()
    finally:
        torch.set_default_dtype(torch.float32)


def under(context):
    def run(call):
        with context():
            return call()

    return run


MODES = {
    "inference": under(torch.inference_mode),
    "bfloat16 by default": in_bfloat16,
    "meta by default": under(lambda: torch.device("meta")),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_surgery_does_not_depend_on_the_caller_s_mode(rule, mode):
    make, where = RULES[rule]
    model = make()
    usual = iso.verify(model, iso.recast(model, rule, where), IMAGES).fp64
    new = MODES[mode](lambda: iso.recast(model, rule, where))
    assert {(p.dtype, p.device.type) for p in new.parameters()} == {(torch.float32, "cpu")}
    assert iso.verify(model, new, IMAGES).fp64 <= 10 * usual + 1e-9
    back = MODES[mode](
        lambda: iso.fuse(new) if isinstance(rule, iso.LinearToPyramid) else iso.revert(new)
    )
    iso.verify(model, back, IMAGES)
    for each in (new, back):
        each.train()(IMAGES).square().sum().backward()


def test_random_inputs_are_drawn_on_the_cpu():
    model = cnn()
    with torch.device("meta"):
        assert own_example(model).device.type == random_inputs(1, model).device.type == "cpu"


@pytest.mark.parametrize("device", ["cpu", "another"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_backward_may_be_called_inside_autocast(rule, device, monkeypatch):
    monkeypatch.setattr(modes, "CPU_DEVICE", device)
    make, where = RULES[rule]
    outside = iso.recast(make(), rule, where).train()
    inside = copy.deepcopy(outside)
    with torch.autocast("cpu", torch.bfloat16):
        loss = outside(IMAGES).float().square().sum()
        inside(IMAGES).float().square().sum().backward()
    loss.backward()
    for (name, a), b in zip(outside.named_parameters(), inside.parameters(), strict=True):
        if a.grad is not None:
            assert (a.grad - b.grad).abs().max() <= 0.01 * a.grad.abs().max() + 1e-9, name
