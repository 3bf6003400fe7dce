"""Gated attention in every stage: windows, groups of channels, and positions as one convolution."""

import pytest
import torch
from torch import nn

import isomorph as iso
import references
from isomorph.layers import GPSA2d, PositionalAttention, PositionalConv2d, WindowGPSA2d, modes
from isomorph.layers.gated import tap_heads, taps, window_gpsa2d, window_tiles
from isomorph.surgery.rules import gated
from test_gpsa import assert_equal, output_and_gradients, perturbed
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
        positions = layer.tile_positions(layer.tiles(H, W, (4, 2)), H, W, torch.float64)
        assert (positions is not None) == (case in ("window", "groups"))
    x = torch.randn(2, channels, H, W, dtype=torch.float64, requires_grad=True)
    maps = references.gpsa2d_attention(layer, x)
    assert_equal([layer.attention(x)], [maps])
    monkeypatch.setattr(references, "gpsa2d_attention", lambda layer, x: maps)  # computed once
    expected = output_and_gradients(lambda x: references.gpsa2d(layer, x), x, layer)
    assert_equal(output_and_gradients(layer, x, layer), expected)


@pytest.mark.parametrize("case", CASES)
def test_tiles_pad_a_map_no_further_than_their_keys(case):
    options, (H, W, channels, out, kernel, stride, padding, groups) = CASES[case]
    layer = WindowGPSA2d(channels, out, kernel, stride, padding, groups=groups, **options)
    for tiles, keys in zip(layer.tiles(H, W, (4, 2)), (H, W), strict=True):
        before, after = tiles.pads
        assert before + keys + after == tiles.step * (tiles.number - 1) + tiles.length


@pytest.mark.parametrize(("channels", "groups"), [(4, 2), (18, 3), (18, 18)])
def test_groups_of_positions_and_of_global_content(channels, groups):
    x = torch.randn(2, channels, 4, 5, dtype=torch.float64, requires_grad=True)
    for kind, reference in (
        (PositionalConv2d, references.positional_conv),
        (GPSA2d, references.gpsa2d),
    ):
        layer = perturbed(kind(channels, channels, 3, 1, 1, groups=groups).double())
        assert layer.weight.shape == (channels, channels // groups, 3, 3)
        expected = output_and_gradients(lambda x, layer=layer, by=reference: by(layer, x), x, layer)
        assert_equal(output_and_gradients(layer, x, layer), expected)


@pytest.mark.parametrize(
    "grid",
    [(8, 7, 6, 3, 1, 1, 1), (11, 9, 3, 5, 2, 2, 1), (9, 7, 6, 3, (2, 1), (0, 2), 3)],
    ids=str,
)
@pytest.mark.parametrize("locality", [60.0, 14.0])
def test_positions_as_one_convolution_are_the_formula(grid, locality, monkeypatch):
    monkeypatch.setattr(taps, "BY_HEAD_COST", 10**9)
    folded = []
    monkeypatch.setattr(
        tap_heads,
        "folded_taps",
        lambda *given: folded.append(taps.folded_taps(*given)) or folded[-1],
    )
    H, W, channels, *sizes, groups = grid
    layer = PositionalConv2d(channels, 6, *sizes, groups=groups).double()
    layer.set_gating(locality=locality)
    layer.centre.data += 0.4 * torch.randn_like(layer.centre)
    layer.raw_locality.data += torch.rand_like(layer.raw_locality)
    x = torch.randn(2, channels, H, W, dtype=torch.float64, requires_grad=True)
    expected = output_and_gradients(lambda x: references.positional_conv(layer, x), x, layer)
    assert_equal(output_and_gradients(layer, x, layer), expected)
    assert folded[0] is not None


CITIZENS = {
    "window, few channels": (lambda: WindowGPSA2d(3, 6, 5, 2, 2), (2, 3, 12, 9)),
    "positions, depthwise": (lambda: PositionalConv2d(20, 20, 3, 1, 1, groups=20), (2, 20, 10, 9)),
    "positions, convolution": (lambda: PositionalConv2d(20, 6, 3, 1, 1), (2, 20, 6, 5)),
    "positions, attention": (
        lambda: PositionalAttention(32, 4, (6, 5), prefix_tokens=1),
        (2, 31, 32),
    ),
}


@pytest.mark.parametrize("name", CITIZENS)
class TestTorchCitizens(TorchCitizens):
    @pytest.fixture(autouse=True)
    def prepare(self, name):
        make, shape = CITIZENS[name]
        self.layer = perturbed(make())
        self.x = torch.randn(shape)

    def test_an_empty_batch(self):
        assert self.layer(self.x[:0]).shape == (0, *self.layer(self.x).shape[1:])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler and the exporter warn about themselves
def test_windows_compile_as_one_graph_and_export_at_any_size(tmp_path):
    layer = perturbed(
        nn.Sequential(WindowGPSA2d(3, 6, 3, 2, 1), WindowGPSA2d(6, 6, 3, 1, 1, window=3, groups=6))
    )
    x = torch.randn(2, 3, 12, 9)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)
    compiled(x).sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
    net = perturbed(
        nn.Sequential(WindowGPSA2d(3, 2, 1, 1, 0, window=3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    ).eval()
    assert iso.export(
        net, tmp_path / "net.pt2", dynamic="batch,size", size=(12, 16)
    ).deviation.passed


@pytest.mark.parametrize("kind", [GPSA2d, WindowGPSA2d])
def test_functional_gradients_and_second_derivatives(kind):
    layer = kind(6, 1, 3, 1, 1).double()
    x = torch.randn(1, 6, 3, 2, dtype=torch.float64, requires_grad=True)
    parameters = dict(layer.named_parameters())

    def loss(p, x):
        return torch.func.functional_call(layer, p, (x,)).square().sum()

    loss(parameters, x).backward()
    for name, gradient in torch.func.grad(loss)(parameters, x).items():
        torch.testing.assert_close(gradient, parameters[name].grad)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(
        parameters, torch.randn(2, 1, 6, 3, 2).double()
    )
    assert each["gate"].shape == (2, 9)
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_the_rule_takes_windows_from_one_position_on():
    for window in (1, 127):
        assert iso.ConvToGPSA(content="window", window=window).window == window
    for window in (-1, 129):
        with pytest.raises(iso.UserError, match="window"):
            iso.ConvToGPSA(content="window", window=window)


def test_windows_keep_no_maps():
    """What a window keeps for the backward pass, in numbers of the input: a map alone would be 9 x 1024 of them."""
    layer = WindowGPSA2d(16, 16, 3, 1, 1)
    kept = {}
    for side in (16, 32):
        kept[side] = iso.evaluation.saved_bytes(layer, (16, side, side), 8) / (16 * side * side * 4)
    assert kept[32] < 1.2 * kept[16] < 20


@pytest.mark.parametrize("content", gated.CONTENT)
def test_the_attention_of_one_query_is_a_row_of_the_map(content):
    layer = perturbed(
        iso.ConvToGPSA(content=content)
        .build(iso.surgery.Site(nn.Conv2d(4, 6, 3, stride=2, padding=1)))
        .double()
    )
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    whole = layer.attention(x)
    for query in (0, 7, whole.shape[2] - 1):
        torch.testing.assert_close(layer.attention(x, query=query), whole[:, :, query : query + 1])
    for query in (-1, whole.shape[2]):
        with pytest.raises(ValueError, match=f"query {query} must be from 0 to 19"):
            layer.attention(x, query=query)
