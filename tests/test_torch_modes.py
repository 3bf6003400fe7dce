"""Recasting and recast layers under torch's modes, defaults and tracers."""

import copy

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.layers import modes
from isomorph.models.input_sizes import random_inputs
from isomorph.surgery.calls import run_model
from isomorph.surgery.reference_calls import own_example
from test_operations import Launched

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


class MakesFloat32(nn.Module):
    """A convolution with a norm, and what a function makes of its map and a linear layer."""

    def __init__(self, code):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, 8)
        self.kept = torch.linspace(0, 1, 8).repeat(8, 1)  # no buffer: float() and double() leave it
        self.code = code

    def forward(self, x):
        return self.code(self, self.norm(self.conv(x)))


def filled(model, y):
    out = torch.zeros(len(y), 2, *y.shape[1:])
    out[:, 0] = y
    out[:, 1].add_(y)
    return out


CODE = {
    "a dtype by default": lambda model, y: model.linear(torch.zeros(len(y), 8)) + y.mean((2, 3)),
    "a dtype by name": lambda model, y: torch.eye(8, dtype=torch.float32) @ y.flatten(2),
    "a cast": lambda model, y: model.linear(y.float().mean((2, 3))),
    "a cast by to": lambda model, y: model.linear(y.to(torch.float32).mean((2, 3))),
    "no buffer": lambda model, y: model.kept @ y.flatten(2),
    "softmax in float32": lambda model, y: (
        y.flatten(2).softmax(-1, dtype=torch.float32) @ model.kept[:, :1].expand(8, 8).repeat(8, 1)
    ),
    "a tensor that is filled": filled,
    "a part that is filled": lambda model, y: torch.ones(2, 8, 8, 8).float().copy_(y),
}


@pytest.mark.parametrize("code", CODE)
def test_a_model_whose_code_makes_float32_is_compared_in_float64(code, tmp_path):
    """torch rejects products of float32 and float64: of such a model nothing could be verified, merged or exported."""
    torch.manual_seed(0)
    model = MakesFloat32(CODE[code]).eval()
    nn.init.uniform_(model.norm.running_var, 0.5, 2)
    x = torch.randn(2, 3, 8, 8)
    merged, report = iso.surgery.fuse_with_report(model, x)
    assert not list(filter(lambda module: isinstance(module, nn.BatchNorm2d), merged.modules()))
    assert report.difference < 1e-12
    assert iso.verify(model, merged, x).passed
    gpsa = iso.recast(model, iso.ConvToGPSA(init="exact"), "conv")
    assert iso.verify(model, gpsa, x).passed
    assert iso.port_weights(model, MakesFloat32(CODE[code]).eval(), x).equal
    assert torch.get_default_dtype() == torch.float32
    assert model(x).dtype == torch.float32


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


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_call_in_float64_leaves_no_constants_of_its_own(rule):
    """Small constants are made once for all layers and calls, so also for those in float32 that come later."""
    make, where = RULES[rule]
    new = iso.recast(make(), rule, where)
    runs = []
    for double_first in (False, True):
        modes._cached_constant.cache_clear()
        if double_first:
            run_model(copy.deepcopy(new).double(), IMAGES.double())
        model = copy.deepcopy(new).train()
        model(IMAGES)
        with Launched() as operations:
            model(IMAGES)
        runs.append(operations.names)
    assert runs[0] == runs[1]


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
