"""Equalised channels: the same function to the last bit, less noise after rounding; and the ratios themselves."""

import math

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.surgery.channel_groups import channel_groups
from isomorph.surgery.equalize import equalize_channels
from isomorph.surgery.linear_chains import absorb_conv_biases
from isomorph.surgery.quantization_noise import apply_layer, round_activation, round_weight


class Net(nn.Module):
    """Every kind of layer between which channels can be rescaled, and some where they cannot."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 12, 3, groups=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(12)
        self.added = nn.Conv2d(12, 12, 1)
        self.norm = nn.LayerNorm(12)
        self.q, self.k = nn.Linear(12, 6), nn.Linear(12, 6)
        self.hidden, self.head = nn.Linear(6, 7), nn.Linear(7, 2)

    def forward(self, x):
        x = torch.relu(self.depthwise(torch.relu(self.stem(x))))
        x = nn.functional.max_pool2d(torch.relu(self.bn(self.grouped(x))), 2)
        x = self.added(x)
        x = self.norm((x + x.sigmoid()).flatten(2).transpose(1, 2))
        x = (self.q(x) * self.k(x)).mean(1)
        return self.head(nn.functional.gelu(self.hidden(x)))


@pytest.fixture(scope="module")
def uneven():
    """A network whose channels have very different ranges, in eval mode."""
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for layer in (net.stem, net.depthwise, net.bn, net.norm):
            spread = torch.randn(layer.weight.shape[0]).exp() ** 2
            layer.weight.mul_(spread.view(-1, *[1] * (layer.weight.ndim - 1)))
        net.bn.bias.uniform_(-1, 1)
        net.bn.running_mean.uniform_(-1, 1)
    return net.eval()


def test_groups_are_the_layers_with_nothing_else_between(uneven):
    found = {group.producer: group.consumers for group in channel_groups(uneven, torch.randn(2, 3, 8, 8))}
    expected = {"stem": ("depthwise",), "depthwise": ("grouped",), "bn": ("added",), "norm": ("q", "k")}
    assert found == expected  # the grouped convolution is read by a norm, `added` by two operations, `hidden` by GELU


def test_tied_weights_stay():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    net[2].weight = net[0].weight
    assert channel_groups(net, torch.randn(2, 4)) == ()


@pytest.mark.parametrize("activations", [True, False])
def test_equalised_outputs_are_equal_to_the_last_bit(uneven, activations):
    images = torch.randn(4, 3, 8, 8)
    before = {name: tensor.clone() for name, tensor in uneven.state_dict().items()}
    even, names = equalize_channels(uneven, [(images, None)], activations)
    assert set(names) >= {"norm"}
    assert set(names) <= {"stem", "depthwise", "bn", "norm"}
    assert any(not torch.equal(before[name], tensor) for name, tensor in even.state_dict().items())
    assert all(torch.equal(before[name], tensor) for name, tensor in uneven.state_dict().items())
    assert torch.equal(even(images), uneven(images))
    report = iso.verify(uneven, even, torch.randn(2, 3, 12, 8))
    assert (report.fp32, report.fp64) == (0.0, 0.0)


def test_rounding_loses_less_after_equalising(uneven):
    images = torch.randn(8, 3, 8, 8)
    even = iso.surgery.equalize(uneven, [images])

    def output_noise(net):
        inputs = {}
        net.q.register_forward_pre_hook(lambda module, args: inputs.update(x=args[0]))
        net(images)
        x, weight = inputs["x"], net.q.weight
        exact = apply_layer(net.q, x, weight)
        return iso.surgery.sqnr(exact, apply_layer(net.q, round_activation(x), round_weight(weight)))

    assert output_noise(even) > output_noise(uneven) + 3


def test_even_channels_are_left_alone():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight.fill_(0.5)
            layer.bias.zero_()
    assert equalize_channels(net, [torch.rand(2, 3, 4, 4)])[1] == ()


def test_errors_of_equalize(uneven):
    with pytest.raises(iso.UserError, match="at least one batch"):
        iso.surgery.equalize(uneven, [])
    with pytest.raises(iso.UserError, match=r"not one tensor; give \[images\]"):
        iso.surgery.equalize(uneven, torch.randn(1, 3, 8, 8))
    with pytest.raises(iso.UserError, match="bits=1 must be from 2 to 16"):
        iso.surgery.weight_sqnr(uneven, bits=1)


def test_rounding_is_that_of_a_loop():
    torch.manual_seed(0)
    weight = torch.randn(3, 2, 2)
    rounded = round_weight(weight, bits=5)
    for row, result in zip(weight, rounded, strict=True):
        step = max(abs(value) for value in row.flatten().tolist()) / 15
        for value, got in zip(row.flatten().tolist(), result.flatten().tolist(), strict=True):
            assert got == pytest.approx(round(value / step) * step, abs=1e-6)
    x = torch.tensor([-1.0, 0.0, 0.4, 3.0])
    step = 4 / 255
    assert torch.allclose(round_activation(x), torch.round(x / step) * step, atol=1e-6)
    assert torch.equal(round_activation(torch.zeros(3)), torch.zeros(3))


def test_outliers_lower_the_ratio_and_fusing_is_seen():
    net = nn.Sequential(nn.Linear(64, 8))
    even = iso.surgery.weight_sqnr(net)["0"]
    with torch.no_grad():
        net[0].weight[:, 0] *= 50
    assert iso.surgery.weight_sqnr(net, per_channel=True)["0"] < even + 20
    with torch.no_grad():
        net[0].weight[0] *= 50
    decibels = iso.surgery.weight_sqnr(net), iso.surgery.weight_sqnr(net, per_channel=False)
    assert decibels[0]["0"] == pytest.approx(iso.surgery.sqnr(net[0].weight, round_weight(net[0].weight)))
    assert iso.surgery.sqnr(torch.ones(2), torch.ones(2)) == math.inf


def test_branches_of_timm_merge_after_fused_pyramids():
    torch.manual_seed(0)
    net = timm.create_model("mobileone_s0", num_classes=3).stages[0][:2].eval()
    with torch.no_grad():
        for tensor in net.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand_like(tensor))
    wide = iso.recast(net, iso.LinearToPyramid("P-W1S"), where=["0", "1"])
    fused = iso.fuse(wide)
    absorb_conv_biases(fused)
    merged = timm.utils.reparameterize_model(fused)
    assert iso.verify(net, merged, torch.randn(2, 48, 8, 8), atol=1e-4).passed
