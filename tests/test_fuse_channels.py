"""Norms merged through operations that move, average or select elements; and those through which they are not.

Each model multiplies its outputs by a gate of 0 while it is fused, so that no comparison can tell right from wrong:
what is merged has to follow from the operations alone.
"""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from isomorph.surgery import fuse_with_report
from law_rows import deviation
from test_fuse_norms import MAP, Net, conv, norm

THREE = conv(4, 4, 3, padding=1)
ONE = conv(4, 6, 1)
NORM = norm(4)
NORM1D = norm(4, kind=nn.BatchNorm1d)
LINEAR = conv(4, 6, kind=nn.Linear)
TWELVE = conv(4, 12, 1, bias=False)


def before(compute, head=ONE, **parts):
    """A norm, an operation, and a layer that reads what it gives."""
    return lambda m, x: m.head(compute(m.norm(x))), dict(norm=NORM, head=head) | parts


def after(compute, first=THREE, last=NORM, **parts):
    """A layer, an operation, and the norm of what it gives."""
    return lambda m, x: m.norm(compute(m.first(x))), dict(first=first, norm=last) | parts


def attend(weights, heads=2, parts="chunk"):
    """Attention of a map to itself, and a norm of what it gives, as in a BoTNet."""

    def compute(m, x):
        B, _, H, W = x.shape
        qkv = m.first(x)
        if parts == "chunk":
            q, k, v = qkv.chunk(3, 1)
        else:
            q, k, v = (qkv[:, 4 * i : 4 * i + 4] for i in range(3))
        q = q.reshape(B * heads, 4 // heads, -1)
        k = k.reshape(B * heads, 4 // heads, -1)
        v = v.reshape(B * heads, 4 // heads, -1)
        y = weights(q.mT @ k) @ v.mT
        return m.norm(y.mT.reshape(B, 4, H, W))

    return compute, dict(first=TWELVE, norm=NORM)


def attend_fused(m, x):
    q, k, v = m.first(x).flatten(2).unflatten(1, (3, 2, 2)).unbind(1)
    y = F.scaled_dot_product_attention(q.mT, k.mT, v.mT)
    return m.norm(y.mT.flatten(1, 2).unflatten(2, x.shape[2:]))


class Reshaped(nn.Conv2d):
    """A convolution that computes its weight from the rows of its parameter."""

    def forward(self, x):
        return F.conv2d(
            x, self.weight.flatten(1).reshape(len(self.weight), -1, 3, 3), self.bias, padding=1
        )


TO_LAST = conv(4, 4, kind=nn.Linear)
MERGED = {
    "mean, linear": before(lambda y: y.mean((2, 3)), LINEAR),
    "mean of tokens": before(lambda y: y.flatten(2).mT.mean(1), LINEAR),
    "average pooling": before(lambda y: F.avg_pool2d(y, 3, 2)),
    "average pooling, rounded up": before(lambda y: F.avg_pool2d(y, 2, ceil_mode=True)),
    "average pooling, padding not counted": before(
        lambda y: F.avg_pool2d(y, 3, 2, 1, count_include_pad=False)
    ),
    "adaptive pooling": before(lambda y: F.adaptive_avg_pool2d(y, 2), conv(4, 6, 2)),
    "adaptive pooling, flattened": before(
        lambda y: F.adaptive_avg_pool2d(y, 2).flatten(1), conv(16, 6, kind=nn.Linear)
    ),
    "max pooling": before(lambda y: F.max_pool2d(y, 3, 2, 1)),
    "largest": before(lambda y: y.amax((2, 3)), LINEAR),
    "upsampled": before(lambda y: F.interpolate(y, scale_factor=2, mode="bilinear")),
    "reflected border": before(lambda y: F.pad(y, (1, 1, 1, 1), mode="reflect"), conv(4, 6, 3)),
    "channels rolled": before(lambda y: y.roll(1, 1)),
    "channels turned around": before(lambda y: y.flip(1)),
    "channels shuffled": before(lambda y: F.channel_shuffle(y, 2)),
    "to tokens": before(lambda y: y.flatten(2).mT, LINEAR),
    "patches": before(lambda y: F.pixel_unshuffle(y[..., :8, :8], 2), conv(16, 6, 1)),
    "a part of the channels": before(lambda y: y[:, 1:3], conv(2, 6, 1)),
    "repeated": before(lambda y: y.repeat(1, 2, 1, 1), conv(8, 6, 1)),
    "two readers": (
        lambda m, x: (lambda a, b: m.head(a) + m.other(b.mean((2, 3), keepdim=True)))(
            *m.norm(x).split([1, 3], 1)
        ),
        dict(norm=NORM, head=conv(1, 6, 1), other=conv(3, 6, 1)),
    ),
    "after the mean": after(lambda y: y.mean((2, 3)), last=NORM1D),
    "after average pooling": after(lambda y: F.avg_pool2d(y, 2)),
    "after max pooling": after(lambda y: F.max_pool2d(y, 3, 2, 1)),
    "after upsampling": after(lambda y: F.interpolate(y, scale_factor=2)),
    "after a roll": after(lambda y: y.roll((1, 2), (1, 2))),
    "after pixel shuffle": after(lambda y: F.pixel_shuffle(y, 2), conv(4, 16, 1)),
    "after shuffled channels": after(lambda y: F.channel_shuffle(y, 2)),
    "after a part": after(lambda y: y[:, 2:6], conv(4, 8, 1)),
    "after pairs of channels": after(
        lambda y: y.reshape(len(y), 6, -1, 1), conv(4, 12, 1), norm(6)
    ),
    "after groups on another axis": after(
        lambda y: y.unflatten(1, (2, 4)).flatten(0, 1), conv(4, 8, 1)
    ),
    "linear, then a map": after(lambda y: y.permute(0, 3, 1, 2), TO_LAST, channels_last=True),
    "linear, then a view": after(
        lambda y: y.flatten(1, 2).mT.unflatten(2, (-1, 1)), TO_LAST, channels_last=True
    ),
    "linear, then tokens": after(lambda y: y.flatten(0, 2), TO_LAST, NORM1D, channels_last=True),
    "reshaped weight": after(lambda y: y, lambda: Reshaped(4, 4, 3)),
    "attention": attend(lambda scores: scores.softmax(-1)),
    "attention, by parts": attend(lambda scores: scores.softmax(-1), parts="index"),
    "attention, dropout": attend(lambda scores: F.dropout(scores.softmax(-1), 0.5, training=False)),
    "fused attention": (attend_fused, dict(first=TWELVE, norm=NORM)),
    "difference": (
        lambda m, x: x + m.scale(m.first(x) - m.norm(x)),
        dict(first=THREE, norm=NORM, scale=lambda: timm.layers.LayerScale2d(4, 0.5)),
    ),
    "difference of two layers": (
        lambda m, x: m.norm(m.first(x) - m.other(x)),
        dict(first=THREE, other=conv(4, 4, 1), norm=NORM),
    ),
    "less the source": (
        lambda m, x: m.norm(m.first(x) - x),
        dict(first=THREE, norm=NORM),
    ),
}
"""What a model computes of a map, and its parts: all of its norms are merged."""
POSITIVE = {"max pooling", "largest", "after max pooling"}
"""Rows in which the scales have to be positive."""


def overlapping(m, x):
    y = m.first(x)
    return m.norm(y[:, :4]).mean() + y[:, 2:].mean((1, 2, 3))


def half_of_the_rows(m, x):
    top, rest = m.first(x).split([2, x.shape[2] - 2], 2)
    return m.norm(top).mean((2, 3)) + rest.mean((2, 3))


def fused_dropout(m, x):
    q, k, v = m.first(x).flatten(2).unflatten(1, (3, 2, 2)).unbind(1)
    y = F.scaled_dot_product_attention(q.mT, k.mT, v.mT, dropout_p=0.5)
    return m.norm(y.mT.flatten(1, 2).unflatten(2, x.shape[2:]))


LEFT = {
    "padded average": before(lambda y: F.avg_pool2d(y, 3, 2, 1)),
    "average by another divisor": before(lambda y: F.avg_pool2d(y, 2, divisor_override=3)),
    "sum": before(lambda y: y.sum((2, 3)), LINEAR),
    "zero padding": before(lambda y: F.pad(y, (1, 1)), conv(4, 6, 3)),
    "mean of channels": before(
        lambda y: F.adaptive_avg_pool2d(y.mT.transpose(1, 3), (3, 2)).transpose(1, 3), conv(2, 6, 1)
    ),
    "largest channel": before(lambda y: y.amax(1, keepdim=True), conv(1, 6, 1)),
    "pooled tokens": before(
        lambda y: F.max_pool1d(y.flatten(2).mT, 2, 1), conv(3, 6, kind=nn.Linear)
    ),
    "another reader": (
        lambda m, x: (lambda y: m.head(y) + y.relu().mean())(m.norm(x).mean((2, 3))),
        dict(norm=NORM, head=LINEAR),
    ),
    "negative scale, max pooling": before(lambda y: F.max_pool2d(y, 2)),
    "after max pooling, negative scale": after(lambda y: F.max_pool2d(y, 2)),
    "after a padded average": after(lambda y: F.avg_pool2d(y, 3, 2, 1)),
    "after padding with a number": after(lambda y: F.pad(y, (1, 1), value=1.5)),
    "after zero padding": after(lambda y: F.pad(y, (1, 1))),
    "after sorting": after(lambda y: y.sort(1)[0]),
    "after the sum of channels": after(lambda y: y.cumsum(1)),
    "after softmax": after(lambda y: y.softmax(1)),
    "after mixed channels": after(
        lambda y: F.avg_pool1d(y.flatten(2).mT, 3, 1, 1).mT.unflatten(2, y.shape[2:])
    ),
    "after dropout in any mode": after(lambda y: F.dropout(y, 0.5, training=True)),
    "after a roll by the size": after(lambda y: y.roll(y.shape[-1], 1)),
    "after an order by the values": after(lambda y: y.gather(1, y.argsort(1))),
    "after an index by the values": after(lambda y: y[:, y.mean((0, 2, 3)).argsort()]),
    "after halves of channels": after(
        lambda y: y.reshape(len(y), 8, -1, 1), conv(4, 4, 1), norm(8)
    ),
    "overlapping parts": (overlapping, dict(first=conv(4, 6, 1), norm=NORM)),
    "parts of the rows": (half_of_the_rows, dict(first=conv(4, 4, 1), norm=NORM)),
    "sigmoid attention": attend(torch.sigmoid),
    "attention over queries": attend(lambda scores: (0 * scores).softmax(-2)),
    "attention with dropout": attend(lambda scores: F.dropout(scores.softmax(-1), 0.5)),
    "fused attention with dropout": (fused_dropout, dict(first=TWELVE, norm=NORM)),
    "attention to some keys": attend(lambda scores: scores.softmax(-1) * (scores > 0)),
    "difference of the source": (
        lambda m, x: m.norm(x - m.first(x)).relu(),
        dict(first=THREE, norm=NORM),
    ),
}
"""What a model computes of a map, and its parts: its norm stays."""


def gated(table, name):
    compute, parts = table[name]
    parts = dict(parts)
    channels_last = parts.pop("channels_last", False)

    def run(m, x):
        y = compute(m, x.permute(0, 2, 3, 1) if channels_last else x)
        return x.mean() + m.gate * y

    torch.manual_seed(0)
    made = {part: make() for part, make in parts.items()}
    model = Net(run, **made, gate=nn.Parameter(torch.zeros(()))).double().eval()
    for each in model.modules():
        if isinstance(each, _BatchNorm):
            draw(each, positive=name in POSITIVE)
    return model


@torch.no_grad()
def draw(layer, positive=False):
    """Draw all that a norm has; the scales of both signs, unless positive."""
    layer.weight.uniform_(0.5, 1.5)
    if not positive:
        layer.weight[::2].neg_()
    layer.bias.normal_()
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)


@torch.no_grad()
def opened(model):
    model = copy.deepcopy(model)
    model.gate.fill_(1.0)
    return model


def assert_equal_when_open(model, new, sizes=((2, 4, 9, 8), (3, 4, 8, 11))):
    compared = 0
    for size in sizes:
        x = torch.randn(size, dtype=torch.float64)
        torch.manual_seed(1)
        try:
            y = opened(model)(x)
        except RuntimeError:  # it runs at one size alone
            continue
        torch.manual_seed(1)
        assert deviation(opened(new)(x), y) < 1e-12
        compared += 1
    assert compared


@pytest.mark.parametrize("name", MERGED)
@torch.no_grad()
def test_a_norm_passes_through_what_keeps_channels_apart(name):
    model = gated(MERGED, name)
    new, report = fuse_with_report(model, torch.randn(MAP, dtype=torch.float64))
    assert not report.left
    for module in new.modules():
        assert not isinstance(module, _BatchNorm)
    assert_equal_when_open(model, new)


@pytest.mark.parametrize("name", LEFT)
@torch.no_grad()
def test_a_norm_stays_where_an_operation_mixes_channels_or_drops_a_shift(name):
    model = gated(LEFT, name)
    new, report = fuse_with_report(model, torch.randn(MAP, dtype=torch.float64))
    assert list(report.left) == ["norm"]
    assert_equal_when_open(model, new)
