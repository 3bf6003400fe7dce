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
from test_fuse_norms import MAP, Net, conv, doubles, norm

THREE = conv(4, 4, 3, padding=1)
ONE = conv(4, 6, 1)
NORM = norm(4)
NORM1D = norm(4, kind=nn.BatchNorm1d)
LINEAR = conv(4, 6, kind=nn.Linear)
TWELVE = conv(4, 12, 1, bias=False)

MERGED = {}
"""What a model computes of a map, and its parts: all of its norms are merged."""
LEFT = {}
"""What a model computes of a map, and its parts: its norm stays."""
POSITIVE = {"max_pooling", "largest", "after_max_pooling"}
"""Rows in which the scales have to be positive."""


def model_in(table, **parts):
    """Add to a table a model that computes the decorated function of its parts and a map."""

    def add(compute):
        table[compute.__name__] = compute, parts
        return compute

    return add


def before(table, head=ONE):
    """Add to a table a norm, the decorated operation, and a layer that reads what it gives."""

    def add(operation):
        def compute(m, x):
            y = operation(m.norm(x))
            return m.head(y)

        table[operation.__name__] = compute, dict(norm=NORM, head=head)
        return operation

    return add


def after(table, first=THREE, last=NORM, **parts):
    """Add to a table a layer, the decorated operation, and the norm of what it gives."""

    def add(operation):
        def compute(m, x):
            y = operation(m.first(x))
            return m.norm(y)

        table[operation.__name__] = compute, dict(first=first, norm=last) | parts
        return operation

    return add


def attention_in(table, by_parts=False):
    """Add to a table attention of a map to itself, and a norm of what it gives, as in a BoTNet.

    The decorated function makes weights of the scores. `by_parts`: queries, keys and values are slices, no chunks.
    """
    heads = 2

    def add(weights_of):
        def compute(m, x):
            B, _, H, W = x.shape
            qkv = m.first(x)
            if by_parts:
                q = qkv[:, 0:4]
                k = qkv[:, 4:8]
                v = qkv[:, 8:12]
            else:
                q, k, v = qkv.chunk(3, 1)
            q = q.reshape(B * heads, 4 // heads, -1)
            k = k.reshape(B * heads, 4 // heads, -1)
            v = v.reshape(B * heads, 4 // heads, -1)
            y = weights_of(q.mT @ k) @ v.mT
            return m.norm(y.mT.reshape(B, 4, H, W))

        table[weights_of.__name__] = compute, dict(first=TWELVE, norm=NORM)
        return weights_of

    return add


@before(MERGED, LINEAR)
def mean(y):
    return y.mean((2, 3))


@before(MERGED, LINEAR)
def mean_of_tokens(y):
    return y.flatten(2).mT.mean(1)


@before(MERGED)
def average_pooling(y):
    return F.avg_pool2d(y, 3, 2)


@before(MERGED)
def average_pooling_rounded_up(y):
    return F.avg_pool2d(y, 2, ceil_mode=True)


@before(MERGED)
def average_pooling_padding_not_counted(y):
    return F.avg_pool2d(y, 3, 2, 1, count_include_pad=False)


@before(MERGED, conv(4, 6, 2))
def adaptive_pooling(y):
    return F.adaptive_avg_pool2d(y, 2)


@before(MERGED, conv(16, 6, kind=nn.Linear))
def adaptive_pooling_flattened(y):
    return F.adaptive_avg_pool2d(y, 2).flatten(1)


@before(MERGED)
def max_pooling(y):
    return F.max_pool2d(y, 3, 2, 1)


@before(MERGED, LINEAR)
def largest(y):
    return y.amax((2, 3))


@before(MERGED)
def upsampled(y):
    return F.interpolate(y, scale_factor=2, mode="bilinear")


@before(MERGED, conv(4, 6, 3))
def reflected_border(y):
    return F.pad(y, (1, 1, 1, 1), mode="reflect")


@before(MERGED)
def channels_rolled(y):
    return y.roll(1, 1)


@before(MERGED)
def channels_turned_around(y):
    return y.flip(1)


@before(MERGED)
def channels_shuffled(y):
    return F.channel_shuffle(y, 2)


@before(MERGED, LINEAR)
def to_tokens(y):
    return y.flatten(2).mT


@before(MERGED, conv(16, 6, 1))
def patches(y):
    return F.pixel_unshuffle(y[..., :8, :8], 2)


@before(MERGED, conv(2, 6, 1))
def part_of_the_channels(y):
    return y[:, 1:3]


@before(MERGED, conv(8, 6, 1))
def repeated(y):
    return y.repeat(1, 2, 1, 1)


@model_in(MERGED, norm=NORM, head=conv(1, 6, 1), other=conv(3, 6, 1))
def two_readers(m, x):
    first, rest = m.norm(x).split([1, 3], 1)
    return m.head(first) + m.other(rest.mean((2, 3), keepdim=True))


@after(MERGED, last=NORM1D)
def after_the_mean(y):
    return y.mean((2, 3))


@after(MERGED)
def after_average_pooling(y):
    return F.avg_pool2d(y, 2)


@after(MERGED)
def after_max_pooling(y):
    return F.max_pool2d(y, 3, 2, 1)


@after(MERGED)
def after_upsampling(y):
    return F.interpolate(y, scale_factor=2)


@after(MERGED)
def after_a_roll(y):
    return y.roll((1, 2), (1, 2))


@after(MERGED, conv(4, 16, 1))
def after_pixel_shuffle(y):
    return F.pixel_shuffle(y, 2)


@after(MERGED)
def after_shuffled_channels(y):
    return F.channel_shuffle(y, 2)


@after(MERGED, conv(4, 8, 1))
def after_a_part(y):
    return y[:, 2:6]


@after(MERGED, conv(4, 12, 1), norm(6))
def after_pairs_of_channels(y):
    return y.reshape(len(y), 6, -1, 1)


@after(MERGED, conv(4, 8, 1))
def after_groups_on_another_axis(y):
    return y.unflatten(1, (2, 4)).flatten(0, 1)


TO_LAST = conv(4, 4, kind=nn.Linear)


@after(MERGED, TO_LAST, channels_last=True)
def linear_then_a_map(y):
    return y.permute(0, 3, 1, 2)


@after(MERGED, TO_LAST, channels_last=True)
def linear_then_a_view(y):
    return y.flatten(1, 2).mT.unflatten(2, (-1, 1))


@after(MERGED, TO_LAST, NORM1D, channels_last=True)
def linear_then_tokens(y):
    return y.flatten(0, 2)


class Reshaped(nn.Conv2d):
    """A convolution that computes its weight from the rows of its parameter."""

    def forward(self, x):
        rows = self.weight.flatten(1)
        weight = rows.reshape(len(rows), -1, 3, 3)
        return F.conv2d(x, weight, self.bias, padding=1)


@after(MERGED, conv(4, 4, 3, kind=Reshaped))
def reshaped_weight(y):
    return y


class Turned(nn.Conv2d):
    """A convolution that takes the rows of its parameter from the last to the first."""

    def forward(self, x):
        return F.conv2d(x, self.weight.flip(0), self.bias, padding=1)


@after(LEFT, conv(4, 4, 3, kind=Turned))
def rows_from_last_to_first(y):
    return y


@attention_in(MERGED)
def attention(scores):
    return scores.softmax(-1)


@attention_in(MERGED, by_parts=True)
def attention_by_parts(scores):
    return scores.softmax(-1)


@attention_in(MERGED)
def attention_moved(scores):
    return scores.softmax(-1).mT.contiguous().mT


@attention_in(LEFT)
def attention_squared(scores):
    return scores.softmax(-1).square()


@attention_in(MERGED)
def attention_with_dropout_in_eval_mode(scores):
    return F.dropout(scores.softmax(-1), 0.5, training=False)


def heads_of(qkv):
    """Queries, keys and values. Shape: (B, 12, H, W) -> each (B, 2, N, 2)"""
    q, k, v = qkv.flatten(2).unflatten(1, (3, 2, 2)).unbind(1)
    return q.mT, k.mT, v.mT


@model_in(MERGED, first=TWELVE, norm=NORM)
def fused_attention(m, x):
    y = F.scaled_dot_product_attention(*heads_of(m.first(x)))
    return m.norm(y.mT.flatten(1, 2).unflatten(2, x.shape[2:]))


@model_in(MERGED, first=THREE, norm=NORM, scale=lambda: timm.layers.LayerScale2d(4, 0.5))
def difference(m, x):
    return x + m.scale(m.first(x) - m.norm(x))


@model_in(MERGED, first=THREE, other=conv(4, 4, 1), norm=NORM)
def difference_of_two_layers(m, x):
    return m.norm(m.first(x) - m.other(x))


@model_in(MERGED, first=THREE, norm=NORM)
def less_the_source(m, x):
    return m.norm(m.first(x) - x)


@before(LEFT)
def padded_average(y):
    return F.avg_pool2d(y, 3, 2, 1)


@before(LEFT)
def average_by_another_divisor(y):
    return F.avg_pool2d(y, 2, divisor_override=3)


@before(LEFT, LINEAR)
def sum_of_places(y):
    return y.sum((2, 3))


@before(LEFT, conv(4, 6, 3))
def zero_padding(y):
    return F.pad(y, (1, 1))


@before(LEFT, conv(2, 6, 1))
def mean_of_channels(y):
    channels_last = y.mT.transpose(1, 3)
    return F.adaptive_avg_pool2d(channels_last, (3, 2)).transpose(1, 3)


@before(LEFT, conv(1, 6, 1))
def largest_channel(y):
    return y.amax(1, keepdim=True)


@before(LEFT, conv(3, 6, kind=nn.Linear))
def pooled_tokens(y):
    return F.max_pool1d(y.flatten(2).mT, 2, 1)


@model_in(LEFT, norm=NORM, head=LINEAR)
def another_reader(m, x):
    y = m.norm(x).mean((2, 3))
    return m.head(y) + y.relu().mean()


@before(LEFT)
def negative_scale_and_max_pooling(y):
    return F.max_pool2d(y, 2)


@after(LEFT)
def after_max_pooling_and_negative_scale(y):
    return F.max_pool2d(y, 2)


@after(LEFT)
def after_a_padded_average(y):
    return F.avg_pool2d(y, 3, 2, 1)


@after(LEFT)
def after_padding_with_a_number(y):
    return F.pad(y, (1, 1), value=1.5)


@after(LEFT)
def after_zero_padding(y):
    return F.pad(y, (1, 1))


@after(LEFT)
def after_sorting(y):
    return y.sort(1)[0]


@after(LEFT)
def after_the_sum_of_channels(y):
    return y.cumsum(1)


@after(LEFT)
def after_softmax(y):
    return y.softmax(1)


@after(LEFT)
def after_mixed_channels(y):
    tokens = y.flatten(2).mT
    return F.avg_pool1d(tokens, 3, 1, 1).mT.unflatten(2, y.shape[2:])


@after(LEFT)
def after_dropout_in_any_mode(y):
    return F.dropout(y, 0.5, training=True)


@after(LEFT)
def after_a_roll_by_the_size(y):
    return y.roll(y.shape[-1], 1)


@after(LEFT)
def after_an_order_by_the_values(y):
    return y.gather(1, y.argsort(1))


@after(LEFT)
def after_an_index_by_the_values(y):
    order = y.mean((0, 2, 3)).argsort()
    return y[:, order]


@after(LEFT, conv(4, 4, 1), norm(8))
def after_halves_of_channels(y):
    return y.reshape(len(y), 8, -1, 1)


@model_in(LEFT, first=conv(4, 6, 1), norm=NORM)
def overlapping_parts(m, x):
    y = m.first(x)
    return m.norm(y[:, :4]).mean() + y[:, 2:].mean((1, 2, 3))


@model_in(LEFT, first=conv(4, 4, 1), norm=NORM)
def parts_of_the_rows(m, x):
    top, rest = m.first(x).split([2, x.shape[2] - 2], 2)
    return m.norm(top).mean((2, 3)) + rest.mean((2, 3))


@attention_in(LEFT)
def sigmoid_attention(scores):
    return torch.sigmoid(scores)


@attention_in(LEFT)
def attention_over_queries(scores):
    return (0 * scores).softmax(-2)


@attention_in(LEFT)
def attention_with_dropout(scores):
    return F.dropout(scores.softmax(-1), 0.5)


@model_in(LEFT, first=TWELVE, norm=NORM)
def fused_attention_with_dropout(m, x):
    y = F.scaled_dot_product_attention(*heads_of(m.first(x)), dropout_p=0.5)
    return m.norm(y.mT.flatten(1, 2).unflatten(2, x.shape[2:]))


@attention_in(LEFT)
def attention_to_some_keys(scores):
    return scores.softmax(-1) * (scores > 0)


@model_in(LEFT, first=THREE, norm=NORM)
def difference_of_the_source(m, x):
    return m.norm(x - m.first(x)).relu()


def gated(table, name):
    compute, parts = table[name]
    parts = dict(parts)
    channels_last = parts.pop("channels_last", False)

    def run(m, x):
        given = x
        if channels_last:
            given = x.permute(0, 2, 3, 1)
        return x.mean() + m.gate * compute(m, given)

    torch.manual_seed(0)
    layers = {part: make() for part, make in parts.items()}
    gate = nn.Parameter(torch.zeros(()))
    model = Net(run, **layers, gate=gate).double().eval()
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            draw(layer, positive=name in POSITIVE)
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
        x = doubles(*size)
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
    new, report = fuse_with_report(model, doubles(*MAP))
    assert not report.left
    for module in new.modules():
        assert not isinstance(module, _BatchNorm)
    assert_equal_when_open(model, new)


@pytest.mark.parametrize("name", LEFT)
@torch.no_grad()
def test_a_norm_stays_where_an_operation_mixes_channels_or_drops_a_shift(name):
    model = gated(LEFT, name)
    new, report = fuse_with_report(model, doubles(*MAP))
    assert list(report.left) == ["norm"]
    assert_equal_when_open(model, new)
