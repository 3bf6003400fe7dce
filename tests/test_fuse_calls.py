"""By which calls `fuse` compares: other sizes of any inputs, methods, inherited ones too, and arguments of forward."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from isomorph.surgery import fuse_with_report
from law_rows import deviation, disturb


class Padded(nn.Module):
    """A norm whose shift fits into the layer that reads it, unless the image has to be padded."""

    def __init__(self, axes=2):
        super().__init__()
        conv, norm = ((nn.Conv2d, nn.BatchNorm2d), (nn.Conv3d, nn.BatchNorm3d))[axes - 2]
        self.axes = axes
        self.conv = conv(3, 6, 1)
        self.norm = norm(6)
        self.down = conv(6, 4, 4, 4)

    def forward(self, x, mask=None, scale=None):
        y = self.norm(self.conv(x).relu())
        if scale is not None:
            y = y * scale[:, None, None, None]
        if mask is not None:
            y = y * mask[:, None]
        sides = [n for side in y.shape[: -1 - self.axes : -1] for n in (0, -side % 4)]
        return self.down(F.pad(y, sides))


def drawn(model):
    disturb(model.double().eval())
    return model


SIDES = (16, 16)
BATCHES = {
    "images": torch.randn(2, 3, *SIDES),
    "images by name": {"x": torch.randn(2, 3, *SIDES)},
    "images with a mask": {"x": torch.randn(2, 3, *SIDES), "mask": torch.ones(2, *SIDES)},
    "images with numbers": {"x": torch.randn(2, 3, *SIDES), "scale": torch.ones(2)},
    "several batches": [torch.randn(2, 3, *SIDES), torch.randn(1, 3, *SIDES)],
}


@pytest.mark.parametrize("example", BATCHES.values(), ids=BATCHES)
@torch.no_grad()
def test_a_shift_does_not_pass_borders_that_other_sizes_have(example):
    model = drawn(Padded())
    new, report = fuse_with_report(model, example)
    assert not report.merged
    assert len(report.inputs) > 2
    x = torch.randn(1, 3, 18, 19).double()
    assert deviation(new(x), model(x)) < 1e-12


@torch.no_grad()
def test_videos_are_compared_at_other_heights_and_widths():
    model = drawn(Padded(axes=3))
    new, report = fuse_with_report(model, torch.randn(1, 3, 4, 16, 16))
    assert not report.merged
    x = torch.randn(1, 3, 4, 18, 19).double()
    assert deviation(new(x), model(x)) < 1e-12


class Encoder(nn.Module):
    """Features that a head reads, by methods whose names begin as those of methods that change a model."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Conv2d(6, 4, 1)

    def logits(self, x):
        return self.norm(self.conv(x).relu())

    def forward(self, x):
        return self.head(self.logits(x)).softmax(1)

    called: ClassVar[list[str]] = []

    def save_features(self, x):
        self.called.append("save_features")


class LogProb(Encoder):
    def log_prob(self, x):
        return self.norm(self.conv(x).relu()).log_softmax(1)

    def forward(self, x):
        return self.head(self.norm(self.conv(x).relu()))

    logits = None


class Inherits(Encoder):
    """In another package than its base class."""


Inherits.__module__ = "another_package"


@pytest.mark.parametrize(
    ("kind", "method"), [(Encoder, "logits"), (LogProb, "log_prob"), (Inherits, "logits")]
)
@torch.no_grad()
def test_what_a_method_gives_stays(kind, method):
    model = drawn(kind())
    x = torch.randn(2, 3, 16, 16).double()
    new, report = fuse_with_report(model, x)
    assert method in report.entry_points
    assert not model.called
    assert "norm" in report.left
    assert deviation(getattr(new, method)(x), getattr(model, method)(x)) < 1e-12


class Asked(Encoder):
    def forward(self, x, return_features=None, **more):
        features = self.norm(self.conv(x).relu())
        return features if return_features or more.get("features") else self.head(features)

    logits = None


@torch.no_grad()
def test_flags_that_begin_as_none_are_tried_and_unnamed_arguments_are_listed():
    model = drawn(Asked())
    x = torch.randn(2, 3, 16, 16).double()
    new, report = fuse_with_report(model, x)
    assert "forward(return_features=True)" in report.entry_points
    assert deviation(new(x, True), model(x, True)) < 1e-12
    assert report.untried == ("return_features", "**more")


@torch.no_grad()
def test_layers_with_a_parametrization_stay_and_others_merge():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3))
    nn.utils.parametrizations.weight_norm(model[3])
    drawn(model)
    x = torch.randn(2, 3, 8, 8).double()
    new, report = fuse_with_report(model, x)
    assert list(report.merged) == ["1"]
    assert deviation(new(x), model(x)) < 1e-12


class Gate(nn.Module):
    """Its weight is a layer, not a number of its own."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.weight = nn.Linear(6, 6)

    def forward(self, x):
        y = self.norm(self.conv(x))
        return y * self.weight(y.mean((2, 3)))[..., None, None]


@torch.no_grad()
def test_a_layer_called_weight_is_not_a_packed_weight():
    model = drawn(Gate())
    x = torch.randn(2, 3, 8, 8).double()
    new, report = fuse_with_report(model, x)
    assert list(report.merged) == ["norm"]
    assert deviation(new(x), model(x)) < 1e-12


class Written(Encoder):
    """A part of what the norm reads is written in place."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(6, 4, 3, padding=1)  # which cannot take a shift

    def forward(self, x):
        y = self.conv(x)
        y[:, :2].relu_()
        return self.head(self.norm(y))

    logits = None


@torch.no_grad()
def test_a_write_in_place_is_named():
    _, report = fuse_with_report(drawn(Written()), torch.randn(2, 3, 16, 16))
    assert report.left["norm"].startswith("it follows a write in place")
