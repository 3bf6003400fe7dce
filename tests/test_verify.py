"""What `verify` compares, reports and rejects."""

import copy
import math
import re

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.surgery import compare_outputs
from refusals import refused


def net(conv):
    return nn.Sequential(nn.Identity(), copy.deepcopy(conv), nn.BatchNorm2d(conv.out_channels)).eval()


class Gives(nn.Module):
    """A model whose output is made of its weight and its input."""

    def __init__(self, make, weight=1.0, dtype=torch.float32):
        super().__init__()
        self.make, self.weight = make, nn.Parameter(torch.full((4,), weight, dtype=dtype))

    def forward(self, x):
        return self.make(self.weight, x)


def scaled(w, x):
    return w * x


X = torch.randn(2, 4)
DIFFERENT = {  # an original, another, and what the first line says
    "tiny outputs": (Gives(scaled, 2e-4), Gives(scaled, 2.6e-4), "0.3 .float32.", X),
    "an infinity": (Gives(lambda w, x: x / 0), Gives(lambda w, x: -x / 0), "outputs are not finite", X),
    "a small tensor by a large one": (
        Gives(lambda w, x: [w * 1e6, x]),
        Gives(lambda w, x: [w * 1e6, 1.01 * x]),
        "0.01 .float32.",
        X,
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_not_equal(name):
    a, b, said, x = DIFFERENT[name]
    report = compare_outputs(a, b, x)
    assert not report.passed
    assert re.search(said, report.verdict)
    assert compare_outputs(a, copy.deepcopy(a), x).passed


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1, 1e6, 1e16])
def test_equal_is_relative(scale):
    cnn = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)).eval()
    cnn[0].weight.data *= scale
    cnn[0].bias.data *= scale
    report = iso.verify(cnn, iso.recast(cnn, iso.ConvToGPSA(), "0"), torch.randn(1, 4, 8, 8))
    assert report.verdict.startswith("equal within 0.001: max |diff| / max |out| ")
    assert ("small weights" in str(report)) == (scale < 1e-3)


def test_rounding_is_measured():
    """A small difference of large numbers is rounding in one network and not in another."""
    rounds = Gives(lambda w, x: (w * x + 1e4) - 1e4, 1e-3)
    other = Gives(lambda w, x: (w * x + 2e4) - 2e4, 1e-3)
    report = compare_outputs(rounds, other, X, atol=0.01)
    assert report.passed
    assert report.verdict.startswith("equal within rounding")
    assert not compare_outputs(Gives(scaled, 1e-3), Gives(scaled, 1.1e-3), X, atol=0.01).passed


def test_a_callers_autocast_is_off():
    linear, images = torch.nn.Linear(8, 8), torch.randn(64, 8)
    with torch.autocast("cpu", torch.bfloat16):
        report = iso.verify(linear, iso.recast(linear, iso.LinearToPyramid(), where=""), images)
    assert report.inputs[0].fp32 < 1e-6


def test_identical_infinities_are_equal_and_nan_is_not():
    gives = Gives(lambda w, x: torch.cat([w.log(), x[0]]), 0.0)
    assert iso.verify(gives, copy.deepcopy(gives), X).fp32 == 0
    broken = net(nn.Conv2d(4, 4, 3, padding=1))
    broken[1].weight.data.fill_(float("nan"))
    for atol in (None, math.inf):
        with pytest.raises(iso.UserError, match="NOT equal: outputs are not finite") as error:
            iso.verify(broken, broken, torch.randn(1, 4, 6, 6), atol=atol)
        assert error.value.exit_status == 1


HIDDEN = {  # what a batch of two positive images of 8 x 8 does not show, and the name of the row that shows it
    "negative inputs": lambda w, x: w.sum() * x.abs(),
    "another batch size": lambda w, x: w.sum() * x * (2 if len(x) == 1 else 1),
    "another size": lambda w, x: w.sum() * x * (2 if x.shape[-1] > 8 else 1),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_thorough_tries_what_a_batch_cannot_show(what):
    a, b, x = Gives(lambda w, x: w.sum() * x), Gives(HIDDEN[what]), torch.rand(2, 3, 8, 8)
    assert iso.verify(a, b, x).passed
    assert iso.verify(a, copy.deepcopy(a), x, thorough=True).passed
    with pytest.raises(iso.UserError, match="NOT equal") as error:
        iso.verify(a, b, x, thorough=True)
    assert [what in row.name for row in error.value.report.inputs if row.fp64] == [True]


def test_a_random_original_is_named():
    gives = Gives(lambda w, x: w * x * torch.rand(()))
    with pytest.raises(iso.UserError, match="the original is random"):
        iso.verify(gives, gives, X)


class Reader(nn.Module):
    """Reads the weight of one layer, calls another and leaves a third alone."""

    def __init__(self):
        super().__init__()
        self.read, self.called, self.idle = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        layer = self.read
        return nn.functional.linear(self.called(x), layer.weight, layer.bias)


def test_what_was_replaced_and_not_called_is_noticed():
    old = Reader().eval()
    for where, said in ("called", ""), ("idle", "idle was not called on these inputs"):
        report = iso.verify(old, iso.recast(old, iso.LinearToPyramid(), where), X)
        assert said in str(report)
    with pytest.raises(iso.UserError, match="NOT equal: the model reads the weights of read without calling it"):
        iso.verify(old, iso.recast(old, iso.LinearToPyramid(), ["read", "called", "idle"]), X)


def test_a_branch_that_is_switched_off_proves_nothing():
    """timm's last norms start at zero: the output does not depend on the branch, the modules do differ."""
    cnn = timm.create_model("resnet18", num_classes=4).eval()
    exact, paper = (iso.recast(cnn, iso.ConvToGPSA(init), "layer4.*.conv2") for init in ("exact", "paper"))
    x = torch.randn(1, 3, 64, 64)
    assert "the outputs do not depend on layer4.0.conv2" in str(iso.verify(cnn, exact, x))
    trained = copy.deepcopy(cnn)
    nn.init.ones_(trained.layer4[0].bn2.weight)
    report = iso.verify(trained, iso.recast(trained, iso.ConvToGPSA("exact"), "layer4.*.conv2"), x)
    assert "do not depend" not in str(report)
    with pytest.raises(iso.UserError, match=r"NOT equal .*; but layer4\.0\.conv2 differs by") as caught:
        iso.verify(cnn, paper, x)
    assert caught.value.report.fp64 == 0


@pytest.mark.parametrize(
    ("model", "x", "atol", "message"),
    [
        (nn.LazyLinear(3), torch.randn(1, 4), None, r"weight has no shape yet \(lazy layer\); run the model once"),
        (nn.Identity(), torch.randn(0, 4, 6, 6), None, r"the batch is empty \(0x4x6x6\)"),
        (nn.Identity(), {"x": torch.randn(0, 4)}, None, r"the batch is empty \(x 0x4\)"),
        (nn.Identity(), torch.randn(1, 4), -1e-3, "atol -0.001 must be a number of at least 0"),
        (nn.Identity(), torch.randn(1, 4), "1e-3", "must be a number of at least 0"),
    ],
)
def test_what_cannot_be_compared_is_said(model, x, atol, message):
    refused(message, iso.verify, nn.Identity(), model, x, atol)
