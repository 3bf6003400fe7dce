"""Norms, scales, branches and chains merged into layers: what is merged, what is left and why, in float64."""

import copy
import math
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
    def make():
        return nn.Sequential(*[make_layer() for make_layer in layers])

    return make


def net(compute, **parts):
    def make():
        layers = {name: make_part() for name, make_part in parts.items()}
        return Net(compute, **layers)

    return make


def with_parts(**parts):
    """Decorate what a model computes of its parts and a batch: the name becomes the function that makes the model."""
    return lambda compute: net(compute, **parts)


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


def stored(operation, width=6):
    return lambda: Stored(operation, width)


THREE = conv(4, 6, 3, padding=1, bias=False)
ONE = conv(4, 6, 1)
PLAIN = conv(4, 4, 3, padding=1, bias=False)
SAME = norm(4)
LINEAR = conv(4, 6, kind=nn.Linear)
DOWN = conv(4, 1, kind=nn.Linear)
UP = conv(1, 6, kind=nn.Linear)
NORM = norm()
NORM1D = norm(kind=nn.BatchNorm1d)
GROUPED = conv(4, 6, 3, stride=2, padding=2, dilation=2, groups=2)
TRANSPOSED = conv(4, 6, 3, 2, groups=2, kind=nn.ConvTranspose2d)


@with_parts(fc=LINEAR, norm=NORM1D)
def moved_linear(m, x):
    return m.norm(m.fc(x).transpose(1, 2))


@with_parts(three=PLAIN, one=conv(4, 4, 1), a=SAME, b=SAME, c=SAME)
def three_branches(m, x):
    return m.a(m.three(x)) + m.b(m.one(x)) + m.c(x)


@with_parts(three=PLAIN, one=conv(4, 4, 1, groups=4), norm=SAME)
def branches_then_a_norm(m, x):
    return m.norm(m.three(x) + m.one(x) + x)


@with_parts(a=conv(1, 6, 3, padding=1), norm=NORM)
def input_added_to_all(m, x):
    return m.norm(m.a(x) + x)


@with_parts(a=LINEAR, down=DOWN, up=UP)
def adapter(m, x):
    return m.a(x) + 0.5 * m.up(m.down(x))


@with_parts(a=LINEAR, down=DOWN, up=UP)
def adapter_divided(m, x):
    return m.up(m.down(x)) / 4 + m.a(x)


@with_parts(a=THREE, norm=NORM, down=conv(4, 2, 3, padding=1), up=conv(2, 6, 1))
def adapter_of_a_convolution(m, x):
    return m.up(m.down(x)) + m.norm(m.a(x))


@with_parts(three=THREE, one=ONE, norm=NORM)
def weighted_branch(m, x):
    return 0.3 * m.norm(m.one(x)) + m.three(x)


@with_parts(norm=SAME, a=conv(4, 6, 3, groups=2), b=conv(4, 6, 3))
def before_two_readers(m, x):
    y = m.norm(x)
    return m.a(y) * m.b(y)


MERGED = {
    "conv, grouped, dilated": (in_turn(GROUPED, norm(affine=False)), MAP),
    "conv, transposed, grouped": (in_turn(TRANSPOSED, NORM), MAP),
    "linear": (in_turn(LINEAR, NORM1D), (5, 4)),
    "linear, moved": (moved_linear, TOKENS),
    "frozen norm": (in_turn(THREE, frozen), MAP),
    "layer scale": (in_turn(LINEAR, lambda: LayerScale(6, 0.3)), TOKENS),
    "divided by stored numbers": (in_turn(THREE, stored(operator.truediv)), MAP),
    "less stored numbers": (in_turn(THREE, stored(operator.sub)), MAP),
    "plus stored numbers": (in_turn(THREE, stored(operator.add)), MAP),
    "an input times stored numbers": (in_turn(stored(operator.mul, 4), ONE), MAP),
    "an input less stored numbers": (in_turn(stored(operator.sub, 4), ONE), MAP),
    "norm with activation": (in_turn(THREE, norm(kind=timm.layers.BatchNormAct2d)), MAP),
    "branches": (three_branches, MAP),
    "branches, then a norm": (branches_then_a_norm, MAP),
    "an input of one channel, added to all": (input_added_to_all, (2, 1, 9, 8)),
    "adapter": (adapter, TOKENS),
    "adapter divided": (adapter_divided, TOKENS),
    "adapter of a convolution": (adapter_of_a_convolution, MAP),
    "a weighted branch with a norm": (weighted_branch, MAP),
    "before two readers": (before_two_readers, MAP),
    "chain": (in_turn(conv(4, 8, 3), norm(8), conv(8, 4, 1), norm(4), nn.ReLU), MAP),
    "chain of three": (in_turn(conv(4, 4, 1), SAME, conv(4, 4, 1), conv(4, 4, 1)), MAP),
    "layer norm": (in_turn(norm(4, kind=nn.LayerNorm), LINEAR), TOKENS),
    "RMS norm": (in_turn(norm(4, kind=nn.RMSNorm), LINEAR), TOKENS),
    "group norm": (in_turn(lambda: nn.GroupNorm(2, 4), ONE), MAP),
}
"""A model all of whose norms, scales and branches are one layer, and a batch."""
AFFINE = {"layer norm", "RMS norm", "group norm"}


def doubles(*shape):
    return torch.randn(shape, dtype=torch.float64)


def made(make, shape):
    torch.manual_seed(0)
    model = disturb(make())
    return model, doubles(*shape)


def number_of_parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", MERGED)
@torch.no_grad()
def test_all_that_is_one_layer_is_merged(name):
    model, x = made(*MERGED[name])
    before = copy.deepcopy(model.state_dict())
    options = dict(
        affine=name in AFFINE,
        only_forward=isinstance(model, nn.Sequential),  # no slice of it is taken
    )
    new, report = fuse_with_report(model, x, **options)
    assert report.merged
    assert not report.left
    assert deviation(new(x), model(x)) < 1e-12
    assert report.difference < 1e-12
    layers = []
    for module in new.modules():
        assert not isinstance(module, _BatchNorm | FrozenBatchNorm2d | LayerScale | Stored)
        if getattr(module, "weight", None) is not None:
            assert "Norm" not in type(module).__name__
            layers.append(module)
    assert len(layers) == (2 if name == "before two readers" else 1)
    assert number_of_parameters(new) <= number_of_parameters(model) + 16
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])
    _, again = fuse_with_report(new, x, **options)
    assert not again.merged


def in_turn_with_norms(first, second):
    return nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), second, nn.BatchNorm2d(4))


def tied_weights():
    first, second = PLAIN(), PLAIN()
    second.weight = first.weight
    return in_turn_with_norms(first, second)


def tied_biases():
    first = nn.Conv2d(4, 4, 1)
    second = nn.Conv2d(4, 4, 1)
    second.bias = first.bias
    return in_turn_with_norms(first, second)


@with_parts(conv=ONE, norm=NORM)
def adds_its_bias(m, x):
    return m.norm(m.conv(x)).relu() + m.again[:, None, None]


def bias_read_elsewhere():
    model = adds_its_bias()
    model.again = model.conv.bias
    return model


class Doubled(nn.BatchNorm2d):
    """A norm whose module computes more, which a gate of 0 hides."""

    def forward(self, x):
        return super().forward(x) * 2 - 1


def hooked(where, kind="forward"):
    def make():
        model = in_turn(THREE, NORM)()
        register = getattr(model[where], f"register_{kind}_hook")
        register(lambda *_: None)
        return model

    return make


@with_parts(a=PLAIN, b=PLAIN, norm=SAME)
def shared_norm(m, x):
    y = m.norm(m.a(x)).relu()
    return m.norm(m.b(y))


@with_parts(conv=THREE, norm=NORM)
def in_a_dict(m, x):
    y = m.conv(x)
    return {"a": [y], "b": m.norm(y)}


@with_parts(conv=THREE, norm=NORM)
def in_an_object(m, x):
    y = m.conv(x)
    return SimpleNamespace(of=[y]), m.norm(y)


@with_parts(conv=THREE, norm=NORM)
def branch_on_the_batch(m, x):
    y = m.conv(x)
    return m.norm(y) if len(x) > 1 else y


@with_parts()
def is_large(m, x):
    return bool(x.mean() > -9)


@with_parts(conv=THREE, norm=NORM, choice=is_large)
def decided_below(m, x):
    y = m.conv(x)
    return m.norm(y) if m.choice(x) else y


@with_parts(conv=THREE, norm=NORM)
def pads_odd_sizes(m, x):
    """The padding of a module that reads even sizes alone."""
    y = m.conv(x)
    height, width = y.shape[-2:]
    return m.norm(F.pad(y, (0, width % 2, 0, height % 2)))


@with_parts(conv=THREE, norm=NORM)
def not_called(m, x):
    return m.conv(x)


UNTRACKED = norm(track_running_stats=False)
STANDARDISED = conv(4, 6, 3, kind=timm.layers.StdConv2d)
LEFT = {
    "norm used twice": (shared_norm, "norm", "called more than once"),
    "in a dict": (in_a_dict, "norm", "read elsewhere"),
    "in an object": (in_an_object, "norm", "elsewhere"),
    "tied weights": (tied_weights, "1", "tied"),
    "tied biases": (tied_biases, "4", "bias of 3 is tied"),
    "bias read elsewhere": (bias_read_elsewhere, "norm", "tied"),
    "branch on the batch": (branch_on_the_batch, "norm", "differ"),
    "module that computes more": (in_turn(PLAIN, norm(4, Doubled)), "1", "computes more"),
    "computed weight": (in_turn(STANDARDISED, NORM), "1", "computes its weight"),
    "hook on the layer": (hooked(0), "1", "hooks"),
    "statistics of the batch": (in_turn(THREE, UNTRACKED), "1", "statistics of the batch"),
    "branch on data of a child": (decided_below, "norm", "branches on the numbers"),
    "padding of odd sizes": (pads_odd_sizes, "norm", "other sizes|follows pad"),
    "not called": (not_called, "norm", "no example calls it"),
    "activation between": (in_turn(THREE, nn.ReLU, NORM), "2", "it follows relu; .* output"),
    "before zero padding": (in_turn(SAME, THREE), "0", "1 pads with zeros"),
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
        values = doubles(*size)
        expected = tensors_in(model(values))
        outputs = tensors_in(new(values))
        for one, other in zip(expected, outputs, strict=True):
            assert deviation(one, other) < 1e-12
    assert left in str(report)


@pytest.mark.parametrize("operation", [operator.sub, operator.truediv])
@torch.no_grad()
def test_stored_numbers_that_a_value_is_taken_from_or_divides_stay(operation):
    model, x = made(in_turn(THREE, stored(lambda y, numbers: operation(numbers, y))), MAP)
    new, report = fuse_with_report(model, x)
    assert not report.merged
    assert deviation(new(x), model(x)) < 1e-12


@with_parts(conv=THREE, a=NORM, b=NORM)
def two_paths(m, x, to="a"):
    norm_of_path = getattr(m, to)
    return norm_of_path(m.conv(x))


@torch.no_grad()
def test_every_path_needs_an_example():
    model, x = made(two_paths, MAP)
    with pytest.warns(UserWarning, match="no example calls b"):
        iso.fuse(model, x)
    _, report = fuse_with_report(model, [dict(x=x), dict(x=x, to="b")])
    assert report.left.keys() == {"a", "b"}


@with_parts(conv=THREE, norm=NORM)
def reads_a_list(m, images):
    return m.norm(m.conv(torch.stack(images)))


@torch.no_grad()
def test_a_list_of_images_and_a_copy_in_another_mode():
    """Detectors of torchvision read lists; a copy of its feature extractors is in train mode."""
    model, x = made(reads_a_list, MAP)
    images = list(x.float())
    _, report = fuse_with_report(model.float(), {"images": images})
    assert report.left == {}
    assert report.inputs[0] == "images.0 4x9x8, images.1 4x9x8"

    extractor = timm.create_model(
        "resnet10t", features_only=True, feature_cls="fx", out_indices=(2,)
    )
    disturb(extractor, 0.1)
    images = doubles(2, 3, 32, 32)
    new = iso.fuse(extractor, images)
    for module in new.modules():
        assert not module.training
        assert not isinstance(module, _BatchNorm)
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
    model = disturb(timm.create_model(name, num_classes=3, **options), 0.1)
    return model.float(), torch.randn(2, 3, size, size)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_families_of_timm(name, tmp_path):
    model, x = family(name)
    new, report = fuse_with_report(model, x)
    left = [key for key, module in new.named_modules() if isinstance(module, _BatchNorm)]
    assert sorted(report.left) == sorted(left)
    assert len(left) == READ_BY_MANY.get(name, 0)
    assert report.difference < 1e-12
    by_timm = reparameterize_model(model)
    assert number_of_parameters(new) <= number_of_parameters(by_timm)
    assert report.parameters[1] == number_of_parameters(new)
    assert iso.verify(model, new, x).passed
    path = tmp_path / "thin.safetensors"
    iso.save(new, path)
    loaded = iso.load(path).eval()
    assert torch.equal(loaded(x), new(x))
    _, again = fuse_with_report(new, x)
    assert not again.merged


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


class Inherits(Wrong):
    pass


@pytest.mark.parametrize("kind", [Wrong, NeedsMore, Inherits])
@pytest.mark.parametrize("norms", [True, False])
@torch.no_grad()
def test_methods_of_other_libraries_are_not_called(kind, norms):
    layers, x = made(in_turn(THREE, NORM, nn.ReLU), MAP)
    model = nn.Sequential(kind(*layers), nn.Conv2d(6, 2, 1)).double().eval()
    assert not iso.surgery.fusible_modules(model)
    with_norms = iso.fuse(model, norms=False)
    assert deviation(with_norms(x), model(x)) == 0
    new, report = fuse_with_report(model, x, norms=norms)
    assert list(report.merged) == ["0.1"] * norms
    assert not report.left
    assert deviation(new(x), model(x)) < 1e-12


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("0.weight", math.nan, "0.weight is not finite"),
        ("1.running_mean", math.inf, "outputs are not finite"),
    ],
)
def test_what_is_not_finite_is_an_error(name, value, message):
    model, x = made(in_turn(THREE, NORM), MAP)
    model.state_dict()[name].fill_(value)
    with pytest.raises(iso.UserError, match=message) as caught:
        iso.fuse(model, x)
    assert caught.value.exit_status == 1


class NotFiniteElsewhere(nn.Sequential):
    """Divides by 0 at widths but its own, and in a second way to call it."""

    def forward(self, x, far=False):
        y = super().forward(x)
        if far or x.shape[-1] != MAP[-1]:
            return y / torch.zeros_like(y)
        return y

    def embed(self, x):
        return self(x, far=True)


def test_a_call_that_is_not_finite_in_the_given_model_is_not_compared():
    model, x = made(lambda: NotFiniteElsewhere(THREE(), NORM()), MAP)
    new, report = fuse_with_report(model, x)
    assert list(report.merged) == ["1"]
    assert report.entry_points == ("forward",)
    assert deviation(new(x), model(x)) < 1e-12


@torch.no_grad()
def test_a_fused_network_gets_norms_again_and_keeps_its_function():
    model, _ = made(in_turn(THREE, NORM, nn.ReLU, conv(6, 8, 3), norm(8)), MAP)
    x = 3 * doubles(64, 4, 9, 8) + 1
    thin = iso.fuse(model, x)
    normed = iso.recast(thin, iso.ConvToConvNorm())
    assert deviation(normed(x), thin(x)) < 1e-12

    for batch in (x, x[:1, :, :4, :4]):
        recalibrated = iso.recalibrate(normed, [batch])
        channels = thin[0](batch).movedim(1, -1).flatten(0, -2)
        # the variance is unbiased, as torch's BatchNorm has it
        torch.testing.assert_close(recalibrated[0].norm.running_var, channels.var(0))

    near = iso.recalibrate(normed, [x])
    assert deviation(near(x), thin(x)) < 1e-12
    in_train_mode = copy.deepcopy(near).train()
    assert deviation(in_train_mode(x), thin(x)) < 0.01
    normed.train()
    assert deviation(normed(x), thin(x)) > 0.01

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


@with_parts(a=PLAIN, b=PLAIN)
def two_inputs(m, x, y):
    return (m.a(x) + m.b(y)).relu()


def before_the_classifier(vit, x):
    return vit.forward_head(vit.forward_features(x), pre_logits=True)


@torch.no_grad()
def test_values_that_the_example_does_not_tell_apart():
    """One tensor for two inputs; timm's features before the classifier."""
    two = disturb(two_inputs())
    x = doubles(*MAP)
    _, report = fuse_with_report(two, {"x": x, "y": x})
    assert not report.merged

    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3, global_pool="avg"
    )
    vit = disturb(vit, 0.1)
    x = doubles(2, 3, 32, 32)
    new, report = fuse_with_report(vit, x, affine=True)
    assert report.merged
    assert deviation(before_the_classifier(new, x), before_the_classifier(vit, x)) < 1e-12


def number_of_the_source(m, x):
    return m.norm(m.a(x)) + 0.5 * m.other(x)


def chain_after_a_sum_that_stays(m, x):
    return m.b(m.a(x) + m.drop(m.a2(x)))


def chain_after_an_adapter_that_stays(m, x):
    adapter = m.b2(m.a2(x))
    return m.b(m.a(x) + m.drop(adapter))


def bias_is_read_elsewhere(m, x):
    return m.norm(m.a(x)).relu() + m.a.bias[:, None, None]


def number_of_a_parameter(m, x):
    return m.norm(m.a(x)) + m.gate.item() * m.b(x)


def number_of_the_batch(m, x):
    return m.norm(m.a(x)) + len(x) * m.b(x)


def transposed_branch(m, x):
    return m.norm(m.a(x)) + 0.5 * m.turned(x)


def module_that_computes_more(m, x):
    return m.doubled(m.a(x))


HIDDEN = [
    number_of_the_source,
    chain_after_a_sum_that_stays,
    chain_after_an_adapter_that_stays,
    bias_is_read_elsewhere,
    number_of_a_parameter,
    number_of_the_batch,
    transposed_branch,
    module_that_computes_more,
]
"""What a gate of 0 hides: merged or not, the model has to be equal when training has opened the gate."""
HIDDEN_PARTS = dict(
    a=conv(4, 4, 3, padding=1),
    a2=conv(4, 4, 3, padding=1),
    b=conv(4, 4, 1),
    b2=conv(4, 4, 1),
    norm=SAME,
    other=SAME,
    doubled=norm(4, Doubled),
    drop=nn.Dropout,
    turned=conv(4, 4, 3, padding=1, kind=nn.ConvTranspose2d),
    gate=lambda: nn.Parameter(torch.zeros(())),
)


@pytest.mark.parametrize("hidden", HIDDEN)
@torch.no_grad()
def test_what_a_gate_of_0_hides(hidden):
    @with_parts(**HIDDEN_PARTS)
    def gated(m, x):
        return x.relu() + m.gate * hidden(m, x)

    model, x = made(gated, MAP)
    model.gate.zero_()
    new, _ = fuse_with_report(model, x)
    model.gate.fill_(1.0)
    new.gate.fill_(1.0)
    x = doubles(3, 4, 7, 6)
    assert deviation(new(x), model(x)) < 1e-9


@torch.no_grad()
def test_the_report_says_what_rounding_the_weights_costs():
    model, x = made(in_turn(THREE, NORM, nn.ReLU), MAP)
    new, report = fuse_with_report(model.bfloat16(), x.bfloat16())
    assert report.difference < 1e-12
    assert 1e-4 < report.rounded < 0.05
    apart = deviation(new.double()(x), model.double()(x))
    assert 0.2 < report.rounded / apart < 5  # on other inputs
    assert "once the weights are rounded" in str(report)


def test_all_entry_points_agree_and_the_input_stays():
    model, x = made(Tapped, MAP)
    before = x.clone()
    new, report = fuse_with_report(model, x)
    assert torch.equal(x, before)
    assert re.search("other methods|output of the model", report.left["norm"])
    features = new.forward_features(x.clone())
    assert deviation(features, model.forward_features(x.clone())) < 1e-12
