"""What `fuse` costs: the arithmetic of all its calls, and Python's work, which grows as the network does."""

import cProfile
import pstats

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import isomorph as iso

# Most forward passes of one example in float64 that `fuse` may take, with all trials and comparisons.
MOST_PASSES = 11
SMALL = ["test_resnet", "test_efficientnet", "test_byobnet"]
LARGE = ["resnet18", "resnet50", "efficientnet_b0", "fastvit_t8", "mobileone_s0"]


def _passes(name: str) -> float:
    """Return the multiply-adds of fuse over those of one pass."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    x = torch.randn(1, *model.pretrained_cfg["input_size"])
    with torch.no_grad(), FlopCounterMode(display=False) as one:
        model(x)
    with FlopCounterMode(display=False) as all_calls:
        _, report = iso.surgery.fuse_with_report(model)
    assert report.merged
    return all_calls.get_total_flops() / one.get_total_flops()


@pytest.mark.parametrize(
    "name", [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)]
)
def test_fuse_takes_few_forward_passes(name: str) -> None:
    assert _passes(name) <= MOST_PASSES


def _python_calls(units: int) -> int:
    """Return how many functions fuse calls in Python for a network of so many units."""
    torch.manual_seed(0)
    blocks = []
    for _ in range(units):
        blocks.append(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU()))
    model = nn.Sequential(*blocks).eval()
    profile = cProfile.Profile()
    profile.enable()
    iso.fuse(model, torch.randn(1, 2, 8, 8))
    profile.disable()
    return int(pstats.Stats(profile).total_calls)


def test_python_work_of_fuse_grows_as_the_network_does() -> None:
    assert _python_calls(32) < 2.03 * _python_calls(16)
