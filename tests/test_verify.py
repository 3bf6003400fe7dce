"""What `verify` compares, reports and rejects."""

import copy
import json
import math
import re
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.surgery import compare_outputs
from refusals import refused


def net(conv):
    return nn.Sequential(
        nn.Identity(), copy.deepcopy(conv), nn.BatchNorm2d(conv.out_channels)
    ).eval()


class Gives(nn.Module):
    """A model whose output is made of its weight and its input."""

    def __init__(self, make, weight=1.0, dtype=torch.float32):
        super().__init__()
        self.make = make
        self.weight = nn.Parameter(torch.full((4,), weight, dtype=dtype))

    def forward(self, x):
        return self.make(self.weight, x)


def scaled(w, x):
    return w * x


X = torch.randn(2, 4)
DIFFERENT = {  # an original, another, and what the first line says
    "tiny outputs": (Gives(scaled, 2e-4), Gives(scaled, 2.6e-4), "0.3 .float32.", X),
    "an infinity": (
        Gives(lambda w, x: x / 0),
        Gives(lambda w, x: -x / 0),
        "outputs are not finite",
        X,
    ),
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


def not_equal(a, b, x, **kwargs):
    """The report of two models that differ, which are equal to copies of themselves."""
    assert iso.verify(a, copy.deepcopy(a), x, **kwargs).passed
    report = compare_outputs(a, b, x, **kwargs)
    assert not report.passed
    return report


def zeroes(x):
    y = x.mean(1)
    x.zero_()
    return y


CHANGES = {  # what a model does to its input, and what it gives
    "multiplies it": lambda x: x.mul_(2).mean(1),
    "zeroes it": zeroes,
    "writes a part": lambda x: x[:, 1:].fill_(3).mean(1) + x.mean(1),
    "makes it NaN": lambda x: zeroes(x).add(0 * x.div_(0).nan_to_num().sum()),
    "resizes it": lambda x: x.mean(1) + x.resize_(1).sum(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_call_gets_a_copy_of_the_inputs(change):
    """Of tensors, of those by name, and of those in lists."""
    for wrap, unwrap in (
        (lambda x: x, lambda x: x),
        (lambda x: {"x": x}, lambda x: x),
        (lambda x: {"x": [x, {"more": x}]}, lambda x: x[1]["more"]),
    ):
        a = Gives(lambda w, x, unwrap=unwrap: w * CHANGES[change](unwrap(x)))
        b = Gives(lambda w, x, unwrap=unwrap: 1.1 * w * CHANGES[change](unwrap(x)))
        x = torch.rand(4, 4)
        before = x.clone()
        report = not_equal(a, b, wrap(x), thorough=not isinstance(wrap(x), dict))
        assert "the original changes its input in place" in str(report)
        assert torch.equal(x, before)
    assert "in place" not in str(iso.verify(Gives(scaled), Gives(scaled), X))


@dataclass
class Found:
    boxes: torch.Tensor
    scores: torch.Tensor


class Slots:
    __slots__ = ("boxes", "scores")

    def __init__(self, boxes, scores):
        self.boxes = boxes
        self.scores = scores


CONTAINERS = {
    "tuple": (lambda boxes, scores: (boxes, scores), "1"),
    "nested": (
        lambda boxes, scores: {"found": [{"boxes": boxes, "scores": scores}]},
        "found.0.scores",
    ),
    "data class": (Found, "scores"),
    "slots": (Slots, "scores"),
    "object": (lambda boxes, scores: SimpleNamespace(boxes=boxes, scores=scores), "scores"),
    "named tuple": (namedtuple("Both", "boxes scores"), "1"),
    "numpy": (lambda boxes, scores: (boxes, scores.detach().numpy()), "1"),
    "a number": (lambda boxes, scores: (boxes, scores.sum().item()), "1"),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("small", [1e-6, 1e-3])
def test_rounding_of_one_tensor_is_not_that_of_another(container, small):
    """A small output is negated next to one that loses digits; the report says which it is."""
    make, path = CONTAINERS[container]

    def gives(sign):
        return Gives(lambda w, x: make((w * x + 1e5) - 1e5 + w * x, sign * small * w * x))

    report = not_equal(gives(1), gives(-1), X, atol=1e-3)
    assert f" in {path}" in report.verdict
    assert [row.path for row in report.inputs[0].tensors if not row.is_within(1e-3)] == [path]


def scores_in(layout, wrong):
    """Boxes in pixels and scores in one tensor."""

    def make(w, x):
        boxes = 640 * w.sum() * x[:, :, :4]
        scores = (w.sum() * x[:, :, 4:]).sigmoid() + wrong
        return layout(torch.cat([boxes, scores], 2))

    return Gives(make, 0.25)


LAYOUTS = {
    "boxes, values": (lambda y: y, "[:, :, 4:6]"),
    "values, boxes": (lambda y: y.mT, "[:, 4:6]"),
    "one image": (lambda y: y[0].mT, "[4:6]"),
    "all images": (lambda y: y.flatten(0, 1), "[:, 4:6]"),
    "in another order": (lambda y: y[:, :, [4, 0, 1, 2, 3, 5]], "[:, :, [0, 5]]"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("boxes", [1, 40])
def test_channels_on_another_scale_are_compared_by_their_own(layout, boxes):
    x = torch.rand(2, boxes, 6) + 0.2
    arrange, where = LAYOUTS[layout]
    report = not_equal(scores_in(arrange, 0.0), scores_in(arrange, 0.035), x, atol=1e-4)
    assert where in report.verdict
    assert compare_outputs(scores_in(arrange, 0.0), scores_in(arrange, 2e-5), x, atol=1e-4).passed


@pytest.mark.parametrize("seed", range(20))
def test_small_logits_have_no_scale_of_their_own(seed):
    """Of few images some logits are small by chance: they may differ as much as others."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 30, generator=draw)
    apart = 2e-4 * torch.randn(30, generator=draw)
    a = Gives(lambda w, x: w.sum() * (x @ weight.to(x)))
    b = Gives(lambda w, x: w.sum() * (x @ weight.to(x)) + apart.to(x))
    assert compare_outputs(a, b, torch.randn(1, 6, generator=draw), atol=1e-3).passed


def named(**values):
    return lambda w, x: {
        name: value(w * x) if callable(value) else value for name, value in values.items()
    }


def same(y):
    return y


STRUCTURES = {  # an output, another with the same tensors, and the note
    "container": (
        lambda w, x: [w * x],
        lambda w, x: (w * x,),
        "the output is a tuple, in the original a list",
    ),
    "mapping": (
        lambda w, x: {"a": {"b": w * x}},
        lambda w, x: {"a": OrderedDict(b=w * x)},
        "a is an OrderedDict, in the original a dict",
    ),
    "order": (
        named(a=same, b=same),
        named(b=same, a=same),
        "keys in another order: b, a; in the original a, b",
    ),
    "dropped None": (
        named(a=same, b=None),
        named(a=same),
        "the output has no b, which is None in the original",
    ),
    "new None": (
        named(a=same),
        named(a=same, b=None),
        "has b=None, which the original does not have",
    ),
    "float64": (scaled, lambda w, x: (w * x).double(), "is in float64, in the original in float32"),
    "int32": (
        named(a=torch.Tensor.long),
        named(a=torch.Tensor.int),
        "a is in int32, in the original in int64",
    ),
    "text": (named(a=same, b="cat"), named(a=same, b="dog"), "b is 'dog', in the original 'cat'"),
    "number": (
        lambda w, x: [w * x, 1],
        lambda w, x: [w * x, torch.tensor(1)],
        "1 is a Tensor, in the original an int",
    ),
    "numpy": (
        scaled,
        lambda w, x: (w * x).detach().numpy(),
        "is a ndarray, in the original a Tensor",
    ),
}


@pytest.mark.parametrize("what", STRUCTURES)
def test_what_differs_besides_values_is_noted(what):
    before, after, said = STRUCTURES[what]
    report = iso.verify(Gives(before), Gives(after), X)
    assert [said in note for note in report.notes].count(True) == 1, report
    assert len(report.notes) == 1 + len(iso.verify(Gives(before), Gives(before), X).notes)


def test_a_tensor_that_one_model_does_not_give_is_named():
    for a, b, said in (
        (named(a=same, b=same), named(a=same), r"only the first has b of \(2, 4\)"),
        (named(a=same), named(a=same, b=same), r"only the second has b of \(2, 4\)"),
        (
            named(a={"c": 1}, b=same),
            named(a={"c": 1}, b=torch.sum),
            r"different shapes at b: \(2, 4\) and \(\)",
        ),
    ):
        refused(said, iso.verify, Gives(a), Gives(b), X)


def test_integers_are_equal_or_not():
    """A class of 1000 is not nearly one of 1001, and true not false."""
    for change in (lambda y: y + 1, lambda y: y.flip(0)):
        a, b = (
            Gives(lambda w, x, last=f: [w * x, last(torch.arange(1e3, 1e3 + 4).long())])
            for f in (same, change)
        )
        assert " in 1" in not_equal(a, b, X, atol=0.01).verdict


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1, 1e6, 1e16])
def test_equal_is_relative(scale):
    cnn = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)).eval()
    cnn[0].weight.data *= scale
    cnn[0].bias.data *= scale
    report = iso.verify(cnn, iso.recast(cnn, iso.ConvToGPSA(), "0"), torch.randn(1, 4, 8, 8))
    assert report.verdict.startswith("equal within 0.001: max |diff| / max |out| ")
    assert ("small weights" in str(report)) == (scale < 1e-3)


def test_a_tolerance_as_large_as_the_output_proves_nothing():
    for atol in (1, 2):
        report = iso.verify(Gives(scaled, 1.0), Gives(scaled, 1.5), X, atol=atol)
        assert str(report).startswith("any difference is accepted")


def test_rounding_is_measured():
    """A small difference of large numbers is rounding in one network and not in another."""
    rounds = Gives(lambda w, x: (w * x + 1e4) - 1e4, 1e-3)
    other = Gives(lambda w, x: (w * x + 2e4) - 2e4, 1e-3)
    report = compare_outputs(rounds, other, X, atol=0.01)
    assert report.passed
    assert report.verdict.startswith("equal within rounding")
    assert not compare_outputs(Gives(scaled, 1e-3), Gives(scaled, 1.1e-3), X, atol=0.01).passed


def test_a_callers_autocast_is_off():
    linear = torch.nn.Linear(8, 8)
    images = torch.randn(64, 8)
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


def test_what_is_not_finite_is_named():
    def gives(y):
        return Gives(lambda w, x: {"a": w * x, "b": w * y * x})

    report = compare_outputs(gives(1.0), gives(torch.tensor([1.0, math.inf, math.nan, 1.0])), X)
    assert report.verdict.startswith(
        "NOT equal: outputs are not finite; b: 4 of 8 values of the second model are not"
    )
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["fp32"] is None


HIDDEN = {  # what a batch of two positive images of 8 x 8 does not show, and the name of the row that shows it
    "negative inputs": lambda w, x: w.sum() * x.abs(),
    "another batch size": lambda w, x: w.sum() * x * (2 if len(x) == 1 else 1),
    "another size": lambda w, x: w.sum() * x * (2 if x.shape[-1] > 8 else 1),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_thorough_tries_what_a_batch_cannot_show(what):
    a = Gives(lambda w, x: w.sum() * x)
    b = Gives(HIDDEN[what])
    x = torch.rand(2, 3, 8, 8)
    assert iso.verify(a, b, x).passed
    assert iso.verify(a, copy.deepcopy(a), x, thorough=True).passed
    with pytest.raises(iso.UserError, match="NOT equal") as error:
        iso.verify(a, b, x, thorough=True)
    assert [what in row.name for row in error.value.report.inputs if row.fp64] == [True]


MODES = {  # what differs in another precision, memory format or for zeros alone, and the row that shows it
    "float16": lambda w, x: w.sum() * x if x.dtype != torch.float16 else w.sum() * x * 1.1,
    "float16, overflow": lambda w, x: (w.sum() * 1e5) * x / 1e5,
    "autocast to bfloat16": lambda w, x: (
        w.sum() * x * (1.1 if torch.is_autocast_enabled("cpu") else 1)
    ),
    "channels_last": lambda w, x: w.sum() * x * (1 if x.is_contiguous() else 1.1),
    "zeros": lambda w, x: w.sum() * x + (0.0 if x.any() else 0.1),
    "twice the size": lambda w, x: w.sum() * x * (1.1 if x.shape[-1] == 16 else 1),
}


@pytest.mark.parametrize("what", MODES)
def test_thorough_tries_precisions_formats_and_zeros(what):
    a = Gives(lambda w, x: w.sum() * x)
    b = Gives(MODES[what])
    x = torch.rand(2, 3, 8, 8)
    assert iso.verify(a, b, x).passed
    report = not_equal(a, b, x, thorough=True)
    wrong = [row for row in report.inputs if not row.is_within(report.atol)]
    assert [what.partition(",")[0] in str(row) for row in wrong] == [True]
    assert ("not finite" in report.verdict) == ("overflow" in what)


def test_thorough_says_what_was_not_tried():
    usual = Gives(lambda w, x: w.sum() * x / x.float().abs().max())  # has no numbers for zeros
    said = " ".join(
        iso.verify(usual, copy.deepcopy(usual), torch.rand(2, 3, 8, 8), thorough=True).notes
    )
    for word in (
        "batches than",
        "train mode",
        "gradients",
        "buffers",
        "other methods",
        "one colour",
    ):
        assert word in said
    assert "zeros was not compared: the original's outputs are not finite" in said
    fixed = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
    assert "another size was not compared" in str(
        iso.verify(fixed, fixed, torch.rand(2, 3, 8, 8), thorough=True)
    )


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
    with pytest.raises(
        iso.UserError, match="NOT equal: the model reads the weights of read without calling it"
    ):
        iso.verify(old, iso.recast(old, iso.LinearToPyramid(), ["read", "called", "idle"]), X)


def test_a_branch_that_is_switched_off_proves_nothing():
    """timm's last norms start at zero: the output does not depend on the branch, the modules do differ."""
    cnn = timm.create_model("resnet18", num_classes=4).eval()
    exact = iso.recast(cnn, iso.ConvToGPSA("exact"), "layer4.*.conv2")
    paper = iso.recast(cnn, iso.ConvToGPSA("paper"), "layer4.*.conv2")
    x = torch.randn(1, 3, 64, 64)
    assert "the outputs do not depend on layer4.0.conv2" in str(iso.verify(cnn, exact, x))
    trained = copy.deepcopy(cnn)
    nn.init.ones_(trained.layer4[0].bn2.weight)
    report = iso.verify(trained, iso.recast(trained, iso.ConvToGPSA("exact"), "layer4.*.conv2"), x)
    assert "do not depend" not in str(report)
    with pytest.raises(
        iso.UserError, match=r"NOT equal .*; but layer4\.0\.conv2 differs by"
    ) as caught:
        iso.verify(cnn, paper, x)
    assert caught.value.report.fp64 == 0


@pytest.mark.parametrize(
    ("model", "x", "atol", "message"),
    [
        (
            nn.LazyLinear(3),
            torch.randn(1, 4),
            None,
            r"weight has no shape yet \(lazy layer\); run the model once",
        ),
        (nn.Identity(), torch.randn(0, 4, 6, 6), None, r"the batch is empty \(0x4x6x6\)"),
        (nn.Identity(), {"x": torch.randn(0, 4)}, None, r"the batch is empty \(x 0x4\)"),
        (nn.Identity(), torch.randn(1, 4), -1e-3, "atol -0.001 must be a number of at least 0"),
        (nn.Identity(), torch.randn(1, 4), "1e-3", "must be a number of at least 0"),
    ],
)
def test_what_cannot_be_compared_is_said(model, x, atol, message):
    refused(message, iso.verify, nn.Identity(), model, x, atol)


def test_inputs_of_one_shape_are_one_line_with_the_largest_difference():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    batches = [scale * torch.ones(3, 2) for scale in (1, 100, 10)]
    report = compare_outputs(one, other, [*batches, torch.ones(5, 2)])
    lines = [line for line in str(report).splitlines() if line.startswith("  input 3x2")]
    assert lines == [f"  {report.inputs[1]} (the largest of 3)"]
    assert str(report.inputs[3]) in str(report)
