"""What one image cannot show of two models: further images, numbers that are 0 on it, what follows the last layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import isomorph as iso
from isomorph.surgery import NotPorted
from refusals import refused
from same_networks import give_random_weights


class Net(nn.Module):
    """Two convolutions, something before them, between them and after them."""

    def __init__(self, before=None, between=None, after=None, **second):
        super().__init__()
        self.before = before or nn.Identity()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.between = between or nn.ReLU()
        self.second = nn.Conv2d(8, 4, 3, **second)
        self.after = after or nn.Identity()

    def forward(self, x):
        return self.after(self.second(self.between(self.first(self.before(x)))))


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def halved_if_large(x):
    return x / 2 if x.max() > 2 else x


def pooled(pool):
    return nn.Sequential(nn.MaxPool2d(8), nn.ReLU(), pool)


# Pairs that are equal on one image of 8 x 8 with numbers from 0 to 1, and not on others.
HIDDEN = {
    "dilation on a small map": lambda: (
        Net(padding=8, dilation=8),
        Net(padding=16, dilation=16),
    ),
    "a pooling of one position": lambda: (
        Net(pooled(nn.AdaptiveAvgPool2d(1)), padding=1),
        Net(pooled(nn.AdaptiveMaxPool2d(1)), padding=1),
    ),
    "a map that is enlarged from one position": lambda: (
        Net(pooled(nn.Upsample(scale_factor=4)), padding=1),
        Net(pooled(nn.Upsample(scale_factor=4, mode="bilinear")), padding=1),
    ),
    "statistics of the batch": lambda: (
        Net(between=nn.InstanceNorm2d(8)),
        Net(between=nn.BatchNorm2d(8, affine=False, track_running_stats=False)),
    ),
    "a bound": lambda: (Net(Call(lambda x: x.clamp(-1.5, 1.5))), Net()),
    "a branch": lambda: (Net(Call(halved_if_large)), Net()),
    "negative numbers": lambda: (Net(nn.ReLU()), Net()),
    "signs": lambda: (Net(), Net(Call(torch.abs))),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_one_image_does_not_show_is_not_called_equal(name):
    source, target = HIDDEN[name]()
    give_random_weights(source)
    images = torch.rand(1, 3, 8, 8)
    report = iso.port_weights(source, target, images, partial=True)
    assert not report.equal
    source, model = source.double(), report.model.double()
    with torch.no_grad():
        torch.testing.assert_close(model(images.double()), source(images.double()))
    with pytest.raises(NotPorted, match="NOT equal"):
        iso.port_weights(source.float(), target, images)


def test_the_setting_that_a_further_image_shows_is_named():
    images = torch.rand(1, 3, 8, 8)
    report = iso.port_weights(*HIDDEN["dilation on a small map"](), images, partial=True)
    assert ("dilation", 8, 16) in [(row.name, row.source, row.target) for row in report.settings]
    assert "on 1x3x8x8 the outputs are equal; this is what" in str(report)
    report = iso.port_weights(*HIDDEN["statistics of the batch"](), images, partial=True)
    assert "two images of another size" in report.verdict
    assert "not on the first image given" in report.verdict
    assert report.as_dict()["further"][0]["difference"] > 0.01


def test_models_of_one_size_are_compared_on_two_images_of_it():
    fixed = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    report = iso.port_weights(give_random_weights(fixed), other, torch.rand(1, 3, 8, 8))
    (row,) = report.further
    assert row.inputs == "two images, 255 times as large and negative, 2x3x8x8"
    assert row.difference < 1e-12
    assert "on two images of another size, 255 times as large and negative:" in str(report)
    assert "the source does not run on" in str(report)


class BySize(nn.Module):
    """A table for images of one size, and as many outputs as there are images."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.tables = {(8, 8): 2.0}

    def forward(self, x):
        return list(self.layer(x * self.tables[tuple(x.shape[-2:])]))

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        pass


def test_errors_on_further_inputs_are_notes():
    report = iso.port_weights(give_random_weights(BySize()), BySize(), torch.rand(1, 3, 8, 8))
    assert report.equal
    assert not report.further
    assert "outputs were compared on the first image alone" in report.notes[-1]


class Tokens(nn.Module):
    """Tokens with a table of positions of which the first are read; a mask by which some are left out."""

    def __init__(self, masked=True, start=0):
        super().__init__()
        self.masked = masked
        self.start = start
        self.tokens = nn.Embedding(50, 6)
        self.positions = nn.Embedding(32, 6)
        self.layer = nn.Linear(6, 4)

    def forward(self, ids, mask):
        places = torch.arange(ids.shape[1]) + self.start
        x = self.tokens(ids) + self.positions(places)
        weights = mask if self.masked else torch.ones_like(mask)
        return self.layer((x * weights[..., None]).mean(1))


IDS = {"ids": torch.arange(16).reshape(2, 8), "mask": torch.ones(2, 8)}


def test_rows_that_the_images_do_not_read_are_carried_or_named():
    source = give_random_weights(Tokens())
    report = iso.port_weights(source, Tokens(), IDS)
    torch.testing.assert_close(report.model.positions.weight, source.positions.weight)
    torch.testing.assert_close(report.model.tokens.weight, source.tokens.weight)
    report = iso.port_weights(source, Tokens(start=2), IDS)
    # 16 rows of 32 are read by twice the tokens
    note = "numbers that no image read, which the target keeps: positions.weight (96 of 192)"
    assert note in report.notes


def test_the_batch_that_is_given_is_compared():
    source = give_random_weights(Tokens())
    assert iso.port_weights(source, Tokens(masked=False), IDS).equal
    padded = {**IDS, "mask": torch.tensor([[1.0] * 8, [1.0] * 4 + [0.0] * 4])}
    report = iso.port_weights(source, Tokens(masked=False), padded, partial=True)
    assert not report.equal


class Ends(nn.Module):
    """A layer, and what is returned of it."""

    def __init__(self, end):
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.end = end

    def forward(self, x):
        return self.end(self.layer(x))


def positive_ones(y):
    positive = y[y > 0]
    return positive.view(len(positive), 1) * torch.ones(1, 3)


OTHER_ENDS = {
    "another token": (lambda y: y[:, 0], lambda y: y[:, -1]),
    "other tokens": (lambda y: y[:, :2], lambda y: y[:, 2:4]),
    "other places of the largest": (
        lambda y: (y, y.argmax(-1)),
        lambda y: (y, y.argmin(-1)),
    ),
    "another frequency": (lambda y: torch.fft.fft(y), lambda y: torch.fft.ifft(y)),
    "shapes by numbers": (positive_ones, positive_ones),
}


@pytest.mark.parametrize("name", OTHER_ENDS)
def test_other_ends_are_not_called_equal(name):
    source = give_random_weights(Ends(OTHER_ENDS[name][0]))
    target = Ends(OTHER_ENDS[name][1])
    with pytest.raises(iso.UserError):
        iso.port_weights(source, target, torch.randn(2, 5, 6))


@pytest.mark.parametrize("name", list(OTHER_ENDS)[:-1])
def test_ends_of_one_kind_are_equal(name):
    source = give_random_weights(Ends(OTHER_ENDS[name][0]))
    target = Ends(OTHER_ENDS[name][0])
    assert iso.port_weights(source, target, torch.randn(2, 5, 6)).equal


class ByName(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.net = Net(between=activation)

    def forward(self, pixel_values):
        return self.net(pixel_values)


def test_images_by_name_get_other_sizes_and_numbers():
    source = give_random_weights(ByName(nn.Hardtanh(-6, 6)))
    inputs = {"pixel_values": torch.rand(1, 3, 8, 8)}
    report = iso.port_weights(source, ByName(nn.Hardtanh(-6, 6)), inputs)
    assert report.further[0].inputs.endswith("pixel_values 2x3x16x24")
    assert not iso.port_weights(source, ByName(nn.Identity()), inputs, partial=True).equal


def test_signals_get_other_lengths():
    def signal(end):
        return nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), Call(end))

    source = give_random_weights(signal(lambda y: y.mean(-1)))
    target = signal(lambda y: y.sum(-1) / 16)
    assert not iso.port_weights(source, target, torch.rand(1, 3, 16), partial=True).equal


def test_a_difference_at_odd_sides_is_a_note():
    source = give_random_weights(Net(between=nn.MaxPool2d(2)))
    target = Net(between=nn.MaxPool2d(2, ceil_mode=True))
    report = iso.port_weights(source, target, torch.rand(1, 3, 8, 8))
    assert report.equal
    assert report.notes[-1].startswith("an image of odd sides, 1x3x17x25: the outputs differ by")


def test_inputs_that_are_no_examples_are_not_cut():
    class Edges(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, edges):
            return self.layer(x)[edges[0]] + x[edges[1]]

    inputs = {"x": torch.rand(6, 4), "edges": torch.tensor([[0, 1, 5], [2, 3, 4]])}
    assert iso.port_weights(give_random_weights(Edges()), Edges(), inputs).equal


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x, time):
        return self.layer(x) * time


def test_numbers_without_an_axis_among_inputs_stay():
    inputs = {"x": torch.rand(2, 3, 8, 8), "time": torch.tensor(2.0)}
    assert iso.port_weights(give_random_weights(Timed()), Timed(), inputs).equal


class Logarithm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, pixels):
        return self.layer(pixels.log())


@pytest.mark.parametrize("by_name", [False, True])
def test_inputs_that_a_model_has_no_numbers_for_are_not_compared(by_name):
    """Negative ones under a logarithm; inputs by name get another number of examples alone."""
    pixels = torch.rand(1, 6) + 0.1
    inputs = {"pixels": pixels} if by_name else pixels
    report = iso.port_weights(give_random_weights(Logarithm()), Logarithm(), inputs)
    (row,) = report.further
    expected = "another number of examples, pixels 2x6" if by_name else "two images, as given, 2x6"
    assert row.inputs == expected


class Dead(nn.Module):
    """A layer whose outputs are 0 after the activation, and what reads them."""

    def __init__(self):
        super().__init__()
        self.dead = nn.Conv2d(3, 1, 3, padding=1)
        self.norm = nn.InstanceNorm2d(1, affine=True)
        self.scale = nn.Parameter(torch.ones(1))
        self.alive = nn.Conv2d(3, 1, 3, padding=1)

    def forward(self, x):
        dead = self.dead(x).relu()
        return self.norm(dead) + dead * self.scale + self.alive(x)


def test_what_is_zero_on_the_image_is_computed_all_the_same():
    source = give_random_weights(Dead())
    with torch.no_grad():
        source.dead.bias.fill_(-100)
    report = iso.port_weights(source, Dead(), torch.randn(1, 3, 8, 8))
    assert not report.left
    assert not report.kept
    for name, tensor in source.state_dict().items():
        torch.testing.assert_close(report.model.state_dict()[name], tensor)


AFTER = {
    "flattened": (None, nn.Flatten(), "target's output = output, in another shape"),
    "transposed": (
        None,
        Call(lambda y: y.mT),
        "target's output = output, with its axes in another order",
    ),
    "a softmax": (
        nn.Softmax(1),
        None,
        "after the last layers: softmax(dim=1) in the source, nothing in the target",
    ),
    "turned round": (
        Call(lambda y: y.flip(3)),
        None,
        "has the numbers of the other's in other places",
    ),
}


@pytest.mark.parametrize("name", AFTER)
def test_a_report_says_what_one_model_does_after_the_last_layer(name):
    after, after_in_target, expected = AFTER[name]
    source = give_random_weights(Net(after=after))
    report = iso.port_weights(source, Net(after=after_in_target), torch.rand(1, 3, 8, 8))
    assert report.equal
    assert expected in str(report)


def test_what_only_the_target_does_after_the_last_layer_is_the_place():
    source = give_random_weights(Net())
    report = iso.port_weights(source, Net(after=nn.Sigmoid()), torch.rand(1, 3, 8, 8), partial=True)
    assert "after the last layers: nothing in the source, sigmoid() in the target" in report.verdict


def test_outputs_of_other_shapes_differ_in_shape():
    source = give_random_weights(nn.Conv2d(3, 8, 8))
    report = iso.port_weights(
        source, nn.Conv2d(3, 8, 8, stride=2), torch.rand(1, 3, 16, 16), partial=True
    )
    assert report.verdict.startswith("NOT equal: the outputs differ in shape")


class Centred(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1))
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.layer(x - self.mean)


def test_buffers_that_the_function_reads_are_carried():
    source = give_random_weights(Centred([0.4, 0.5, 0.6]))
    report = iso.port_weights(source, Centred([0.1, 0.2, 0.3]), torch.randn(1, 3, 8, 8))
    torch.testing.assert_close(report.model.mean, source.mean)
    assert not report.left


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5, dtype=torch.cfloat))

    def forward(self, x):
        return torch.fft.irfft2(torch.fft.rfft2(x) * self.weight)


def test_complex_parameters_are_named_as_not_carried():
    report = iso.port_weights(Filter(), Filter(), torch.randn(1, 3, 8, 8), partial=True)
    assert not report.equal
    assert "complex numbers are not carried: weight" in str(report)


def test_numbers_that_are_not_there_or_not_finite_are_refused():
    images = torch.rand(1, 3, 8, 8)
    refused("the target has no numbers", iso.port_weights, Net(), Net().to("meta"), images)
    broken = Net()
    nn.init.constant_(broken.first.bias, float("nan"))
    refused("first.bias is not finite", iso.port_weights, broken, Net(), images)


def test_an_error_says_which_model_does_not_run():
    narrow = nn.Conv2d(1, 4, 3)
    images = torch.rand(1, 3, 8, 8)
    refused("the target does not run on", iso.port_weights, Net(), narrow, images)
    refused("the source does not run on", iso.port_weights, narrow, Net(), images)


def test_a_product_of_values_that_are_zero_is_computed():
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(6, 6)
            self.other = nn.Linear(6, 6)
            self.last = nn.Linear(6, 2)

        def forward(self, x):
            return self.last(F.relu(self.one(x)) * F.relu(self.other(x)))

    source = give_random_weights(Products())
    with torch.no_grad():
        source.one.bias.fill_(-100)
        source.other.bias.fill_(-100)
    report = iso.port_weights(source, Products(), torch.randn(1, 6))
    assert not report.kept


class Summed(Net):
    """Two convolutions, and a sum as the given kind of output."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output(super().forward(x))


def test_an_output_without_tensors_is_an_error():
    images = torch.rand(1, 3, 8, 8)
    number = Summed(lambda y: y.sum().item())
    refused("the output of the source has no tensors", iso.port_weights, number, Net(), images)
    refused("the output of the target has no tensors", iso.port_weights, Net(), number, images)


def test_numbers_of_the_output_that_are_not_tensors_are_named_as_not_compared():
    def summed():
        return give_random_weights(Summed(lambda y: {"y": y, "sum": y.sum().item()}))

    report = iso.port_weights(summed(), summed(), torch.rand(1, 3, 8, 8))
    assert report.notes == ("values of the output that are not tensors are not compared: sum",)


class Text(nn.Module):
    """Vectors of tokens and of their positions; those from `most` on share the last one's."""

    def __init__(self, most):
        super().__init__()
        self.most = most
        self.tokens = nn.Embedding(20, 8)
        self.positions = nn.Embedding(32, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, ids, mask=None):
        places = torch.arange(ids.shape[1]).clamp(max=self.most)  # an error beyond 32
        x = self.tokens(ids) + self.positions(places)
        if mask is not None:
            x = x * mask[..., None]
        return self.last(x).mean(1)


@pytest.mark.parametrize("named", [False, True])
def test_longer_sequences_are_compared(named):
    ids = torch.arange(20).view(2, 10)
    inputs = {"ids": ids, "mask": torch.ones_like(ids)} if named else ids
    source = give_random_weights(Text(most=40))
    report = iso.port_weights(source, Text(most=40), inputs)
    assert "two sequences with twice the tokens" in report.further[-1].inputs
    other = iso.port_weights(source, Text(most=12), inputs, partial=True)
    assert not other.equal


def test_half_of_the_tokens_is_compared_where_twice_as_many_do_not_fit():
    ids = torch.arange(20)[None]
    source = give_random_weights(Text(most=40))
    report = iso.port_weights(source, Text(most=40), ids)
    assert "two sequences with half the tokens, 2x10" in report.further[-1].inputs
    assert "not compared on two sequences with twice the tokens: " in report.notes[-1]


def test_another_number_of_classes_is_said():
    def classifier(classes):
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
        )

    report = iso.port_weights(classifier(10), classifier(5), torch.rand(1, 3, 8, 8), partial=True)
    assert (
        "NOT equal: the numbers of classes, or of features, differ: 10 in the source, 5 in the target"
        in report.verdict
    )
