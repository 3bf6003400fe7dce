"""Gated attention in every stage: windows, groups of channels, and positions as one convolution."""

import pytest
import torch
from torch import nn

import isomorph as iso
import references
from isomorph.layers import GPSA2d, PositionalAttention, PositionalConv2d, WindowGPSA2d, modes
from isomorph.layers.gated import tap_heads, taps, window_gpsa2d, window_tiles
from isomorph.surgery.rules import gated
from test_gpsa import assert_equal, assert_is_reference, doubles, perturbed
from torch_citizens import TorchCitizens

CASES = {  # layer, its options, height, width, channels, out, kernel, stride, padding, groups
    "window": (dict(window=5), (7, 9, 10, 6, 3, 1, 1, 1)),
    "groups": (dict(window=5), (5, 7, 10, 6, 3, 1, 0, 2)),
    "few channels": (dict(window=(3, 7)), (6, 7, 4, 6, 3, 2, 1, 1)),
    "one position": (dict(window=1), (4, 6, 6, 4, 3, 1, 2, 2)),
    "the whole map": (dict(window=31), (6, 5, 6, 4, 3, 2, 1, 1)),
}


@pytest.fixture(autouse=True)
def in_tiles(monkeypatch):
    """The maps of these tests are small: without this, windows would be computed as masked maps."""
    monkeypatch.setattr(WindowGPSA2d, "max_dense_pairs", 0)


@pytest.mark.parametrize("form", ["strips", "strips with positions", "tiles", "whole maps"])
@pytest.mark.parametrize("case", CASES)
def test_content_forms_are_the_formula(case, form, monkeypatch):
    monkeypatch.setattr(WindowGPSA2d, "max_dense_pairs", 10**6 if form == "whole maps" else 0)
    monkeypatch.setattr(modes, "CPU_DEVICE", "another" if form == "tiles" else "cpu")
    monkeypatch.setattr(window_tiles, "TILE", 3)
    monkeypatch.setattr(window_gpsa2d, "MAX_ENTRIES", 5000)  # one image at a time
    options, (H, W, channels, *sizes, groups) = CASES[case]
    layer = perturbed(WindowGPSA2d(channels, *sizes, groups=groups, **options).double())
    if form == "strips with positions":  # heads on their taps read nothing else
        layer.centre.data.round_()
        layer.raw_locality.data += 60
        tiles = layer.tiles(H, W, (4, 2))
        positions = layer.tile_positions(tiles, H, W, torch.float64)
        assert (positions is not None) == (case in ("window", "groups"))
    x = doubles(2, channels, H, W)
    maps = references.gpsa2d_attention(layer, x)
    assert_equal([layer.attention(x)], [maps])
    monkeypatch.setattr(references, "gpsa2d_attention", lambda layer, x: maps)  # computed once
    assert_is_reference(layer, references.gpsa2d, x)


@pytest.mark.parametrize("case", CASES)
def test_tiles_pad_a_map_no_further_than_their_keys(case):
    options, (H, W, channels, out, kernel, stride, padding, groups) = CASES[case]
    layer = WindowGPSA2d(channels, out, kernel, stride, padding, groups=groups, **options)
    for tiles, keys in zip(layer.tiles(H, W, (4, 2)), (H, W), strict=True):
        before, after = tiles.pads
        end_of_last_tile = tiles.step * (tiles.number - 1) + tiles.length
        assert before + keys + after == end_of_last_tile


@pytest.mark.parametrize(("channels", "groups"), [(4, 2), (18, 3), (18, 18)])
def test_groups_of_positions_and_of_global_content(channels, groups):
    x = doubles(2, channels, 4, 5)
    for kind, reference in (
        (PositionalConv2d, references.positional_conv),
        (GPSA2d, references.gpsa2d),
    ):
        layer = perturbed(kind(channels, channels, 3, 1, 1, groups=groups).double())
        assert layer.weight.shape == (channels, channels // groups, 3, 3)
        assert_is_reference(layer, reference, x)


@pytest.mark.parametrize(
    "grid",
    [(8, 7, 6, 3, 1, 1, 1), (11, 9, 3, 5, 2, 2, 1), (9, 7, 6, 3, (2, 1), (0, 2), 3)],
    ids=str,
)
@pytest.mark.parametrize("locality", [60.0, 14.0])
def test_positions_as_one_convolution_are_the_formula(grid, locality, monkeypatch):
    monkeypatch.setattr(taps, "BY_HEAD_COST", 10**9)
    folded = []

    def folded_taps(*given):
        result = taps.folded_taps(*given)
        folded.append(result)
        return result

    monkeypatch.setattr(tap_heads, "folded_taps", folded_taps)
    H, W, channels, *sizes, groups = grid
    layer = PositionalConv2d(channels, 6, *sizes, groups=groups).double()
    layer.set_gating(locality=locality)
    layer.centre.data += 0.4 * torch.randn_like(layer.centre)
    layer.raw_locality.data += torch.rand_like(layer.raw_locality)
    assert_is_reference(layer, references.positional_conv, doubles(2, channels, H, W))
    assert folded[0] is not None


def window_of_few_channels():
    return WindowGPSA2d(3, 6, 5, 2, 2)


def depthwise_positions():
    return PositionalConv2d(20, 20, 3, 1, 1, groups=20)


def positions_as_convolution():
    return PositionalConv2d(20, 6, 3, 1, 1)


def positions_as_attention():
    return PositionalAttention(32, 4, (6, 5), prefix_tokens=1)


CITIZENS = {
    "window, few channels": (window_of_few_channels, (2, 3, 12, 9)),
    "positions, depthwise": (depthwise_positions, (2, 20, 10, 9)),
    "positions, convolution": (positions_as_convolution, (2, 20, 6, 5)),
    "positions, attention": (positions_as_attention, (2, 31, 32)),
}


@pytest.mark.parametrize("name", CITIZENS)
class TestTorchCitizens(TorchCitizens):
    @pytest.fixture(autouse=True)
    def prepare(self, name):
        make, shape = CITIZENS[name]
        self.layer = perturbed(make())
        self.x = torch.randn(shape)

    def test_an_empty_batch(self):
        empty = self.layer(self.x[:0])
        assert len(empty) == 0
        assert empty.shape[1:] == self.layer(self.x).shape[1:]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler and the exporter warn about themselves
def test_windows_compile_as_one_graph_and_export_at_any_size(tmp_path):
    strided = WindowGPSA2d(3, 6, 3, 2, 1)
    depthwise = WindowGPSA2d(6, 6, 3, 1, 1, window=3, groups=6)
    layer = perturbed(nn.Sequential(strided, depthwise))
    x = torch.randn(2, 3, 12, 9)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)
    compiled(x).sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None

    window = WindowGPSA2d(3, 2, 1, 1, 0, window=3)
    net = perturbed(nn.Sequential(window, nn.AdaptiveAvgPool2d(1), nn.Flatten())).eval()
    report = iso.export(net, tmp_path / "net.pt2", dynamic="batch,size", size=(12, 16))
    assert report.deviation.passed


@pytest.mark.parametrize("kind", [GPSA2d, WindowGPSA2d])
def test_functional_gradients_and_second_derivatives(kind):
    layer = kind(6, 1, 3, 1, 1).double()
    x = doubles(1, 6, 3, 2)
    parameters = dict(layer.named_parameters())

    def loss(p, x):
        y = torch.func.functional_call(layer, p, (x,))
        return y.square().sum()

    loss(parameters, x).backward()
    gradients_of = torch.func.grad(loss)
    for name, gradient in gradients_of(parameters, x).items():
        torch.testing.assert_close(gradient, parameters[name].grad)
    of_each_image = torch.func.vmap(gradients_of, (None, 0))
    gradients = of_each_image(parameters, torch.randn(2, 1, 6, 3, 2).double())
    assert gradients["gate"].shape == (2, 9)
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_the_rule_takes_windows_from_one_position_on():
    for window in (1, 127):
        rule = iso.ConvToGPSA(content="window", window=window)
        assert rule.window == window
    for window in (-1, 129):
        with pytest.raises(iso.UserError, match="window"):
            iso.ConvToGPSA(content="window", window=window)


def test_windows_keep_no_maps():
    """What a window keeps for the backward pass, in numbers of the input: a map alone would be 9 x 1024 of them."""
    layer = WindowGPSA2d(16, 16, 3, 1, 1)
    kept = {}
    for side in (16, 32):
        saved = iso.evaluation.saved_bytes(layer, (16, side, side), 8)
        kept[side] = saved / (16 * side * side * 4)
    assert kept[32] < 1.2 * kept[16] < 20


@pytest.mark.parametrize("content", gated.CONTENT)
def test_the_attention_of_one_query_is_a_row_of_the_map(content):
    site = iso.surgery.Site(nn.Conv2d(4, 6, 3, stride=2, padding=1))
    layer = perturbed(iso.ConvToGPSA(content=content).build(site).double())
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    whole = layer.attention(x)
    queries = whole.shape[2]
    for query in (0, 7, queries - 1):
        row = layer.attention(x, query=query)
        torch.testing.assert_close(row, whole[:, :, query : query + 1])
    for query in (-1, queries):
        with pytest.raises(ValueError, match=f"query {query} must be from 0 to 19"):
            layer.attention(x, query=query)


@pytest.mark.parametrize(
    ("kind", "groups"), [("PositionalConv2d", 1), ("GPSA2d", 8), ("WindowGPSA2d", 8)]
)
def test_autocast_leaves_float64_as_it_is(kind, groups):
    layer = getattr(iso.layers, kind)(8, 8, 3, padding=1, groups=groups).double()
    x = torch.randn(2, 8, 7, 7, dtype=torch.float64)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x), expected)
