"""What `verify` compares, reports and rejects."""

import copy
import math

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.surgery import compare_outputs


def net(conv):
    return nn.Sequential(nn.Identity(), copy.deepcopy(conv), nn.BatchNorm2d(conv.out_channels)).eval()


def test_a_different_model_is_caught():
    cnn = net(nn.Conv2d(4, 4, 3, padding=1))
    with pytest.raises(iso.UserError, match="NOT equal") as caught:
        iso.verify(cnn, iso.recast(cnn, iso.ConvToGPSA("paper"), "1"), torch.randn(1, 4, 6, 6))
    assert caught.value.report.targets[0].deviation > 1e-3


def test_a_step_that_changes_the_function_is_caught():
    cnn = timm.create_model("resnet50d", num_classes=4).eval()
    for block in cnn.layer4:
        nn.init.ones_(block.bn3.weight)
    tcnn = iso.recast(iso.unstride(cnn, "layer4"), iso.ConvToGPSA(), "layer4.*.conv2")
    with pytest.raises(iso.UserError, match="NOT equal"):
        iso.verify(cnn, tcnn, torch.randn(1, 3, 64, 64))


def test_a_branch_that_is_switched_off_proves_nothing():
    """timm's last norms start at zero: the output does not depend on the branch, the modules do differ."""
    cnn = timm.create_model("resnet18", num_classes=4).eval()
    exact, paper = (iso.recast(cnn, iso.ConvToGPSA(init), "layer4.*.conv2") for init in ("exact", "paper"))
    x = torch.randn(1, 3, 64, 64)
    iso.verify(cnn, exact, x)
    with pytest.raises(iso.UserError, match="NOT equal") as caught:
        iso.verify(cnn, paper, x)
    assert caught.value.report.fp64 == 0


def test_large_outputs_are_compared_by_share():
    cnn = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)).eval()
    cnn[0].weight.data *= 1e6
    iso.verify(cnn, iso.recast(cnn, iso.ConvToGPSA(), "0"), torch.randn(1, 4, 8, 8))


def test_nan_is_caught_at_any_tolerance():
    broken = net(nn.Conv2d(4, 4, 3, padding=1))
    broken[1].weight.data.fill_(float("nan"))
    with pytest.raises(iso.UserError, match="NOT equal"):
        iso.verify(broken, broken, torch.randn(1, 4, 6, 6), atol=math.inf)


def test_nan_is_caught():
    broken = net(nn.Conv2d(4, 4, 3, padding=1))
    broken[1].weight.data.fill_(float("nan"))
    with pytest.raises(iso.UserError, match="max \\|diff\\| inf"):
        iso.verify(broken, broken, torch.randn(1, 4, 6, 6))


def test_doubtful_results_have_a_note():
    cnn = net(nn.Conv2d(4, 4, 3, padding=1))
    cnn.append(nn.Conv2d(4, 2, 1, bias=False))
    cnn[-1].weight.data.zero_()
    report = iso.verify(cnn, copy.deepcopy(cnn), torch.randn(1, 4, 6, 6))
    assert report.passed
    assert "all outputs are 0" in str(report)
    trained = copy.deepcopy(cnn)
    nn.init.normal_(trained[-1].weight)
    assert "all outputs are 0" not in str(compare_outputs(cnn, trained, torch.randn(1, 4, 6, 6)))
    half = net(nn.Conv2d(4, 4, 3, padding=1)).to(torch.bfloat16)
    other = copy.deepcopy(half)
    other[1].weight.data *= 1.01
    with pytest.raises(iso.UserError, match="weights are in bfloat16: rounding alone"):
        iso.verify(half, other, torch.randn(1, 4, 6, 6))


def test_arguments_need_no_tensor_of_their_own():
    class Listed(nn.Module):
        def forward(self, images, times=1):
            return times * torch.stack(images).sum(0)

    inputs = {"images": [torch.randn(2), torch.randn(2)], "times": 3}
    assert compare_outputs(Listed(), Listed(), inputs).passed


@pytest.mark.parametrize(
    ("model", "x", "atol", "message"),
    [
        (None, torch.randn(1, 4, 6, 6), None, "None is not a model"),
        (nn.LazyLinear(3), torch.randn(1, 4), None, r"weight has no shape yet \(lazy layer\); run the model once"),
        (nn.Identity(), torch.randn(0, 4, 6, 6), None, r"the batch is empty \(0x4x6x6\)"),
        (nn.Identity(), {"x": torch.randn(0, 4)}, None, r"the batch is empty \(x 0x4\)"),
        (nn.Identity(), torch.randn(1, 4), -1e-3, "atol -0.001 must be at least 0"),
        (nn.Identity(), torch.randn(1, 4), float("nan"), "atol nan must be at least 0"),
    ],
)
def test_what_cannot_be_compared_is_said(model, x, atol, message):
    with pytest.raises(iso.UserError, match=message):
        iso.verify(nn.Identity(), model, x, atol)


def test_eval_is_forced_and_modes_are_left():
    cnn = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.5)).train()
    report = iso.verify(cnn, cnn, torch.randn(1, 4, 6, 6))
    assert report.fp32 == 0
    assert cnn.training
    assert cnn[1].training


def test_report_reads_as_text_and_as_plain_values():
    cnn = net(nn.Conv2d(4, 4, 3, padding=1))
    report = iso.verify(cnn, iso.recast(cnn, iso.ConvToGPSA(), "1"), torch.randn(1, 4, 6, 6), seeds=[3])
    assert report.as_dict()["passed"] is True
    assert len(report.inputs) == 2
    assert "float64" in str(report)
    assert "GPSA2d" in str(report)


def test_shapes_that_differ_are_said():
    with pytest.raises(iso.UserError, match="different shapes"):
        iso.verify(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 5, 3), torch.randn(1, 4, 6, 6))
