"""The way back: fused equals unfused, train mode is refused, nothing of the training form is left."""

import pytest
import torch
from torch import nn

import isomorph as iso


class Doubled(nn.Module):
    """Stands for any layer with an unconditional way back: two linear layers in a row."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.second(self.first(x))

    def fuse(self):
        fused = nn.Linear(self.first.in_features, self.second.out_features)
        fused.weight.data = self.second.weight @ self.first.weight
        fused.bias.data = self.second.weight @ self.first.bias + self.second.bias
        return fused


def test_fused_equals_unfused_and_nothing_is_left():
    model = nn.Sequential(Doubled(4), nn.ReLU(), nn.Sequential(Doubled(4))).double().eval()
    fused = iso.fuse(model)
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-6)  # fuse() above builds in float32
    assert not any(isinstance(module, Doubled) for module in fused.modules())
    assert isinstance(model[0], Doubled)
    torch.testing.assert_close(iso.fuse(fused)(x), fused(x))


def test_the_root_is_fused_too():
    assert type(iso.fuse(Doubled(4).eval())) is nn.Linear


def test_a_shared_module_stays_one():
    shared = Doubled(4)
    fused = iso.fuse(nn.Sequential(shared, shared).eval())
    assert fused[0] is fused[1]


def test_train_mode_is_refused():
    model = nn.Sequential(Doubled(4), Doubled(4)).eval()
    model[1].train()
    with pytest.raises(iso.UserError, match="1 is in train mode"):
        iso.fuse(model)


def test_layers_without_an_unconditional_way_back_are_left():
    model = nn.Sequential(iso.layers.GPSA2d(4, 4, 3, 1, 1)).eval()
    assert isinstance(iso.fuse(model)[0], iso.layers.GPSA2d)
