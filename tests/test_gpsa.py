"""The gated attention layers against the papers' formulas, in every form and precision."""

import pytest
import torch

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
    return [y, *torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()])]


def assert_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        # float64: rounding of sums of a few hundred terms
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grid", GRIDS_2D, ids=str)
def test_gpsa2d_is_the_papers_formula(grid, form, monkeypatch):
    monkeypatch.setattr(GPSA2d, "max_dense_pairs", FORMS[form])
    H, W, *sizes = grid
    layer = perturbed(GPSA2d(10, 6, *sizes).double())
    x = torch.randn(2, 10, H, W, dtype=torch.float64, requires_grad=True)
    expected = output_and_gradients(lambda x: references.gpsa2d(layer, x), x, layer)
    assert_equal(output_and_gradients(layer, x, layer), expected)
    assert_equal([layer.attention(x)], [references.gpsa2d_attention(layer, x)])


TOKENS = [
    (GPSA, H, W, heads, p)
    for H, W, heads in [(4, 4, 4), (5, 7, 9), (9, 3, 6), (1, 5, 4)]
    for p in (0, 1, 3)
]
TOKENS += [(PSA, H, W, heads, 0) for H, W, heads in [(3, 3, 4), (2, 5, 9), (4, 2, 1), (1, 4, 4)]]


@pytest.mark.parametrize(("kind", "H", "W", "heads", "prefix"), TOKENS)
def test_attention_on_tokens_is_the_papers_formula(kind, H, W, heads, prefix):
    layer = perturbed(kind(36, heads, (H, W), qkv_bias=heads == 4, prefix_tokens=prefix).double())
    x = torch.randn(2, prefix + H * W, 36, dtype=torch.float64, requires_grad=True)
    reference = references.gpsa if kind is GPSA else references.psa
    expected = output_and_gradients(lambda x: reference(layer, x, (H, W)), x, layer)
    assert_equal(output_and_gradients(layer, x, layer), expected)
    values = layer.split_heads(layer.v(x)).transpose(1, 2)
    assert_equal(
        [layer.proj((layer.attention(x) @ values).transpose(1, 2).flatten(2))], expected[:1]
    )


def test_gpsa_at_locality_1_keeps_the_published_share_on_its_tap():
    assert GPSA(5, 5).centre.tolist() == [[0.0, column] for column in (-2.0, -1.0, 0.0, 1.0, 2.0)]
    layer = GPSA(36, 9, (14, 14))
    layer.set_gating(gate=50.0)
    middle = layer.attention(torch.randn(1, 196, 36))[0, 4, 7 * 14 + 7]
    assert middle.max().item() == pytest.approx(0.318, abs=1e-3)


@pytest.mark.parametrize("prefix", [0, 2])
def test_the_mix_has_both_derivatives(prefix):
    shapes = [(2, prefix + 6, 3, 2), (2, prefix + 6, 3, 2), (3, 2, 2), (3, 3, 3), (3,)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def mix(*inputs):
        return MixPositions.apply(*inputs, mix_weights(inputs[-1]), prefix)

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
    layer, x = far_psa(), torch.randn(1, 576, 8, requires_grad=True)
    tiny = torch.finfo(torch.float32).tiny
    attention = layer.attention(x)
    assert ((attention > 0) & (attention < tiny)).any()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        layer(x)
    maps = [tensor for tensor in kept if tensor.shape[-2:] == (576, 576)]
    assert maps
    for tensor in maps:
        assert not ((tensor != 0) & (tensor.abs() < tiny)).any()


def test_psa_without_them_is_the_papers_formula_with_gradients():
    layer, x = far_psa().double(), torch.randn(2, 576, 8).double().requires_grad_()

    def reference(x):
        v = layer.v(x).unflatten(-1, (4, -1)).transpose(1, 2)
        return layer.proj((layer.attention(x) @ v).transpose(1, 2).flatten(2))

    actual = output_and_gradients(layer, x, layer)
    assert_equal(actual, output_and_gradients(reference, x, layer))


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
            assert {each.dtype for each in self.layer.axis_maps(*self.grid)} == {torch.float32}

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # the compiler and the exporter warn about themselves
    def test_compiles_as_one_graph_and_exports_with_a_free_batch(self):
        compiled = torch.compile(self.layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(self.x), self.layer(self.x))
        compiled(self.x).sum().backward()
        for parameter in self.layer.parameters():
            assert parameter.grad is not None
        batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
        exported = torch.export.export(self.layer.eval(), (self.x,), dynamic_shapes=batch)
        torch.testing.assert_close(exported.module()(self.x[:1]), self.layer(self.x[:1]))
