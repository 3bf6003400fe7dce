"""The gated attention layers against the papers' formulas, in every form and precision."""

import copy
import pickle
import resource
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

import references
from command_line import SERVER
from isomorph.layers import GPSA, PSA, GPSA2d
from isomorph.layers.gated import gpsa2d
from isomorph.layers.gated.positions import attend_by_axis, attend_shared_values, kronecker, mix_positions, mix_weights

GRIDS_2D = [  # height, width, kernel, stride, padding
    (7, 7, 3, 1, 1),
    (5, 8, 3, 2, 1),
    (6, 9, 5, 1, 2),
    (8, 7, 3, 1, 0),
    (9, 9, 5, 2, 1),
    (6, 7, 1, 1, 0),
    (6, 5, 1, 2, 1),
    (11, 4, 3, (2, 1), (1, 2)),
]
FORMS = {"dense": 10**9, "by axis": 0}


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
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)  # float64: rounding of sums of a few hundred terms


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grid", GRIDS_2D, ids=str)
def test_gpsa2d_is_the_papers_formula(grid, form, monkeypatch):
    monkeypatch.setattr(gpsa2d, "MAX_DENSE_PAIRS", FORMS[form])
    H, W, *sizes = grid
    layer = perturbed(GPSA2d(10, 6, *sizes).double())
    x = torch.randn(2, 10, H, W, dtype=torch.float64, requires_grad=True)
    expected = output_and_gradients(lambda x: references.gpsa2d(layer, x), x, layer)
    assert_equal(output_and_gradients(layer, x, layer), expected)


@pytest.mark.parametrize("grid", GRIDS_2D, ids=str)
def test_gpsa2d_attention_is_the_map_of_the_formula(grid):
    H, W, *sizes = grid
    layer = perturbed(GPSA2d(10, 6, *sizes).double())
    x = torch.randn(2, 10, H, W, dtype=torch.float64)
    attention = layer.attention(x)
    torch.testing.assert_close(attention, references.gpsa2d_attention(layer, x), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(attention.sum(-1), torch.ones_like(attention[..., 0]))


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize(("H", "W", "heads"), [(4, 4, 4), (5, 7, 9), (9, 3, 1), (10, 4, 4), (1, 5, 4)])
def test_gpsa_is_the_papers_formula(H, W, heads, prefix):
    layer = perturbed(GPSA(36, heads, (H, W), qkv_bias=heads == 4, prefix_tokens=prefix).double())
    x = torch.randn(2, prefix + H * W, 36, dtype=torch.float64, requires_grad=True)
    expected = output_and_gradients(lambda x: references.gpsa(layer, x, (H, W)), x, layer)
    assert_equal(output_and_gradients(layer, x, layer), expected)


@pytest.mark.parametrize(("H", "W", "heads"), [(3, 3, 4), (2, 5, 9), (4, 2, 1), (1, 4, 4)])
def test_psa_is_the_papers_formula(H, W, heads):
    layer = perturbed(PSA(36, heads, (H, W), qkv_bias=heads == 4).double())
    x = torch.randn(2, H * W, 36, dtype=torch.float64, requires_grad=True)
    expected = output_and_gradients(lambda x: references.psa(layer, x, (H, W)), x, layer)
    assert_equal(output_and_gradients(layer, x, layer), expected)
    values = layer.v(x).unflatten(-1, (heads, -1)).transpose(1, 2)
    by_map = layer.proj((layer.attention(x) @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(by_map, expected[0], rtol=1e-11, atol=1e-12)
    assert layer.no_weight_decay() == {"position"}


def test_psa_is_born_as_gpsa_with_closed_gates():
    """Without content scores the one softmax is that of position."""
    gated, layer, x = GPSA(36, 9, (5, 7)), PSA(36, 9, (5, 7)), torch.randn(1, 35, 36)
    for each in (gated, layer):
        each.reset_attention(locality=2.0)
        each.qk.weight.data.zero_()
    gated.set_gating(gate=50.0)
    torch.testing.assert_close(layer.attention(x), gated.attention(x))
    torch.testing.assert_close(layer.centre, gated.centre)
    torch.testing.assert_close(layer.locality, gated.locality)
    torch.testing.assert_close(layer(x, (7, 5)), layer(x, (7, 5)))
    assert not torch.allclose(layer(x, (7, 5)), layer(x))
    with pytest.raises(ValueError, match="do not fill the 6 x 6 grid"):
        layer(x, (6, 6))
    with pytest.raises(ValueError, match="do not form a square window"):
        PSA(36, 6)


@pytest.mark.parametrize("prefix", [0, 2])
def test_gpsa_attention_gives_the_output_of_forward(prefix):
    layer = perturbed(GPSA(36, 9, (5, 7), prefix_tokens=prefix).double())
    x = torch.randn(2, prefix + 35, 36, dtype=torch.float64)
    values = layer.split_heads(layer.v(x)).transpose(1, 2)
    by_hand = layer.proj((layer.attention(x) @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), by_hand, rtol=1e-11, atol=1e-12)


def test_gpsa_takes_another_grid_at_any_call():
    layer = GPSA(36, 4, (4, 6)).double()
    x = torch.randn(1, 24, 36, dtype=torch.float64)
    torch.testing.assert_close(layer(x, (6, 4)), references.gpsa(layer, x, (6, 4)), rtol=1e-11, atol=1e-12)
    assert not torch.allclose(layer(x, (6, 4)), layer(x))


def test_gpsa_is_born_looking_at_its_window():
    layer = GPSA(36, 9, (5, 5))
    layer.set_gating(locality=30.0, gate=30.0)
    centre_query = layer.attention(torch.randn(1, 25, 36))[0, :, 12]  # (heads, 25)
    assert centre_query.argmax(-1).tolist() == [6, 7, 8, 11, 12, 13, 16, 17, 18]


def test_gpsa_at_locality_1_keeps_the_published_share_on_its_tap():
    layer = GPSA(36, 9, (14, 14))
    layer.set_gating(gate=50.0)
    middle = layer.attention(torch.randn(1, 196, 36))[0, 4, 7 * 14 + 7]
    assert middle.max().item() == pytest.approx(0.318, abs=1e-3)


@pytest.mark.parametrize("prefix", [0, 2])
def test_the_mix_has_both_derivatives(prefix):
    shapes = [(2, prefix + 6, 3, 2), (2, prefix + 6, 3, 2), (3, 2, 2), (3, 3, 3), (3,)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def mix(*inputs):
        return mix_positions(*inputs, mix_weights(inputs[-1]), prefix)

    assert torch.autograd.gradcheck(mix, inputs)
    assert torch.autograd.gradgradcheck(mix, inputs)


def test_the_mix_keeps_nothing_but_its_arguments():
    """What GPSA keeps for the backward pass, in arrays of the size of x: x, q and k, v, content, the mix."""
    layer, x = GPSA(36, 9, (14, 14)), torch.randn(4, 196, 36)
    own, kept = {p.data_ptr() for p in layer.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes() / x.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = layer(x)
    assert held.requires_grad
    assert sum(round(size) for size in kept.values()) == 6


def test_frozen_places_cost_no_gradient_of_theirs():
    layer, x = GPSA(36, 9, (6, 6)), torch.randn(2, 36, 36, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), x)
    layer.position.requires_grad_(False)
    layer.gate.requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(layer(x).square().sum(), x), expected)


def test_axis_forms_agree():
    rows, columns = torch.rand(4, 5, 6).softmax(-1), torch.rand(4, 3, 7).softmax(-1)
    values = torch.randn(2, 42, 4, 8)
    expected = torch.einsum("hqk,bkhd->bqhd", kronecker(rows, columns), values)
    torch.testing.assert_close(attend_by_axis(rows, columns, values), expected)
    shared = torch.randn(2, 42, 8)
    expected = torch.einsum("hqk,bkc->bhqc", kronecker(rows, columns), shared)
    torch.testing.assert_close(attend_shared_values(rows, columns, shared), expected)


def layers_and_inputs():
    tokens = torch.randn(2, 63, 36)
    return [
        (GPSA2d(24, 16, 3, 1, 1), torch.randn(2, 24, 9, 7)),
        (GPSA(36, 9, (9, 7)), tokens),
        (PSA(36, 9, (9, 7)), tokens),
    ]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["GPSA2d", "GPSA", "PSA"])
@pytest.mark.parametrize("form", FORMS)
class TestTorchCitizens:
    @pytest.fixture(autouse=True)
    def prepare(self, which, form, monkeypatch):
        monkeypatch.setattr(gpsa2d, "MAX_DENSE_PAIRS", FORMS[form])
        self.layer, self.x = layers_and_inputs()[which]

    def test_autocast_keeps_geometry_in_float32(self):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layer(self.x)
            maps = self.layer.axis_maps(*((9, 7) if isinstance(self.layer, GPSA2d) else [(9, 7)]))
        assert y.dtype == torch.bfloat16
        assert {m.dtype for m in maps} == {torch.float32}
        y.float().sum().backward()
        assert all(p.grad.isfinite().all() for p in self.layer.parameters())
        expected = self.layer(self.x)
        assert (y - expected).abs().max() < 0.03 * expected.abs().max()  # bfloat16 has 8 bits

    def test_bfloat16_parameters(self):
        y = copy.deepcopy(self.layer).bfloat16()(self.x.bfloat16())
        expected = self.layer(self.x)
        assert y.dtype == torch.bfloat16
        assert (y - expected).abs().max() < 0.03 * expected.abs().max()  # bfloat16 has 8 bits

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # the compiler warns about itself
    def test_compiles_as_one_graph(self):
        compiled = torch.compile(self.layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(self.x), self.layer(self.x))
        compiled(self.x).sum().backward()
        assert all(parameter.grad is not None for parameter in self.layer.parameters())

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # the exporter warns about itself
    def test_exports_with_a_free_batch(self):
        batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
        exported = torch.export.export(self.layer.eval(), (self.x,), dynamic_shapes=batch)
        torch.testing.assert_close(exported.module()(self.x[:1]), self.layer(self.x[:1]))

    def test_copies_pickles_and_builds_on_meta(self):
        for twin in (copy.deepcopy(self.layer), pickle.loads(pickle.dumps(self.layer))):
            assert torch.equal(twin(self.x), self.layer(self.x))
        assert self.layer.to("meta")(self.x.to("meta")).shape[0] == 2

    def test_leaves_nothing_behind_but_parameters(self):
        before = set(vars(self.layer)), list(self.layer.state_dict())
        self.layer(self.x)
        self.layer.attention(self.x)
        assert (set(vars(self.layer)), list(self.layer.state_dict())) == before
        assert not list(self.layer.buffers())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GPSA", "GPSA2d"])
def test_large_grid_runs_in_a_few_hundred_mib(kind):
    """1024 x 1024 at stride 16: 4096 tokens. One map of 4096 x 4096 in float32 is 64 MiB, nine are 576."""
    with ProcessPoolExecutor(1, SERVER) as process:
        assert 0 < process.submit(peak_growth, kind).result() < 500


def peak_growth(kind):
    """MiB that a forward takes in this process."""
    if kind == "GPSA":
        layer, x = GPSA(144, 9, (64, 64)), torch.randn(1, 4096, 144)
    else:
        layer, x = GPSA2d(128, 128, 3, 1, 1), torch.randn(1, 128, 64, 64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.no_grad():
        layer(x)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def test_functional_gradients_and_second_derivatives():
    layer = GPSA2d(6, 4, 3, 1, 1).double()
    x = torch.randn(1, 6, 4, 5, dtype=torch.float64, requires_grad=True)
    parameters = dict(layer.named_parameters())

    def loss(p):
        return torch.func.functional_call(layer, p, (x,)).square().sum()

    loss(parameters).backward()
    for name, gradient in torch.func.grad(loss)(parameters).items():
        torch.testing.assert_close(gradient, parameters[name].grad)
    assert torch.autograd.gradgradcheck(layer, (x,))


def test_wrong_sizes_are_refused_in_words():
    with pytest.raises(ValueError, match="do not form a square window"):
        GPSA(36, 6)
    with pytest.raises(ValueError, match="do not divide"):
        GPSA(36, 16)
    with pytest.raises(ValueError, match="do not fill the 14 x 14 grid"):
        GPSA(36, 9)(torch.randn(1, 195, 36))
    with pytest.raises(ValueError, match="has no centre"):
        GPSA2d(4, 4, 2)
    with pytest.raises(ValueError, match="smaller than the 5-wide window"):
        GPSA2d(4, 4, 5)(torch.randn(1, 4, 4, 9))
    with pytest.raises(ValueError, match="must be above 0"):
        GPSA2d(4, 4, 3).set_gating(locality=0)
