"""What users and libraries attach to a module is kept by surgery, or named as lost: every alteration, every rule."""

import copy

import pytest
import torch
from timm.layers import Attention
from timm.models.byobnet import LayerFn, MobileOneBlock
from torch import nn

import isomorph as iso
from hostile import ALTERATIONS, BRIEF, attachments

TOKENS = (2, 7, 12)
MAP = (2, 4, 6, 5)
PLACED = dict(grid_size=(2, 3), prefix_tokens=1)
LAYERS = {
    "pair": lambda: iso.layers.AnnealedPair(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 5, 1), slope=1.0),
    "conv": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "linear": lambda: nn.Linear(12, 8),
    "mobileone": lambda: MobileOneBlock(4, 4, 3, layers=LayerFn()),
    "attention": lambda: Attention(12, 3, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm),
}
CASES = [
    ("conv", iso.ConvToGPSA(), iso.revert),
    ("conv", iso.ConvToGPSA(content="none"), iso.revert),
    ("attention", iso.AttentionToGPSA(**PLACED), iso.revert),
    ("attention", iso.AttentionToRefined(), iso.revert),
    ("attention", iso.AttentionToRefined(ratio=0), None),
    ("attention", iso.AttentionToRefined(reduce=False), iso.revert),
    ("attention", iso.AttentionToRelative(**PLACED), iso.revert),
    ("linear", iso.LinearToPyramid("P-W1S"), iso.fuse),
    ("pair", iso.LinearToPyramid("R-D1W1"), iso.fuse),
    ("mobileone", iso.LinearToPyramid(), None),
]


def alter(model, path, alteration):
    """Whether the alteration is one for the module at the path; then the model, altered."""
    altered = copy.deepcopy(model)
    done = ALTERATIONS[alteration](altered.get_submodule(path)) is not False
    return altered.train(model.training) if done else None


def check_nothing_is_lost(model, operate, shape):
    """Every alteration of every part of a model: it is said to be lost, or it is kept."""
    x = torch.randn(shape)
    kept = 0
    refused = []
    paths = [name for name, _ in model.named_modules() if name]
    for path in paths:
        for alteration in ALTERATIONS if len(paths) < 10 or path == "0" else BRIEF:
            altered = alter(model, path, alteration)
            if altered is None:
                continue
            try:
                new = operate(altered)
            except iso.UserError as error:
                refused.append(str(error))
                continue
            kept += 1
            case = f"{alteration} on {path}"
            assert attachments(new) == attachments(altered), case
            if alteration == "whole numbers":
                continue
            with torch.no_grad():
                assert torch.allclose(new.eval()(x), altered.eval()(x), atol=2e-3), case
    assert kept
    assert refused
    # an altered pair is not a target
    words = ("0", "the model cannot be copied", "LinearToPyramid recasts")
    assert all(said.startswith(words) and "\n" not in said for said in refused), refused


@pytest.mark.filterwarnings("ignore:.*deprecated")  # the old norms are what is tried
@pytest.mark.parametrize(("name", "rule", "back"), CASES)
def test_hostile_layers_keep_what_they_have_or_are_refused(name, rule, back):
    """There, and back."""
    model = nn.Sequential(LAYERS[name]()).eval()
    shape = TOKENS if name in ("attention", "linear") else MAP
    check_nothing_is_lost(model, lambda altered: iso.recast(altered, rule, "0"), shape)
    if back:
        check_nothing_is_lost(iso.recast(model, rule, "0"), back, shape)


def subclasses(kind):
    """All classes that timm, torch and isomorph derive from one, quantised ones included; none of other tests."""
    found = set()
    for child in kind.__subclasses__():
        if child.__module__.startswith(("timm.", "torch.", "isomorph.")):
            found |= {child, *subclasses(child)}
    return found


OF_ALL = [
    (iso.ConvToGPSA(), nn.Conv2d(4, 4, 3, padding=1), MAP),
    (iso.LinearToPyramid(), nn.Conv2d(4, 4, 3, padding=1), MAP),
    (iso.LinearToPyramid(), nn.Linear(12, 12), TOKENS),
    (iso.AttentionToGPSA(**PLACED), Attention(12, 3), TOKENS),
    (iso.AttentionToRefined(), Attention(12, 3), TOKENS),
]


@pytest.mark.parametrize(("rule", "layer", "shape"), OF_ALL)
def test_no_class_of_timm_or_torch_is_taken_for_what_it_is_not(rule, layer, shape):
    """A layer of a derived class is refused, or computes what the layer of its base computes."""
    import torch.ao.nn.intrinsic.qat  # registers classes that are trained to be quantised

    x = torch.randn(shape)
    plain = type(layer)
    found = sorted(subclasses(plain), key=str)
    taken = []
    for kind in found:
        other = copy.deepcopy(layer).eval()
        other.__class__ = kind
        if rule.accepts(iso.surgery.Site(other)):
            taken.append(kind)
            torch.testing.assert_close(other(x), layer.eval()(x), msg=str(kind))
    assert len(found) > 3
    assert len(taken) < len(found)
