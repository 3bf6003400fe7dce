"""Modules of which `fuse` leaves one layer: it takes their place, and no code adds the 0 of a merged branch."""

from collections import OrderedDict

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from isomorph.operations import see
from isomorph.surgery import fuse_with_report
from law_rows import deviation, disturb

X = torch.randn(2, 4, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Unit(nn.Module):
    """Two branches with norms, the input, and an activation, as in RepVGG."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.narrow = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.act = nn.GELU()

    def total(self, x):
        return self.wide(x) + self.narrow(x)

    def forward(self, x):
        return self.act(self.total(x) + x)


class Two(nn.Module):
    """A unit between other layers."""

    def __init__(self, unit):
        super().__init__()
        self.body = nn.ModuleDict({"unit": unit})
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x):
        return self.head(self.body["unit"](x))


class Residual(nn.Module):
    """The input and a convolution of it, without a norm."""

    def __init__(self, sign=1):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.sign = sign

    def forward(self, x):
        return self.conv(x) + x if self.sign > 0 else self.conv(x) - x


def merged(unit):
    torch.manual_seed(0)
    model = disturb(Two(unit)).double().eval()
    new, report = fuse_with_report(model, X)
    assert deviation(model(X), new(X)) < 1e-12
    return new, report


def additions(model, x):
    return [each for each in see(model, lambda: model(x)).operations if "add" in each.name]


def test_one_layer_and_what_follows_it_stay():
    new, report = merged(Unit())
    unit = new.body["unit"]
    assert [name for name, _ in unit.named_children()] == ["0", "act"]
    assert isinstance(unit, nn.Sequential)
    assert report.wholes == ("body.unit",)
    assert "replaced by the one layer left in them: body.unit" in str(report)
    assert not additions(new, X)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_residual_convolution_becomes_a_convolution(sign):
    new, report = merged(Residual(sign))
    assert isinstance(new.body["unit"], nn.Conv2d)
    assert new.body["unit"].groups == 2
    assert report.wholes == ("body.unit",)


def test_it_is_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    model = disturb(Two(Unit())).float().eval()
    new = iso.fuse(model, X.float())
    iso.save(new, tmp_path / "new.safetensors")
    loaded = iso.load(tmp_path / "new.safetensors", base=Two(Unit())).eval()
    assert torch.equal(new(X.float()), loaded(X.float()))
    assert not additions(loaded, X.float())


class Twice(Unit):
    def forward(self, x):
        return self.act(self.total(x) + x).relu()


class WithTuple(Unit):
    def forward(self, x):
        return (super().forward(x),)


class OfTuple(Two):
    def forward(self, x):
        return self.head(self.body["unit"](x)[0])


class WithDropout(Unit):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.act(self.drop(self.total(x)) + x)


class WithAnother(Unit):
    """A unit with a layer that no example calls."""

    def __init__(self):
        super().__init__()
        self.other = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return super().forward(x) if x.shape[1] == 4 else self.other(x)


class WithHook(Unit):
    def __init__(self):
        super().__init__()
        self.act.register_forward_hook(lambda module, args, output: output)


class ByNumbers(Unit):
    def forward(self, x):
        return self.act(self.total(x) + x) if x.sum() > 1e9 else self.act(self.total(x) + 2 * x)


@pytest.mark.parametrize("kind", [Twice, WithDropout, WithAnother, WithHook, ByNumbers])
def test_a_module_that_computes_or_holds_more_stays(kind):
    new, report = merged(kind())
    assert type(new.body["unit"]) is kind
    assert report.wholes == ()


def test_a_module_that_gives_a_tuple_stays():
    torch.manual_seed(0)
    model = disturb(OfTuple(WithTuple())).double().eval()
    new, report = fuse_with_report(model, X)
    assert deviation(model(X), new(X)) < 1e-12
    assert report.wholes == ()
    assert report.merged


def test_a_module_that_is_called_twice_stays():
    torch.manual_seed(0)
    unit = Unit()
    model = disturb(nn.Sequential(unit, nn.Conv2d(4, 4, 1), unit)).double().eval()
    new, report = fuse_with_report(model, X)
    assert deviation(model(X), new(X)) < 1e-12
    assert report.wholes == ()


def test_attributes_that_the_model_reads_keep_their_module():
    """A model that reads an attribute of the module does not run without it: the trial finds that."""

    class Reads(Two):
        def forward(self, x):
            return self.head(self.body["unit"](x)) * self.body["unit"].factor

    unit = Unit()
    unit.factor = 2.0
    torch.manual_seed(0)
    model = disturb(Reads(unit)).double().eval()
    new, report = fuse_with_report(model, X)
    assert deviation(model(X), new(X)) < 1e-12
    assert report.wholes == ()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in new.modules())


@pytest.mark.parametrize(
    "name", ["test_byobnet", pytest.param("fastvit_t8", marks=pytest.mark.slow)]
)
def test_timm_networks_have_no_zeros_to_add(name):
    """Additions are left where a residual stream is: as many as timm's own method leaves, or fewer."""
    torch.manual_seed(0)
    model = disturb(timm.create_model(name)).double().eval()
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    new, report = fuse_with_report(model, x)
    operations = additions(new, x)
    for operation in operations:
        assert len(operation.inputs) == 2
    if name == "fastvit_t8":
        assert len(operations) == 10
        assert report.wholes


def test_parts_of_one_name_are_numbered():
    unit = nn.ModuleDict(
        OrderedDict(
            one=nn.ModuleDict({"act": nn.ReLU()}),
            two=nn.ModuleDict({"act": nn.GELU()}),
        )
    )
    new = iso.surgery.Collapse(("one.act", "two.act")).build(iso.surgery.Site(unit))
    assert [type(module) for module in new] == [nn.ReLU, nn.GELU]
    with pytest.raises(iso.UserError, match="it has no module three"):
        iso.surgery.Collapse(("three",)).build(iso.surgery.Site(unit))
