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
    norm = nn.BatchNorm2d(conv.out_channels)
    return nn.Sequential(nn.Identity(), copy.deepcopy(conv), norm).eval()


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


def same(y):
    return y


def infinite(w, x):
    return x / 0


def negative_infinite(w, x):
    return -x / 0


def large_and_small(w, x):
    return [w * 1e6, x]


def large_and_another(w, x):
    return [w * 1e6, 1.01 * x]


X = torch.randn(2, 4)
DIFFERENT = {  # an original, another, and what the first line says
    "tiny outputs": (Gives(scaled, 2e-4), Gives(scaled, 2.6e-4), "0.3 .float32."),
    "an infinity": (Gives(infinite), Gives(negative_infinite), "outputs are not finite"),
    "a small tensor by a large one": (
        Gives(large_and_small),
        Gives(large_and_another),
        "0.01 .float32.",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_not_equal(name):
    a, b, said = DIFFERENT[name]
    report = compare_outputs(a, b, X)
    assert not report.passed
    assert re.search(said, report.verdict)
    assert compare_outputs(a, copy.deepcopy(a), X).passed


def not_equal(a, b, x, **kwargs):
    """The report of two models that differ, which are equal to copies of themselves."""
    assert iso.verify(a, copy.deepcopy(a), x, **kwargs).passed
    report = compare_outputs(a, b, x, **kwargs)
    assert not report.passed
    return report


def multiplies(x):
    return x.mul_(2).mean(1)


def zeroes(x):
    y = x.mean(1)
    x.zero_()
    return y


def writes_a_part(x):
    part = x[:, 1:].fill_(3)
    return part.mean(1) + x.mean(1)


def makes_it_nan(x):
    y = zeroes(x)
    x.div_(0)
    return y + 0 * x.nan_to_num().sum()


def resizes(x):
    y = x.mean(1)
    return y + x.resize_(1).sum()


CHANGES = [multiplies, zeroes, writes_a_part, makes_it_nan, resizes]
"""What a model does to its input, and what it gives."""


@pytest.mark.parametrize("change", CHANGES)
def test_each_call_gets_a_copy_of_the_inputs(change):
    """Of tensors, of those by name, and of those in lists."""

    def in_a_list(x):
        return x[1]["more"]

    x = torch.rand(4, 4)
    before = x.clone()
    for inputs, tensor_of in (
        (x, same),
        ({"x": x}, same),
        ({"x": [x, {"more": x}]}, in_a_list),
    ):
        a = Gives(lambda w, given, tensor_of=tensor_of: w * change(tensor_of(given)))
        b = Gives(lambda w, given, tensor_of=tensor_of: 1.1 * w * change(tensor_of(given)))
        report = not_equal(a, b, inputs, thorough=inputs is x)
        assert "the original changes its input in place" in str(report)
        assert torch.equal(x, before)
    unchanged = iso.verify(Gives(scaled), Gives(scaled), X)
    assert "in place" not in str(unchanged)


def test_only_the_model_that_changes_its_input_is_named():
    """In a mode the original stands on both sides."""
    convolution = nn.Conv2d(3, 4, 3)
    in_place = nn.Sequential(nn.ReLU(inplace=True), convolution)
    report = iso.verify(
        in_place, nn.Sequential(nn.ReLU(), convolution), torch.randn(2, 3, 16, 16), thorough=True
    )
    assert "the original changes its input in place" in str(report)
    assert "the other model changes" not in str(report)


@dataclass
class Found:
    boxes: torch.Tensor
    scores: torch.Tensor


class Slots:
    __slots__ = ("boxes", "scores")

    def __init__(self, boxes, scores):
        self.boxes = boxes
        self.scores = scores


def pair(boxes, scores):
    return boxes, scores


def nested(boxes, scores):
    return {"found": [{"boxes": boxes, "scores": scores}]}


def an_object(boxes, scores):
    return SimpleNamespace(boxes=boxes, scores=scores)


def numpy_scores(boxes, scores):
    return boxes, scores.detach().numpy()


def a_number(boxes, scores):
    return boxes, scores.sum().item()


CONTAINERS = {
    "tuple": (pair, "1"),
    "nested": (nested, "found.0.scores"),
    "data class": (Found, "scores"),
    "slots": (Slots, "scores"),
    "object": (an_object, "scores"),
    "named tuple": (namedtuple("Both", "boxes scores"), "1"),
    "numpy": (numpy_scores, "1"),
    "a number": (a_number, "1"),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("small", [1e-6, 1e-3])
def test_rounding_of_one_tensor_is_not_that_of_another(container, small):
    """A small output is negated next to one that loses digits; the report says which it is."""
    make, path = CONTAINERS[container]

    def gives(sign):
        def forward(w, x):
            y = w * x
            rounded = (y + 1e5) - 1e5
            return make(rounded + y, sign * small * y)

        return Gives(forward)

    report = not_equal(gives(1), gives(-1), X, atol=1e-3)
    assert f" in {path}" in report.verdict
    tensors = report.inputs[0].tensors
    assert [row.path for row in tensors if not row.is_within(1e-3)] == [path]


def scores_in(layout, wrong):
    """Boxes in pixels and scores in one tensor."""

    def make(w, x):
        y = w.sum() * x
        boxes = 640 * y[:, :, :4]
        scores = y[:, :, 4:].sigmoid() + wrong
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
    right = scores_in(arrange, 0.0)
    report = not_equal(right, scores_in(arrange, 0.035), x, atol=1e-4)
    assert where in report.verdict
    near = scores_in(arrange, 2e-5)
    assert compare_outputs(right, near, x, atol=1e-4).passed


@pytest.mark.parametrize("seed", range(20))
def test_small_logits_have_no_scale_of_their_own(seed):
    """Of few images some logits are small by chance: they may differ as much as others."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 30, generator=draw)
    apart = 2e-4 * torch.randn(30, generator=draw)
    x = torch.randn(1, 6, generator=draw)

    def logits(w, x):
        return w.sum() * (x @ weight.to(x))

    def near_logits(w, x):
        return logits(w, x) + apart.to(x)

    assert compare_outputs(Gives(logits), Gives(near_logits), x, atol=1e-3).passed


def named(**values):
    """A mapping; what may be called is called with the product of weight and input."""

    def forward(w, x):
        output = {}
        for name, value in values.items():
            output[name] = value(w * x) if callable(value) else value
        return output

    return forward


def in_list(w, x):
    return [w * x]


def in_tuple(w, x):
    return (w * x,)


def in_dicts(w, x):
    return {"a": {"b": w * x}}


def in_ordered_dict(w, x):
    return {"a": OrderedDict(b=w * x)}


def with_number(w, x):
    return [w * x, 1]


def with_tensor_of_a_number(w, x):
    return [w * x, torch.tensor(1)]


def in_float64(w, x):
    return scaled(w, x).double()


def in_numpy(w, x):
    return scaled(w, x).detach().numpy()


STRUCTURES = {  # an output, another with the same tensors, and the note
    "container": (in_list, in_tuple, "the output is a tuple, in the original a list"),
    "mapping": (in_dicts, in_ordered_dict, "a is an OrderedDict, in the original a dict"),
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
    "float64": (scaled, in_float64, "is in float64, in the original in float32"),
    "int32": (
        named(a=torch.Tensor.long),
        named(a=torch.Tensor.int),
        "a is in int32, in the original in int64",
    ),
    "text": (named(a=same, b="cat"), named(a=same, b="dog"), "b is 'dog', in the original 'cat'"),
    "number": (with_number, with_tensor_of_a_number, "1 is a Tensor, in the original an int"),
    "numpy": (scaled, in_numpy, "is a ndarray, in the original a Tensor"),
}


@pytest.mark.parametrize("what", STRUCTURES)
def test_what_differs_besides_values_is_noted(what):
    before, after, said = STRUCTURES[what]
    report = iso.verify(Gives(before), Gives(after), X)
    assert [said in note for note in report.notes].count(True) == 1, report
    unchanged = iso.verify(Gives(before), Gives(before), X)
    assert len(report.notes) == 1 + len(unchanged.notes)


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
    classes = torch.tensor([1000, 1001, 1002, 1003])

    def gives(integers):
        return Gives(lambda w, x: [w * x, integers])

    for changed in (classes + 1, classes.flip(0)):
        report = not_equal(gives(classes), gives(changed), X, atol=0.01)
        assert " in 1" in report.verdict


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1, 1e6, 1e16])
def test_equal_is_relative(scale):
    cnn = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)).eval()
    cnn[0].weight.data *= scale
    cnn[0].bias.data *= scale
    new = iso.recast(cnn, iso.ConvToGPSA(), "0")
    report = iso.verify(cnn, new, torch.randn(1, 4, 8, 8))
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
    differs = compare_outputs(Gives(scaled, 1e-3), Gives(scaled, 1.1e-3), X, atol=0.01)
    assert not differs.passed


def test_a_callers_autocast_is_off():
    linear = torch.nn.Linear(8, 8)
    images = torch.randn(64, 8)
    with torch.autocast("cpu", torch.bfloat16):
        pyramid = iso.recast(linear, iso.LinearToPyramid(), where="")
        report = iso.verify(linear, pyramid, images)
    assert report.inputs[0].fp32 < 1e-6


def test_identical_infinities_are_equal_and_nan_is_not():
    gives = Gives(lambda w, x: torch.cat([w.log(), x[0]]), 0.0)
    assert iso.verify(gives, copy.deepcopy(gives), X).fp32 == 0
    broken = net(nn.Conv2d(4, 4, 3, padding=1))
    broken[1].weight.data.fill_(math.nan)
    x = torch.randn(1, 4, 6, 6)
    for atol in (None, math.inf):
        with pytest.raises(iso.UserError, match="NOT equal: outputs are not finite") as error:
            iso.verify(broken, broken, x, atol=atol)
        assert error.value.exit_status == 1


def test_what_is_not_finite_is_named():
    def gives(y):
        return Gives(lambda w, x: {"a": w * x, "b": w * y * x})

    values = torch.tensor([1.0, math.inf, math.nan, 1.0])
    report = compare_outputs(gives(1.0), gives(values), X)
    assert report.verdict.startswith(
        "NOT equal: outputs are not finite; b: 4 of 8 values of the second model are not"
    )
    text = json.dumps(report.as_dict(), allow_nan=False)
    assert json.loads(text)["fp32"] is None


IMAGES = torch.rand(2, 3, 8, 8)


def plain(w, x):
    return w.sum() * x


def plain_unless(differs, factor=1.1):
    """A model that gives more where `differs(x)`."""

    def forward(w, x):
        y = plain(w, x)
        return y * factor if differs(x) else y

    return forward


def of_magnitudes(w, x):
    return plain(w, x.abs())


HIDDEN = {  # what a batch of two positive images of 8 x 8 does not show, and the name of the row that shows it
    "negative inputs": of_magnitudes,
    "another batch size": plain_unless(lambda x: len(x) == 1, 2),
    "another size": plain_unless(lambda x: x.shape[-1] > 8, 2),
    "half the size": plain_unless(lambda x: x.shape[-1] < 8, 2),
    "values 100 times as large": lambda w, x: plain(w, x.clamp(max=6)),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_thorough_tries_what_a_batch_cannot_show(what):
    a = Gives(plain)
    b = Gives(HIDDEN[what])
    assert iso.verify(a, b, IMAGES).passed
    assert iso.verify(a, copy.deepcopy(a), IMAGES, thorough=True).passed
    with pytest.raises(iso.UserError, match="NOT equal") as error:
        iso.verify(a, b, IMAGES, thorough=True)
    differing = [row for row in error.value.report.inputs if row.fp64]
    assert [what in row.name for row in differing] == [True]


class SecondCall(Gives):
    calls = 0

    def forward(self, x):
        self.calls += 1
        y = super().forward(x)
        return 1.1 * y if self.calls == 2 else y


def test_thorough_calls_twice():
    a = Gives(plain)
    assert iso.verify(a, SecondCall(plain), IMAGES).passed
    report = compare_outputs(a, SecondCall(plain), IMAGES, thorough=True)
    assert ["a second call" in row.name for row in report.inputs if row.fp64] == [True]


def test_each_seed_adds_a_normal_batch():
    a = Gives(plain)
    b = Gives(plain_unless(lambda x: bool((x < 0).any())))
    assert iso.verify(a, b, IMAGES).passed
    report = not_equal(a, b, IMAGES, seeds=[0, 1])
    differing = [row for row in report.inputs if row.fp64]
    assert [row.name for row in differing] == [f"2x3x8x8, random, seed {seed}" for seed in (0, 1)]
    assert differing[0].scale != differing[1].scale
    whole = torch.arange(6).reshape(2, 3)
    counts = Gives(lambda w, x: w[0] * x)
    positive = Gives(lambda w, x: w[0] * x * (x > 0))
    assert iso.verify(counts, positive, whole, seeds=[0]).inputs[1].name.endswith("seed 0")


def overflows(w, x):
    return (w.sum() * 1e5) * x / 1e5


def shifts_zeros(w, x):
    y = plain(w, x)
    return y if x.any() else y + 0.1


MODES = {  # what differs in another precision, memory format or for zeros alone, and the row that shows it
    "float16": plain_unless(lambda x: x.dtype == torch.float16),
    "float16, overflow": overflows,
    "autocast to bfloat16": plain_unless(lambda x: torch.is_autocast_enabled("cpu")),
    "channels_last": plain_unless(lambda x: not x.is_contiguous()),
    "zeros": shifts_zeros,
    "twice the size": plain_unless(lambda x: x.shape[-1] == 16),
}


@pytest.mark.parametrize("what", MODES)
def test_thorough_tries_precisions_formats_and_zeros(what):
    a = Gives(plain)
    b = Gives(MODES[what])
    assert iso.verify(a, b, IMAGES).passed
    report = not_equal(a, b, IMAGES, thorough=True)
    wrong = [row for row in report.inputs if not row.is_within(report.atol)]
    row_name = what.partition(",")[0]
    assert [row_name in str(row) for row in wrong] == [True]
    assert ("not finite" in report.verdict) == ("overflow" in what)


def has_no_numbers_for_zeros(w, x):
    return plain(w, x) / x.float().abs().max()


def test_thorough_says_what_was_not_tried():
    model = Gives(has_no_numbers_for_zeros)
    report = iso.verify(model, copy.deepcopy(model), IMAGES, thorough=True)
    said = " ".join(report.notes)
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
    fixed = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    report = iso.verify(fixed, fixed, IMAGES, thorough=True)
    assert "another size was not compared" in str(report)


def test_a_random_original_is_named():
    gives = Gives(lambda w, x: w * x * torch.rand(()))
    with pytest.raises(iso.UserError, match="the original is random"):
        iso.verify(gives, gives, X)


class Reader(nn.Module):
    """Reads the weight of one layer, calls another and leaves a third alone."""

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(4, 4)
        self.called = nn.Linear(4, 4)
        self.idle = nn.Linear(4, 4)

    def forward(self, x):
        layer = self.read
        return nn.functional.linear(self.called(x), layer.weight, layer.bias)


def test_what_was_replaced_and_not_called_is_noticed():
    old = Reader().eval()
    rule = iso.LinearToPyramid()
    assert iso.verify(old, iso.recast(old, rule, "called"), X).passed
    report = iso.verify(old, iso.recast(old, rule, "idle"), X)
    assert "idle was not called on these inputs" in str(report)
    new = iso.recast(old, rule, ["read", "called", "idle"])
    message = "NOT equal: the model reads the weights of read without calling it"
    with pytest.raises(iso.UserError, match=message):
        iso.verify(old, new, X)


def test_a_branch_that_is_switched_off_proves_nothing():
    """timm's last norms start at zero: the output does not depend on the branch, the modules do differ."""
    cnn = timm.create_model("resnet18", num_classes=4).eval()
    where = "layer4.*.conv2"
    exact = iso.recast(cnn, iso.ConvToGPSA("exact"), where)
    x = torch.randn(1, 3, 64, 64)
    report = iso.verify(cnn, exact, x)
    assert "the outputs do not depend on layer4.0.conv2" in str(report)

    trained = copy.deepcopy(cnn)
    nn.init.ones_(trained.layer4[0].bn2.weight)
    exact = iso.recast(trained, iso.ConvToGPSA("exact"), where)
    report = iso.verify(trained, exact, x)
    assert "do not depend" not in str(report)

    paper = iso.recast(cnn, iso.ConvToGPSA("paper"), where)
    message = r"NOT equal .*; but layer4\.0\.conv2 differs by"
    with pytest.raises(iso.UserError, match=message) as caught:
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
    ones = torch.ones(3, 2)
    batches = [ones, 100 * ones, 10 * ones, torch.ones(5, 2)]
    report = compare_outputs(nn.Linear(2, 2), nn.Linear(2, 2), batches)
    text = str(report)
    lines = [line for line in text.splitlines() if line.startswith("  input 3x2")]
    assert lines == [f"  {report.inputs[1]} (the largest of 3)"]
    assert str(report.inputs[3]) in text


class Text(nn.Module):
    """Vectors of tokens, and what changes their mean."""

    def __init__(self, change=lambda y, ids: y):
        super().__init__()
        self.tokens = nn.Embedding.from_pretrained(torch.arange(80.0).view(20, 4))
        self.change = change

    def forward(self, ids, mask=None):
        y = self.tokens(ids) if mask is None else self.tokens(ids) * mask[..., None]
        return self.change(y.mean(1), ids)


IDS = torch.arange(16).view(2, 8)


@pytest.mark.parametrize(("length", "name"), [(16, "twice the tokens"), (4, "half the tokens")])
def test_thorough_tries_other_lengths_of_tokens(length, name):
    other = Text(lambda y, ids: y + (ids.shape[1] == length))
    for batch in (IDS, {"ids": IDS}):
        assert iso.verify(Text(), other, batch).passed
        report = not_equal(Text(), other, batch, thorough=True)
        differing = [row.name for row in report.inputs if row.fp64]
        assert len(differing) == 1
        assert name in differing[0]
    mask = torch.ones(2, 8)
    assert iso.verify(Text(), Text(), {"ids": IDS, "mask": mask}, thorough=True).passed


def test_thorough_names_what_integers_and_unset_arguments_leave_open():
    report = iso.verify(Text(), Text(), {"ids": IDS}, thorough=True)
    assert not any(word in row.name for row in report.inputs for word in ("negative", "zeros"))
    assert "arguments of forward (mask)" in str(report)


def test_thorough_tries_other_sizes_of_images_that_are_given_by_name():
    a = Gives(plain)
    b = Gives(plain_unless(lambda x: x.shape[-1] != 8))
    for batch in ({"x": IMAGES}, (255 * IMAGES).to(torch.uint8)):
        report = not_equal(a, b, batch, thorough=True)
        assert any("another size" in row.name for row in report.inputs if row.fp64)


def test_whole_numbers_that_doubles_cannot_tell_apart_differ():
    a = Gives(lambda w, x: (w.sum() * x, torch.tensor([2**53])))
    b = Gives(lambda w, x: (w.sum() * x, torch.tensor([2**53 + 1])))
    not_equal(a, b, X)


def test_a_number_beyond_64_bits_is_named_as_not_compared():
    model = Gives(lambda w, x: (w.sum() * x, 10**30))
    assert "not compared besides tensors: int" in str(iso.verify(model, model, X))


def test_sparse_outputs_are_compared_thoroughly():
    model = Gives(lambda w, x: plain(w, x).relu().to_sparse())
    assert iso.verify(model, model, IMAGES, thorough=True).passed
    not_equal(model, Gives(lambda w, x: plain(w, 1.1 * x).relu().to_sparse()), IMAGES)


def test_the_last_rounding_of_half_precision_is_not_a_difference():
    """The mean of the first rounds 400 times, the second once."""
    torch.manual_seed(0)
    for _ in range(5):
        first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
        weight = first[1].weight @ first[0].weight
        second = nn.Sequential(nn.Linear(4, 4), nn.Identity()).eval()
        with torch.no_grad():
            second[0].weight.copy_(weight)
            second[0].bias.copy_(first[1].weight @ first[0].bias + first[1].bias)

        class Mean(nn.Module):
            def __init__(self, body):
                super().__init__()
                self.body = body

            def forward(self, x):
                return self.body(x).mean(1)

        x = torch.randn(2, 400, 4)
        assert compare_outputs(Mean(first), Mean(second), x, thorough=True).passed


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_another_path_in_float32_is_not_rounding():
    """torch's fast path of encoders gives 0 for padded tokens; recast attention computes them."""
    torch.manual_seed(0)

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x):
            padding = torch.arange(x.shape[1]) >= 4
            return self.encoder(x, src_key_padding_mask=padding.expand(len(x), -1)).mean(1)

    model = Padded().eval()
    new = iso.recast(model, iso.AttentionToLinears(), where="encoder.layers.*.self_attn")
    with pytest.raises(iso.UserError, match="NOT equal") as caught:
        iso.verify(model, new, torch.randn(2, 6, 16))
    assert "code for float32 alone" in str(caught.value)


def test_the_edits_of_another_branch_count():
    cnn = timm.create_model("cifar_resnet20").eval()
    first = iso.recast(cnn, iso.LinearToPyramid(), "linear")
    second = iso.recast(cnn, iso.ConvToGPSA(), "layer3.0.conv2")
    report = iso.verify(first, second, torch.randn(1, 3, 32, 32))
    assert report.atol == iso.ConvToGPSA().atol
    assert [row.name for row in report.targets] == ["layer3.0.conv2"]


class MaskFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        hidden = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]) > 3
        return self.attn(key_padding_mask=hidden, query=x, key=x, value=x, need_weights=False)[0]


def test_a_mask_may_be_the_first_argument():
    model = MaskFirst().eval()
    new = iso.recast(model, iso.AttentionToLinears(), "attn")
    assert iso.verify(model, new, torch.randn(2, 5, 16)).passed
