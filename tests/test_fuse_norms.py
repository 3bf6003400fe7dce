"""Norms, scales, branches and chains merged into layers: what is merged, what is left and why, in float64."""

import copy
import operator
import re
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import LayerScale
from timm.utils import reparameterize_model
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.ops import FrozenBatchNorm2d

import isomorph as iso
from isomorph.operations import tensors_in
from isomorph.surgery import fuse_with_report
from law_rows import deviation, disturb

MAP = (2, 4, 9, 8)
TOKENS = (2, 7, 4)
SIGNAL = (2, 4, 11)
VOLUME = (2, 4, 5, 6, 7)


class Net(nn.Module):
    """Parts, and the function of them and of a batch that the model computes."""

    def __init__(self, compute, **parts):
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **named):
        return self.compute(self, *args, **named)


def in_turn(*layers):
    return lambda: nn.Sequential(*(make() for make in layers))


def net(compute, **parts):
    return lambda: Net(compute, **{name: make() for name, make in parts.items()})


def conv(*args, kind=nn.Conv2d, **options):
    return lambda: kind(*args, **options)


def norm(width=6, kind=nn.BatchNorm2d, **options):
    return lambda: kind(width, **options)


def frozen(width=6):
    """Statistics that differ from 0 and 1: the buffers of this class are not statistics by name alone."""
    layer = FrozenBatchNorm2d(width)
    for buffer in layer.buffers():
        buffer.uniform_(0.5, 1.5)
    return layer


class Stored(nn.Module):
    """A value and numbers by channel that a module stores, in an operation."""

    def __init__(self, operation, width=6):
        super().__init__()
        self.operation = operation
        self.numbers = nn.Parameter(torch.rand(width, 1, 1) + 0.5)

    def forward(self, x):
        return self.operation(x, self.numbers)


def pad_odd(model, x):
    """The padding of a module that reads even sizes alone."""
    y = model.conv(x)
    return model.norm(F.pad(y, (0, y.shape[-1] % 2, 0, y.shape[-2] % 2)))


THREE = conv(4, 6, 3, padding=1, bias=False)
ONE = conv(4, 6, 1)
PLAIN = conv(4, 4, 3, padding=1, bias=False)
SAME = norm(4)
LINEAR = conv(4, 6, kind=nn.Linear)
DOWN = conv(4, 1, kind=nn.Linear)
UP = conv(1, 6, kind=nn.Linear)
MOVED = dict(fc=LINEAR, norm=norm(kind=nn.BatchNorm1d))
THREE_BRANCHES = dict(three=PLAIN, one=conv(4, 4, 1), a=SAME, b=SAME, c=SAME)
LOW_RANK = dict(a=THREE, n=norm(), down=conv(4, 2, 3, padding=1), up=conv(2, 6, 1))
MERGED = {
    "conv, grouped, dilated": (in_turn(conv(4, 6, 3, 2, 2, 2, 2), norm(affine=False)), MAP),
    "conv, transposed, grouped": (
        in_turn(conv(4, 6, 3, 2, groups=2, kind=nn.ConvTranspose2d), norm()),
        MAP,
    ),
    "linear": (in_turn(LINEAR, norm(kind=nn.BatchNorm1d)), (5, 4)),
    "linear, moved": (net(lambda m, x: m.norm(m.fc(x).transpose(1, 2)), **MOVED), TOKENS),
    "frozen norm": (in_turn(THREE, frozen), MAP),
    "layer scale": (in_turn(LINEAR, lambda: LayerScale(6, 0.3)), TOKENS),
    "divided by stored numbers": (in_turn(THREE, lambda: Stored(operator.truediv)), MAP),
    "less stored numbers": (in_turn(THREE, lambda: Stored(operator.sub)), MAP),
    "plus stored numbers": (in_turn(THREE, lambda: Stored(operator.add)), MAP),
    "an input times stored numbers": (in_turn(lambda: Stored(operator.mul, 4), ONE), MAP),
    "an input less stored numbers": (in_turn(lambda: Stored(operator.sub, 4), ONE), MAP),
    "norm with activation": (in_turn(THREE, lambda: timm.layers.BatchNormAct2d(6)), MAP),
    "branches": (net(lambda m, x: m.a(m.three(x)) + m.b(m.one(x)) + m.c(x), **THREE_BRANCHES), MAP),
    "branches, then a norm": (
        net(
            lambda m, x: m.n(m.three(x) + m.one(x) + x),
            three=PLAIN,
            one=conv(4, 4, 1, groups=4),
            n=SAME,
        ),
        MAP,
    ),
    "an input of one channel, added to all": (
        net(lambda m, x: m.n(m.a(x) + x), a=conv(1, 6, 3, padding=1), n=norm()),
        (2, 1, 9, 8),
    ),
    "adapter": (
        net(lambda m, x: m.a(x) + 0.5 * m.up(m.down(x)), a=LINEAR, down=DOWN, up=UP),
        TOKENS,
    ),
    "adapter divided": (
        net(lambda m, x: m.up(m.down(x)) / 4 + m.a(x), a=LINEAR, down=DOWN, up=UP),
        TOKENS,
    ),
    "adapter of a convolution": (net(lambda m, x: m.up(m.down(x)) + m.n(m.a(x)), **LOW_RANK), MAP),
    "a weighted branch with a norm": (
        net(lambda m, x: 0.3 * m.n(m.one(x)) + m.three(x), three=THREE, one=ONE, n=norm()),
        MAP,
    ),
    "before two readers": (
        net(
            lambda m, x: (lambda y: m.a(y) * m.b(y))(m.n(x)),
            n=SAME,
            a=conv(4, 6, 3, groups=2),
            b=conv(4, 6, 3),
        ),
        MAP,
    ),
    "chain": (in_turn(conv(4, 8, 3), norm(8), conv(8, 4, 1), norm(4), nn.ReLU), MAP),
    "chain of three": (in_turn(conv(4, 4, 1), SAME, conv(4, 4, 1), conv(4, 4, 1)), MAP),
    "layer norm": (in_turn(norm(4, kind=nn.LayerNorm), LINEAR), TOKENS),
    "RMS norm": (in_turn(norm(4, kind=nn.RMSNorm), LINEAR), TOKENS),
    "group norm": (in_turn(lambda: nn.GroupNorm(2, 4), ONE), MAP),
}
"""A model all of whose norms, scales and branches are one layer, and a batch."""
AFFINE = {"layer norm", "RMS norm", "group norm"}


def made(make, shape):
    torch.manual_seed(0)
    model = disturb(make())
    return model, torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("name", MERGED)
@torch.no_grad()
def test_all_that_is_one_layer_is_merged(name):
    model, x = made(*MERGED[name])
    before = copy.deepcopy(model.state_dict())
    only_forward = isinstance(model, nn.Sequential)  # no slice of it is taken
    new, report = fuse_with_report(model, x, affine=name in AFFINE, only_forward=only_forward)
    assert report.merged
    assert not report.left
    assert deviation(new(x), model(x)) < 1e-12
    assert report.difference < 1e-12
    for module in new.modules():
        assert not isinstance(module, _BatchNorm | FrozenBatchNorm2d | LayerScale | Stored)
    for module in new.modules():
        if "Norm" in type(module).__name__:
            assert getattr(module, "weight", None) is None
    assert (
        sum(p.numel() for p in new.parameters()) <= sum(p.numel() for p in model.parameters()) + 16
    )
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])
    layers = [module for module in new.modules() if getattr(module, "weight", None) is not None]
    assert len(layers) == 1 + (name == "before two readers")
    again = fuse_with_report(new, x, affine=name in AFFINE, only_forward=only_forward)[1]
    assert not again.merged


def tied(first, second, what="weight"):
    """A model in which two layers have one weight or bias."""
    setattr(second, what, getattr(first, what))
    return nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), second, nn.BatchNorm2d(4))


def bias_read_elsewhere():
    model = net(
        lambda m, x: m.norm(m.conv(x)).relu() + m.again[:, None, None], conv=ONE, norm=norm()
    )()
    model.again = model.conv.bias
    return model


class Doubled(nn.BatchNorm2d):
    """A norm whose module computes more, which a gate of 0 hides."""

    def forward(self, x):
        return super().forward(x) * 2 - 1


def hooked(where, kind="forward"):
    def make():
        model = in_turn(THREE, norm())()
        getattr(model[where], f"register_{kind}_hook")(lambda *_: None)
        return model

    return make


def standardised():
    return nn.Sequential(timm.layers.StdConv2d(4, 6, 3), nn.BatchNorm2d(6))


def decided_below(m, x):
    y = m.conv(x)
    return m.norm(y) if m.choice(x) else y


def shared_norm(m, x):
    return m.norm(m.b(m.norm(m.a(x)).relu()))


PAIR = dict(conv=THREE, norm=norm())
LEFT = {
    "norm used twice": (
        net(shared_norm, a=PLAIN, b=PLAIN, norm=SAME),
        "norm",
        "called more than once",
    ),
    "in a dict": (
        net(lambda m, x: {"a": [y := m.conv(x)], "b": m.norm(y)}, **PAIR),
        "norm",
        "read elsewhere",
    ),
    "in an object": (
        net(lambda m, x: (SimpleNamespace(of=[y := m.conv(x)]), m.norm(y)), **PAIR),
        "norm",
        "elsewhere",
    ),
    "tied weights": (lambda: tied(PLAIN(), PLAIN()), "1", "tied"),
    "tied biases": (
        lambda: tied(*(nn.Conv2d(4, 4, 1) for _ in "ab"), "bias"),
        "4",
        "bias of 3 is tied",
    ),
    "bias read elsewhere": (bias_read_elsewhere, "norm", "tied"),
    "branch on the batch": (
        net(lambda m, x: m.norm(m.conv(x)) if len(x) > 1 else m.conv(x), **PAIR),
        "norm",
        "differ",
    ),
    "module that computes more": (in_turn(PLAIN, lambda: Doubled(4)), "1", "computes more"),
    "computed weight": (standardised, "1", "computes its weight"),
    "hook on the layer": (hooked(0), "1", "hooks"),
    "statistics of the batch": (
        in_turn(THREE, norm(track_running_stats=False)),
        "1",
        "statistics of the batch",
    ),
    "branch on data of a child": (
        net(decided_below, choice=net(lambda m, x: bool(x.mean() > -9)), **PAIR),
        "norm",
        "branches on the numbers",
    ),
    "padding of odd sizes": (net(pad_odd, **PAIR), "norm", "other sizes|follows pad"),
    "not called": (net(lambda m, x: m.conv(x), **PAIR), "norm", "no example calls it"),
    "activation between": (in_turn(THREE, nn.ReLU, norm()), "2", "it follows relu; .* output"),
    "before zero padding": (in_turn(norm(4), THREE), "0", "1 pads with zeros"),
}
"""A model with a norm that has to stay, its name and the reason."""


@pytest.mark.parametrize("name", LEFT)
@torch.no_grad()
def test_what_cannot_be_merged_is_left_with_the_reason(name):
    make, left, reason = LEFT[name]
    model, x = made(make, MAP)
    new, report = fuse_with_report(model, x)
    assert left in report.left
    assert re.search(reason, report.left[left])
    for size in ((2, 4, 9, 8), (1, 4, 7, 7), (1, 4, 6, 10)):
        values = torch.randn(size, dtype=torch.float64)
        for one, other in zip(*(tensors_in(m(values)) for m in (model, new)), strict=True):
            assert deviation(one, other) < 1e-12
    assert left in str(report)


@pytest.mark.parametrize("operation", [operator.sub, operator.truediv])
@torch.no_grad()
def test_stored_numbers_that_a_value_is_taken_from_or_divides_stay(operation):
    model, x = made(in_turn(THREE, lambda: Stored(lambda y, numbers: operation(numbers, y))), MAP)
    new, report = fuse_with_report(model, x)
    assert not report.merged
    assert deviation(new(x), model(x)) < 1e-12


@torch.no_grad()
def test_every_path_needs_an_example():
    model, x = made(
        net(lambda m, x, to="a": getattr(m, to)(m.conv(x)), conv=THREE, a=norm(), b=norm()), MAP
    )
    with pytest.warns(UserWarning, match="no example calls b"):
        iso.fuse(model, x)
    assert fuse_with_report(model, [dict(x=x), dict(x=x, to="b")])[1].left.keys() == {"a", "b"}


@torch.no_grad()
def test_a_list_of_images_and_a_copy_in_another_mode():
    """Detectors of torchvision read lists; a copy of its feature extractors is in train mode."""
    model, x = made(net(lambda m, images: m.norm(m.conv(torch.stack(images))), **PAIR), MAP)
    report = fuse_with_report(model.float(), {"images": [*x.float()]})[1]
    assert report.left == {}
    assert report.inputs[0] == "images.0 4x9x8, images.1 4x9x8"
    extractor = disturb(
        timm.create_model("resnet10t", features_only=True, feature_cls="fx", out_indices=(2,)), 0.1
    )
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    new = iso.fuse(extractor.eval(), images)
    for module in new.modules():
        assert not (module.training)
        assert not (isinstance(module, _BatchNorm))
    assert deviation(new(images)[0], extractor(images)[0]) < 1e-12


FAMILIES = {
    "resnet18": (32, {}),
    "repvgg_a0": (32, {}),
    "levit_128s": (224, dict(depth=(1, 1, 1))),
    "densenet121": (32, dict(block_config=(2, 2, 2, 2))),
    "vit_tiny_patch16_224": (224, dict(depth=1, init_values=0.1)),
}
"""Models of timm, and the size that they are tried at."""
READ_BY_MANY = {"densenet121": 12}
"""How many norms read sums, lists or values that others read too."""


def family(name):
    torch.manual_seed(0)
    size, options = FAMILIES[name]
    return disturb(timm.create_model(name, num_classes=3, **options), 0.1).float(), torch.randn(
        2, 3, size, size
    )


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_families_of_timm(name, tmp_path):
    model, x = family(name)
    new, report = fuse_with_report(model, x)
    left = [key for key, module in new.named_modules() if isinstance(module, _BatchNorm)]
    assert sorted(report.left) == sorted(left)
    assert len(left) == READ_BY_MANY.get(name, 0)
    assert report.difference < 1e-12
    parameters = sum(p.numel() for p in reparameterize_model(model).parameters())
    assert report.parameters[1] == sum(p.numel() for p in new.parameters()) <= parameters
    assert iso.verify(model, new, x).passed
    iso.save(new, tmp_path / "thin.safetensors")
    assert torch.equal(iso.load(tmp_path / "thin.safetensors").eval()(x), new(x))
    assert not fuse_with_report(new, x)[1].merged


class Wrong(nn.Sequential):
    """A module whose methods mean something else than merging it into one layer of the same function."""

    def fuse(self):
        return nn.Conv2d(4, 6, 3, padding=1)

    def reparameterize(self, depth):
        raise AssertionError("not to be called")

    def switch_to_deploy(self):
        self[0].weight.data.zero_()


class NeedsMore(nn.Sequential):
    def fuse(self, features, depth):
        raise AssertionError("not to be called")


@pytest.mark.parametrize("kind", [Wrong, NeedsMore, type("Inherits", (Wrong,), {})])
@pytest.mark.parametrize("norms", [True, False])
@torch.no_grad()
def test_methods_of_other_libraries_are_not_called(kind, norms):
    model, x = made(in_turn(THREE, norm(), nn.ReLU), MAP)
    model = nn.Sequential(kind(*model), nn.Conv2d(6, 2, 1)).double().eval()
    assert not iso.surgery.fusible_modules(model)
    assert deviation(iso.fuse(model, norms=False)(x), model(x)) == 0
    new, report = fuse_with_report(model, x, norms=norms)
    assert list(report.merged) == ["0.1"] * norms
    assert not report.left
    assert deviation(new(x), model(x)) < 1e-12


BROKEN = {
    "a weight that is NaN": (
        lambda model: model[0].weight.fill_(float("nan")),
        "0.weight is not finite",
    ),
    "an infinite mean": (
        lambda model: model[1].running_mean.fill_(float("inf")),
        "outputs are not finite",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_finite_is_an_error(name):
    model, x = made(in_turn(THREE, norm()), MAP)
    with torch.no_grad():
        BROKEN[name][0](model)
    with pytest.raises(iso.UserError, match=BROKEN[name][1]) as caught:
        iso.fuse(model, x)
    assert caught.value.exit_status == 1


class NotFiniteElsewhere(nn.Sequential):
    """Divides by 0 at widths but its own, and in a second way to call it."""

    def forward(self, x, far=False):
        y = super().forward(x)
        return y if x.shape[-1] == MAP[-1] and not far else y / torch.zeros_like(y)

    def embed(self, x):
        return self(x, far=True)


def test_a_call_that_is_not_finite_in_the_given_model_is_not_compared():
    model, x = made(lambda: NotFiniteElsewhere(*in_turn(THREE, norm())()), MAP)
    new, report = fuse_with_report(model, x)
    assert list(report.merged) == ["1"]
    assert report.entry_points == ("forward",)
    assert deviation(new(x), model(x)) < 1e-12


@torch.no_grad()
def test_a_fused_network_gets_norms_again_and_keeps_its_function():
    model, _ = made(in_turn(THREE, norm(), nn.ReLU, conv(6, 8, 3), norm(8)), MAP)
    x = 3 * torch.randn(64, 4, 9, 8, dtype=torch.float64) + 1
    thin = iso.fuse(model, x)
    normed = iso.recast(thin, iso.ConvToConvNorm())
    assert deviation(normed(x), thin(x)) < 1e-12
    # the variance is unbiased, as torch's BatchNorm has it
    for batches in ([x], [x[:1, :, :4, :4]]):
        found = iso.recalibrate(normed, batches)[0].norm.running_var
        torch.testing.assert_close(found, thin[0](batches[0]).movedim(1, -1).flatten(0, -2).var(0))
    near = iso.recalibrate(normed, [x])
    assert deviation(near(x), thin(x)) < 1e-12
    trained = copy.deepcopy(near).train()
    assert (
        deviation(trained(x), thin(x)) < 0.01 < deviation(copy.deepcopy(normed).train()(x), thin(x))
    )
    back = iso.fuse(near)
    assert repr(back) == repr(thin)
    assert deviation(back(x), thin(x)) < 1e-12


class Tapped(nn.Module):
    """A norm that another entry point leaves out, and a layer that changes its input in place."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Conv2d(6, 3, 1)

    def forward_features(self, x):
        return self.conv(x.mul_(2))

    def forward(self, x):
        return self.head(self.norm(self.forward_features(x)))


@torch.no_grad()
def test_values_that_the_example_does_not_tell_apart():
    """One tensor for two inputs; timm's features before the classifier."""
    two = disturb(net(lambda m, x, y: (m.a(x) + m.b(y)).relu(), a=PLAIN, b=PLAIN)())
    x = torch.randn(MAP, dtype=torch.float64)
    assert not fuse_with_report(two, {"x": x, "y": x})[1].merged
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3, global_pool="avg"
    )
    vit = disturb(vit, 0.1)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    new, report = fuse_with_report(vit, x, affine=True)
    assert report.merged
    features = [each.forward_head(each.forward_features(x), pre_logits=True) for each in (vit, new)]
    assert deviation(*features) < 1e-12


HIDDEN = {
    "a number of the source": lambda m, x: m.norm(m.a(x)) + 0.5 * m.other(x),
    "a chain after a sum that stays": lambda m, x: m.b(m.a(x) + m.drop(m.a2(x))),
    "a chain after an adapter that stays": lambda m, x: m.b(m.a(x) + m.drop(m.b2(m.a2(x)))),
    "a bias that is read elsewhere": lambda m, x: m.norm(m.a(x)).relu() + m.a.bias[:, None, None],
    "a number of a parameter": lambda m, x: m.norm(m.a(x)) + m.gate.item() * m.b(x),
    "a number of the batch": lambda m, x: m.norm(m.a(x)) + len(x) * m.b(x),
    "a transposed branch": lambda m, x: m.norm(m.a(x)) + 0.5 * m.turned(x),
    "a module that computes more": lambda m, x: m.doubled(m.a(x)),
}
"""What a gate of 0 hides: merged or not, the model has to be equal when training has opened the gate."""


@pytest.mark.parametrize("name", HIDDEN)
@torch.no_grad()
def test_what_a_gate_of_0_hides(name):
    parts = {part: conv(4, 4, 3, padding=1) for part in ("a", "a2")} | {
        part: conv(4, 4, 1) for part in ("b", "b2")
    }
    parts |= dict(norm=SAME, other=SAME, doubled=lambda: Doubled(4), drop=nn.Dropout)
    parts |= dict(
        turned=conv(4, 4, 3, padding=1, kind=nn.ConvTranspose2d),
        gate=lambda: nn.Parameter(torch.zeros(())),
    )
    model, x = made(net(lambda m, x: x.relu() + m.gate * HIDDEN[name](m, x), **parts), MAP)
    model.gate.zero_()
    new, _ = fuse_with_report(model, x)
    model.gate.fill_(1.0), new.gate.fill_(1.0)
    x = torch.randn(3, 4, 7, 6, dtype=torch.float64)
    assert deviation(new(x), model(x)) < 1e-9


@torch.no_grad()
def test_the_report_says_what_rounding_the_weights_costs():
    model, x = made(in_turn(THREE, norm(), nn.ReLU), MAP)
    new, report = fuse_with_report(model.bfloat16(), x.bfloat16())
    assert report.difference < 1e-12 < 1e-4 < report.rounded < 0.05
    apart = deviation(new.double()(x), model.double()(x))
    assert 0.2 < report.rounded / apart < 5  # on other inputs
    assert "once the weights are rounded" in str(report)


def test_all_entry_points_agree_and_the_input_stays():
    model, x = made(Tapped, MAP)
    before = x.clone()
    new, report = fuse_with_report(model, x)
    assert torch.equal(x, before)
    assert "other methods" in report.left["norm"] or "output of the model" in report.left["norm"]
    assert deviation(new.forward_features(x.clone()), model.forward_features(x.clone())) < 1e-12
