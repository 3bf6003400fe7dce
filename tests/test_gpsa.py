"""The gated attention layers against the papers' formulas, in every form and precision."""

import pytest
import torch
from torch import nn

import references
from isomorph.layers import GPSA, PSA, GPSA2d
from isomorph.layers.gated.positions import MixPositions, mix_weights
from torch_citizens import TorchCitizens

GRIDS_2D = [  # height, width, kernel, stride, padding
    (5, 8, 3, 2, 1),
    (9, 9, 5, 2, 1),
    (6, 5, 1, 2, 1),
    (11, 4, 3, (2, 1), (1, 2)),
]
FORMS = {"dense": 10**9, "without maps": 0}


def perturbed(layer):
    for parameter in layer.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return layer


def output_and_gradients(function, x, layer):
    y = function(x)
    weights = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
    loss = (y * weights).sum()
    return [y, *torch.autograd.grad(loss, [x, *layer.parameters()])]


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        # float64: rounding of sums of a few hundred terms
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def assert_is_reference(layer, reference, x):
    """A layer and its slow form give the same output and gradients. Returns the output."""
    expected = output_and_gradients(lambda x: reference(layer, x), x, layer)
    assert_equal(output_and_gradients(layer, x, layer), expected)
    return expected[0]


def doubles(*shape):
    """Random numbers that a gradient is asked for."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def attend(layer, maps, x):
    """The output of a layer with these maps."""
    values = layer.split_heads(layer.v(x)).transpose(1, 2)
    return layer.proj((maps @ values).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grid", GRIDS_2D, ids=str)
def test_gpsa2d_is_the_papers_formula(grid, form, monkeypatch):
    monkeypatch.setattr(GPSA2d, "max_dense_pairs", FORMS[form])
    H, W, *sizes = grid
    layer = perturbed(GPSA2d(10, 6, *sizes).double())
    x = doubles(2, 10, H, W)
    assert_is_reference(layer, references.gpsa2d, x)
    assert_equal([layer.attention(x)], [references.gpsa2d_attention(layer, x)])


def assert_is_formula_on_tokens(kind, reference, grid, heads, prefix=0):
    H, W = grid
    layer = perturbed(kind(36, heads, grid, qkv_bias=heads == 4, prefix_tokens=prefix).double())
    x = doubles(2, prefix + H * W, 36)
    y = assert_is_reference(layer, lambda layer, x: reference(layer, x, grid), x)
    assert_equal([attend(layer, layer.attention(x), x)], [y])


@pytest.mark.parametrize(
    ("grid", "heads"), [((4, 4), 4), ((5, 7), 9), ((9, 3), 6), ((1, 5), 4)], ids=str
)
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_gpsa_is_the_papers_formula(grid, heads, prefix):
    assert_is_formula_on_tokens(GPSA, references.gpsa, grid, heads, prefix)


@pytest.mark.parametrize(
    ("grid", "heads"), [((3, 3), 4), ((2, 5), 9), ((4, 2), 1), ((1, 4), 4)], ids=str
)
def test_psa_is_the_papers_formula(grid, heads):
    assert_is_formula_on_tokens(PSA, references.psa, grid, heads)


def test_gpsa_at_locality_1_keeps_the_published_share_on_its_tap():
    row = GPSA(5, 5)
    assert row.centre.tolist() == [[0.0, column] for column in (-2.0, -1.0, 0.0, 1.0, 2.0)]
    layer = GPSA(36, 9, (14, 14))
    layer.set_gating(gate=50.0)
    maps = layer.attention(torch.randn(1, 196, 36))
    middle = maps[0, 4, 7 * 14 + 7]
    assert middle.max().item() == pytest.approx(0.318, abs=1e-3)


@pytest.mark.parametrize("prefix", [0, 2])
def test_the_mix_has_both_derivatives(prefix):
    shapes = [(2, prefix + 6, 3, 2), (2, prefix + 6, 3, 2), (3, 2, 2), (3, 3, 3), (3,)]
    inputs = [doubles(*shape) for shape in shapes]

    def mix(*inputs):
        weights = mix_weights(inputs[-1])
        return MixPositions.apply(*inputs, weights, prefix)

    assert torch.autograd.gradcheck(mix, inputs)
    assert torch.autograd.gradgradcheck(mix, inputs)


def test_the_mix_keeps_nothing_but_its_arguments():
    """What GPSA keeps for the backward pass, in arrays of the size of x: x, q and k, v, content, the mix."""
    layer = GPSA(36, 9, (14, 14))
    x = torch.randn(4, 196, 36)
    own = {p.data_ptr() for p in layer.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes() / x.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = layer(x)
    assert held.requires_grad
    assert sum(round(size) for size in kept.values()) == 6


def far_psa():
    """A layer whose positions reach far below the smallest numbers: 24 x 24 tokens, a local start."""
    layer = PSA(8, 4, (24, 24))
    layer.set_gating(locality=3.0)
    return layer


def test_a_step_of_psa_works_with_no_weights_next_to_0():
    """A CPU takes ten times as long to multiply with them."""
    layer = far_psa()
    x = torch.randn(1, 576, 8, requires_grad=True)
    tiny = torch.finfo(torch.float32).tiny

    def has_tiny_numbers(maps):
        return ((maps != 0) & (maps.abs() < tiny)).any()

    assert has_tiny_numbers(layer.attention(x))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        layer(x)
    kept_maps = [tensor for tensor in kept if tensor.shape[-2:] == (576, 576)]
    assert kept_maps
    for maps in kept_maps:
        assert not has_tiny_numbers(maps)


def test_psa_without_them_is_the_papers_formula_with_gradients():
    layer = far_psa().double()
    assert_is_reference(
        layer, lambda layer, x: attend(layer, layer.attention(x), x), doubles(2, 576, 8)
    )


CITIZENS = {
    "GPSA2d": (lambda: GPSA2d(24, 16, 3, 1, 1), (2, 24, 9, 7), (9, 7)),
    "GPSA2d, without maps": (lambda: GPSA2d(24, 16, 3, 1, 1), (2, 24, 9, 7), (9, 7)),
    "GPSA": (lambda: GPSA(36, 9, (9, 7)), (2, 63, 36), ((9, 7),)),
    "PSA": (lambda: PSA(36, 9, (9, 7)), (2, 63, 36), ((9, 7),)),
}


@pytest.mark.parametrize("name", CITIZENS)
class TestTorchCitizens(TorchCitizens):
    @pytest.fixture(autouse=True)
    def prepare(self, name, monkeypatch):
        make, size, self.grid = CITIZENS[name]
        self.layer = make()
        self.x = torch.randn(size)
        if "without" in name:
            monkeypatch.setattr(GPSA2d, "max_dense_pairs", 0)

    def test_autocast_keeps_geometry_in_float32(self):
        with torch.autocast("cpu", torch.bfloat16):
            axis_maps = self.layer.axis_maps(*self.grid)
        for axis_map in axis_maps:
            assert axis_map.dtype == torch.float32

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # the compiler and the exporter warn about themselves
    def test_compiles_as_one_graph_and_exports_with_a_free_batch(self):
        compiled = torch.compile(self.layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(self.x), self.layer(self.x))
        compiled(self.x).sum().backward()
        for parameter in self.layer.parameters():
            assert parameter.grad is not None
        batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
        exported = torch.export.export(self.layer.eval(), (self.x,), dynamic_shapes=batch).module()
        one_image = self.x[:1]
        torch.testing.assert_close(exported(one_image), self.layer(one_image))


def test_psa_in_float16_trains_the_function_that_it_evaluates():
    torch.manual_seed(0)
    layer = PSA(16, 4, (14, 14))
    nn.init.zeros_(layer.qk.weight)
    x = torch.randn(2, 196, 16)
    with torch.autocast("cpu", torch.float16):
        trained = layer(x)
        with torch.no_grad():
            expected = layer(x)
    assert (trained - expected).abs().max() < 2e-3 * expected.abs().max()
