"""Weights between models that join or move channels in another order."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import isomorph as iso
from isomorph.surgery import NotPorted
from same_networks import give_random_weights

# An order of six channels.
MOVED = [3, 1, 0, 5, 2, 4]
BACK = [MOVED.index(i) for i in range(6)]


class Joins(nn.Module):
    """Two layers whose results are joined, one or the other first, and what reads them."""

    def __init__(self, read, deep_first):
        super().__init__()
        self.read = read
        self.deep_first = deep_first
        self.wide = nn.Conv2d(3, 6, 3, padding=1)
        self.deep = nn.Conv2d(6, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(10)
        self.token_norm = nn.LayerNorm(10)
        self.scale = nn.Parameter(torch.ones(10, 1, 1))
        self.slope = nn.PReLU(10)
        self.up = nn.ConvTranspose2d(10, 4, 2, 2)
        self.up_as_wide = nn.ConvTranspose2d(10, 10, 2, 2)
        self.up_wider = nn.ConvTranspose2d(10, 20, 2, 2)
        self.own = nn.Conv2d(10, 10, 1)
        self.depthwise = nn.Conv2d(10, 10, 3, stride=2, groups=10)
        self.squeeze = nn.Conv2d(10, 3, 1)
        self.excite = nn.Conv2d(3, 10, 1)
        self.depthwise_twice = nn.Conv2d(10, 20, 3, stride=2, groups=10)
        self.up_depthwise = nn.ConvTranspose2d(10, 10, 2, 2, groups=10)
        self.of_twice = nn.Conv2d(20, 4, 1)
        self.tokens = nn.Linear(10, 5)
        self.head = nn.Conv2d(10, 4, 1)
        self.last = nn.Conv2d(14, 5, 1)

    def forward(self, x):
        skip = self.wide(x).relu()
        deep = self.deep(F.max_pool2d(skip, 2)).relu()
        deep = F.interpolate(deep, scale_factor=2.0)
        parts = [deep, skip] if self.deep_first else [skip, deep]
        return self.read(self, torch.cat(parts, 1))


def head(model, y):
    return model.head(y).relu().mean((2, 3))


def grown(model, y):
    """What is joined, and a layer of it, joined in turn, as in a DenseNet."""
    grown_by = model.head(model.norm(y).relu())
    parts = [grown_by, y] if model.deep_first else [y, grown_by]
    return model.last(torch.cat(parts, 1).relu()).mean((2, 3))


def gated(model, y):
    """Channels weighted by what two layers make of their means, as in squeeze-and-excitation."""
    gate = model.excite(model.squeeze(y.mean((2, 3), keepdim=True)).relu()).sigmoid()
    return y * gate if model.deep_first else gate * y


def gated_twice(model, y):
    """Channels and positions weighted at once, as in segmentation networks."""
    return gated(model, y) + y * model.head(y).mean(1, keepdim=True).sigmoid()


def scaled(model, y):
    return model.own(y) * model.scale if model.deep_first else model.own(y)


def met(y, own):
    return torch.lerp(own.relu(), own.tanh(), y)


def gated_halves(model, y):
    """Halves of what a depthwise convolution makes, one by the other."""
    one, other = model.depthwise_twice(y).chunk(2, 1)
    return one * other


def one_layer_twice(model, y):
    """Rows that would have to follow two orders."""
    return y + model.own(y) + model.own(y).flip(1)


JOINED = {
    "a layer": head,
    "a norm and an activation": lambda m, y: head(m, m.norm(y).relu()),
    "a join with a layer of it": grown,
    "a depthwise convolution": lambda m, y: head(m, m.norm(m.depthwise(y)).relu()),
    "depthwise and pointwise": lambda m, y: head(m, m.own(m.depthwise(y).relu())),
    "a depthwise convolution that makes twice as many": lambda m, y: m.of_twice(
        m.depthwise_twice(y).relu()
    ).mean((2, 3)),
    "a transposed depthwise convolution": lambda m, y: head(m, m.norm(m.up_depthwise(y)).relu()),
    "pooling": lambda m, y: head(m, F.avg_pool2d(m.norm(y), 2)),
    "a norm of tokens": lambda m, y: m.tokens(m.token_norm(y.flatten(2).mT)).mean(1),
    "the mean": lambda m, y: m.tokens(y.mean((2, 3))),
    "signs": lambda m, y: m.tokens((m.norm(y) > 0).to(y.dtype).mean((2, 3))),
    "softmax over channels": lambda m, y: m.tokens(y.mean((2, 3)).softmax(-1)),
    "a scale": lambda m, y: head(m, (y * m.scale).relu()),
    "slopes": lambda m, y: head(m, m.slope(y)),
    "a transposed convolution": lambda m, y: m.up(y).mean((2, 3)),
    "a sum with a layer of it": lambda m, y: head(m, y + m.own(y)),
    "a block with a norm around which it goes": lambda m, y: head(m, y + m.norm(m.own(y))),
    "weights of channels": lambda m, y: head(m, gated(m, y)),
    "weights of channels after a depthwise convolution": lambda m, y: head(
        m, gated(m, m.depthwise(y))
    ),
    "weights of channels and positions": lambda m, y: head(m, gated_twice(m, y)),
    "a join with what they are added to": lambda m, y: grown(m, y + m.own(gated(m, y))),
    "a sum with a layer and a scale that one model has": lambda m, y: head(m, y + scaled(m, y)),
    "a quotient": lambda m, y: head(m, y / (1 + m.own(y).square())),
    "one that makes as many channels": lambda m, y: m.up_as_wide(y).mean((2, 3)),
    "one that makes twice as many": lambda m, y: m.up_wider(y).mean((2, 3)),
}
# What mixes channels by their order, or would need two orders of one layer.
NOT_FOLLOWED = {
    "one layer that meets itself": lambda m, y: head(m, met(y, m.own(y))),
    "one layer in two orders": lambda m, y: head(m, one_layer_twice(m, y)),
    "sums over channels before it": lambda m, y: m.tokens(y.mean((2, 3)).cumsum(-1)),
}


def pair(make):
    torch.manual_seed(0)
    return give_random_weights(make(True)), make(False).eval()


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", JOINED)
def test_channels_may_be_joined_in_another_order(name, back):
    source, target = pair(lambda first: Joins(JOINED[name], first is not back))
    x = torch.randn(2, 3, 8, 8)
    report = iso.port_weights(source, target, x)
    assert report.difference < 1e-12
    with torch.no_grad():
        torch.testing.assert_close(report.model(x), source(x))
    assert not report.ambiguous


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_cannot_be_followed_is_not_called_equal(name):
    source, target = pair(lambda first: Joins(NOT_FOLLOWED[name], first))
    with pytest.raises(NotPorted, match="NOT equal"):
        iso.port_weights(source, target, torch.randn(2, 3, 8, 8))


def test_halves_of_a_depthwise_convolution_are_compared():
    """Of moved channels its rows have one order, its halves another: the verdict is that of the outputs."""
    source, target = pair(lambda _: Joins(lambda m, y: head(m, gated_halves(m, y)), True))
    images = torch.randn(2, 3, 8, 8)
    assert iso.port_weights(source, target, images, partial=True).difference < 1e-12
    target = Joins(lambda m, y: head(m, gated_halves(m, y)), False)
    report = iso.port_weights(source, target, images, partial=True)
    with torch.no_grad():
        is_equal = torch.allclose(report.model(images), source(images), atol=1e-5)
    assert is_equal == report.equal == ("NOT equal" not in report.verdict)


class Meets(nn.Module):
    """Layers whose outputs meet along other axes than that of channels, of the same size."""

    def __init__(self, meet):
        super().__init__()
        self.meet = meet
        self.one = nn.Conv2d(3, 8, 3, padding=1)
        self.other = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 5)

    def forward(self, x):
        one = self.one(x)
        return self.last(self.meet(one, self.other(one.relu())))


def summed_often(one, other):
    for _ in range(400):
        one = one + 0.01 * one.tanh()
    return one + other


MEETINGS = {
    "columns in another order": lambda one, other: (one.flip(3) + other).relu(),
    "rows in another order": lambda one, other: (one.flip(2) + other).mT,
    "hundreds of sums": summed_often,
}


@pytest.mark.parametrize("name", MEETINGS)
def test_copies_of_a_model_are_equal_whatever_meets(name):
    source, target = pair(lambda _: Meets(MEETINGS[name]))
    assert iso.port_weights(source, target, torch.randn(1, 3, 8, 8)).difference < 1e-12


class Twice(nn.Module):
    """A layer that meets channels in another order after a depthwise convolution of it was looked at."""

    def __init__(self, moved):
        super().__init__()
        self.moved = moved
        self.own = nn.Conv2d(3, 6, 3, padding=1)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.two = nn.Conv2d(6, 2, 1)
        self.four = nn.Conv2d(2, 4, 1)
        self.heads = nn.ModuleList([nn.Conv2d(6, 4, side, padding=side // 2) for side in (1, 3, 5)])

    def forward(self, x):
        y = self.own(x)
        depthwise = self.depthwise(y[:, BACK] if self.moved else y)
        two = self.two(depthwise.tanh())
        joined = torch.cat([two, self.four(two.relu())], 1)
        if self.moved:
            joined = joined[:, MOVED]
        outputs = [(y + joined).relu(), depthwise.relu(), y.relu()]
        return sum(head(output) for head, output in zip(self.heads, outputs, strict=True))


@pytest.mark.parametrize("back", [False, True])
def test_a_depthwise_convolution_follows_the_layer_before_it(back):
    source, target = pair(lambda first: Twice(first is not back))
    assert iso.port_weights(source, target, torch.randn(1, 3, 8, 8)).difference < 1e-12


class Moves(nn.Module):
    """A layer, a norm and a head; channels are in another order from a place on."""

    def __init__(self, place):
        super().__init__()
        self.place = place
        self.layer = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Conv2d(6, 4, 1)

    def at(self, place, y):
        return y[:, MOVED] if place == self.place else y

    def forward(self, x):
        y = self.at("before the norm", self.layer(x))
        y = self.at("after the norm", self.norm(y))
        y = self.at("after the activation", y.relu())
        return self.head(y)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("place", ["before the norm", "after the norm", "after the activation"])
def test_channels_may_be_moved(place, back):
    source, target = pair(lambda first: Moves(place if first is not back else None))
    x = torch.randn(2, 3, 8, 9)  # maps are as wide as the layer has channels, and one wider
    for batch in (x, x[..., :8]):
        report = iso.port_weights(source, target, batch)
        assert report.difference < 1e-12
        with torch.no_grad():
            torch.testing.assert_close(report.model(batch), source(batch))


class Chooses(nn.Module):
    """A model in which the image decides which entries are taken, or a part has no channel."""

    def __init__(self, choose):
        super().__init__()
        self.choose = choose
        self.one = nn.Linear(6, 6)
        self.other = nn.LayerNorm(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.choose(self.one(x), self.other(x)))


CHOSEN = {
    "by a condition": lambda y, z: torch.where(y > 0, y, z),
    "by a mask": lambda y, z: y.masked_fill(z > 0, 0.0),
    "by an order": lambda y, z: torch.cat([y, z], -1).gather(-1, y.argsort(-1)),
    "no channel": lambda y, z: torch.cat([y, z[..., :0]], -1) + z,
}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_the_image_decides_is_computed_and_not_moved(name):
    source, target = pair(lambda _: Chooses(CHOSEN[name]))
    batch = torch.randn(2, 5, 6)
    report = iso.port_weights(source, target, batch)
    assert report.difference < 1e-12
    with torch.no_grad():
        torch.testing.assert_close(report.model(batch), source(batch))
