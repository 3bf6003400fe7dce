"""The initialisation of gates that trains: nearly the same function, and what a run says of gates that did not move."""

import re

import pytest
import timm
import torch
from timm.utils import ModelEmaV3
from torch import nn

import isomorph as iso
from isomorph.lab.training.run.loop import slow_average, unmoved_gates
from refusals import refused


def vit():
    sizes = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5)
    return timm.create_model("vit_tiny_patch16_224", **sizes).eval()


CASES = {
    "attention": (vit, iso.AttentionToGPSA, "blocks.*.attn"),
    "convolutions": (
        lambda: timm.create_model("cifar_resnet20").eval(),
        iso.ConvToGPSA,
        "layer3.*.conv?",
    ),
}


def largest_move(model, steps=8):
    """Train a few steps; return how far the gates moved, as a share of the attention."""
    before = {name: gate.clone() for name, gate in iso.gates(model).items()}
    optimizer = torch.optim.AdamW(
        iso.training.parameter_groups(model.train(), lr=1e-3, gate_lr=0.1)
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 32, 32)).square().mean().backward()
        optimizer.step()
    return max(float((gate - before[name]).abs().max()) for name, gate in iso.gates(model).items())


@pytest.mark.parametrize("name", CASES)
def test_near_is_equal_within_its_tolerance_and_its_gates_move(name):
    make, rule, where = CASES[name]
    model = make()
    exact = iso.recast(model, rule(init="exact"), where)
    near = iso.recast(model, rule(init="near"), where)
    assert rule(init="near").accepted_difference == 0.05 > rule().accepted_difference == rule.atol
    x = torch.randn(2, 3, 32, 32)
    assert iso.verify(model, near, x).atol == 0.05
    assert iso.verify(model, exact, x).atol == rule.atol
    assert largest_move(near) > 1e-4 > 1e-5 > largest_move(exact)


def log(*gates):
    return [{"loss": 1.0}] + [
        {"gating": {"blocks.0.attn": {"gates": list(each)}}} for each in gates
    ]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (log((0.0, 0.007), (0.0, 0.5), (0.001, 0.008)), True),
        (log((0.0, 0.007), (0.0, 0.01)), False),
        (log((0.0, 0.007)), False),
        (log(), False),
    ],
)
def test_gates_that_did_not_move_are_said(rows, said):
    model = iso.recast(vit(), iso.AttentionToGPSA(), "blocks.0.attn")
    found = unmoved_gates(model, rows)
    assert bool(found) == said
    if said:
        assert 'init="near"' in found
    model.requires_grad_(False)
    assert unmoved_gates(model, rows) == ""


@pytest.mark.parametrize("steps", [1, 2, 9, 400])
@pytest.mark.parametrize("decay", [0.3, 0.9, 0.9999])
def test_an_average_that_keeps_the_first_weights_is_said(decay, steps):
    """The share in the message is that of timm's average, and with the advised decay nothing is said."""
    weights = nn.Linear(1, 1)
    average = ModelEmaV3(weights, decay=decay)
    for step in range(1, steps + 1):
        nn.init.constant_(weights.weight, step == 1)
        average.update(weights, step)
    share = average.module.weight.item()
    said = slow_average(decay, steps)
    assert bool(said) == (share > 0.1 and steps > 1)
    assert slow_average(None, steps) == ""
    if said:
        assert f": {share:.0%} of the averaged weights" in said
        advised = re.search(r"ema=(\S+) or less", said)[1]
        assert slow_average(float(advised), steps) == ""


def test_a_run_says_that_its_gates_did_not_move(tmp_path, capsys):
    recast = dict(where="layer3.2.conv2", locality=20, gate=15)
    recipe = dict(
        model=dict(name="cifar_resnet20", recast=recast),
        data=dict(source="digits", fraction=0.055, size=[16, 16], batch_size=32, test_images=60),
        optim=dict(lr=1e-3, gate_lr=1e-3),
        epochs=1,
        ema=0.9999,
        out=str(tmp_path),
    )
    iso.train(iso.Recipe(**recipe))
    said = "".join(capsys.readouterr())
    assert "the gates did not move (by 0.000 at most)" in said
    assert "ema 0.9999 is too slow for 2 steps" in said


@pytest.mark.parametrize("part", ["start", "stop"])
@pytest.mark.parametrize("gating", [20.0, (1.0,), "ab c"])
def test_an_anneal_takes_pairs(part, gating):
    refused(f"{part} .* of the anneal must be", lambda: iso.Anneal(10, **{part: gating}))
