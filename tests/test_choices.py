"""Models that choose among their numbers: rounding may decide between equal ones, and nothing else may differ."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torchvision.models import detection
from torchvision.ops import batched_nms

import isomorph as iso
from isomorph.surgery import compare_outputs
from isomorph.surgery.choices import record_choices, repeat_choices

BOXES = torch.tensor(
    [[0.0, 0.0, 9.0, 9.0], [0.0, 0.0, 9.0, 8.0], [20.0, 0.0, 29.0, 9.0], [20.0, 0.0, 29.0, 8.0]]
)
"""Two pairs of boxes that overlap, so that rounding decides which one of two is kept."""


def detect(boxes, scores, threshold=0.5, most=4):
    """Boxes as a detector chooses them."""
    kept = (scores > 0.05).nonzero().flatten()
    boxes = boxes[kept]
    scores = scores[kept]
    labels = (scores * 4).floor().long()
    kept = batched_nms(boxes, scores, torch.zeros_like(labels), threshold)[:most]
    return {"boxes": boxes[kept], "scores": scores[kept], "labels": labels[kept]}


CHOOSERS = {  # what a model chooses by its scores
    "sort": lambda s: BOXES.to(s)[s.argsort(descending=True)],
    "sort values": lambda s: [s.sort().values, s.sort().indices],
    "topk": lambda s: BOXES.to(s)[s.topk(2).indices],
    "argmax": lambda s: s.argmax(),
    "max": lambda s: s.view(2, 2).max(1),
    "kthvalue": lambda s: BOXES.to(s)[s.kthvalue(3).indices],
    "threshold": lambda s: BOXES.to(s)[s >= s.mean()],
    "number of boxes": lambda s: BOXES.to(s)[(s - s.mean()).abs() > 1e-8],
    "where": lambda s: torch.where(s > s.mean(), s + 1, s - 1),
    "nonzero": lambda s: (s > s.mean()).nonzero(),
    "floor": lambda s: (s / s.mean()).floor(),
    "round": lambda s: (s / s.mean() / 2).round(),
    "to integers": lambda s: (s / s.mean()).long(),
    "bucketize": lambda s: torch.bucketize(s, s.mean()[None]),
    "unique": lambda s: len(s.unique()),
    "a branch": lambda s: s * 2 if s[0] > s[1] else s * 3,
    "nms": lambda s: detect(BOXES.to(s), s),
}


class Chooser(nn.Module):
    """Scores of equal value, up to the order in which three terms are added up, and what is chosen by them."""

    def __init__(self, choose, order, scale=1.0, wrong=0.0):
        super().__init__()
        self.choose = choose
        self.order = order
        self.scale = scale
        self.wrong = wrong
        self.weight = nn.Parameter(torch.rand(3, generator=torch.Generator().manual_seed(1)) + 0.1)

    def forward(self, x):
        first, *others = (self.weight[i] * x.flatten(0)[i] for i in self.order)
        for other in others:
            first = first + other
        # one of each pair is computed in another order
        again = (self.weight * x.flatten()).sum()
        scores = torch.stack([first, again, first, again]) * self.scale
        return self.choose(scores + self.wrong * torch.tensor([1.0, 0, 0, 0]).to(x))


def inputs(choose):
    """An input for which the other order decides otherwise in float32."""
    draw = torch.Generator().manual_seed(0)
    return torch.rand(64, 3, generator=draw) + 0.1


@pytest.mark.parametrize("what", CHOOSERS)
def test_rounding_may_decide_between_equal_numbers(what):
    choose = CHOOSERS[what]
    ties = 0
    for x in inputs(choose):
        for order in ((1, 2, 0), (2, 0, 1)):
            report = iso.verify(Chooser(choose, (0, 1, 2)), Chooser(choose, order), x)
            tied = report.inputs[0].ties
            ties += bool(tied)
            assert ("rounding decides" in str(report)) is bool(tied)
            assert ("with the choices of the original" in report.verdict) is bool(tied)
    assert ties or what == "sort values", "no input of these is decided by rounding"


@pytest.mark.parametrize("what", CHOOSERS)
def test_what_choices_are_made_from_is_compared(what):
    """Scores that are wrong by a thousandth, whatever comes out of the choice."""
    for x in inputs(CHOOSERS[what])[:4]:
        a = Chooser(CHOOSERS[what], (0, 1, 2))
        b = Chooser(CHOOSERS[what], (0, 1, 2), scale=1.001, wrong=0.001)
        report = compare_outputs(a, b, x)
        outputs = [str(copy.deepcopy(each)(x)) for each in (a, b)]
        assert outputs[0] == outputs[1] or not report.passed, report


def detector(**settings):
    return Chooser(lambda s: detect(BOXES.to(s) + s.sum(), s, **settings), (0, 1, 2))


@pytest.mark.parametrize("settings", [dict(threshold=1.0), dict(most=1)])
def test_another_setting_is_no_rounding(settings):
    x = inputs(None)[0]
    with pytest.raises(iso.UserError):
        iso.verify(detector(), detector(**settings), x)


def test_a_call_repeats_the_choices_of_another():
    model = nn.Identity()

    def call(scores):
        return lambda: [model(scores).argsort(), scores.topk(1).indices]

    first = torch.tensor([0.1, 0.3, 0.2])
    second = torch.tensor([0.3, 0.1, 0.2])
    made = record_choices(model, call(first))
    again = repeat_choices(model, call(second), made)
    assert [y.tolist() for y in again.output] == [[0, 2, 1], [1]]
    assert again.changed == ("sort", "topk")
    assert not again.unmatched
    assert [x.tolist() for x in again.read] == [second.tolist()] * 2
    shorter = repeat_choices(model, lambda: second.argsort(), made)
    assert shorter.unmatched == ("topk",)
    assert repeat_choices(model, lambda: second.topk(2), made).unmatched == ("topk", "sort")


@pytest.mark.slow
def test_a_right_merge_of_a_detector_is_equal():
    """torchvision's SSDLite with drawn statistics: its 300 boxes are sorted by nearly equal scores."""
    torch.manual_seed(0)
    model = detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4
    ).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    merged = copy.deepcopy(model)
    for unit in [unit for unit in merged.modules() if isinstance(unit, nn.Sequential)]:
        for name, layer in list(unit.named_children()):
            if isinstance(layer, nn.BatchNorm2d):
                before = str(int(name) - 1)
                unit[int(before)] = fuse_conv_bn_eval(unit[int(before)], layer)
                unit[int(name)] = nn.Identity()
    report = iso.verify(model, merged, torch.rand(1, 3, 320, 320), atol=1e-4)
    assert report.inputs[0].ties
    last = merged.head.classification_head.module_list[0][1]
    last.weight.data *= 1.01
    with pytest.raises(iso.UserError, match=r"NOT equal within .* in what gt reads"):
        iso.verify(model, merged, torch.rand(1, 3, 320, 320), atol=1e-4)
