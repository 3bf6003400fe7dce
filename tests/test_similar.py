"""Gated attention whose heads attend by content to what looks like the position under their tap."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import isomorph as iso
from isomorph.layers import similar_mean as similar_mean_file
from isomorph.layers.prune_heads import closed_heads, prune_heads
from isomorph.layers.similar_gpsa2d import SimilarGPSA2d
from isomorph.layers.similar_mean import similar_mean
from references import position_softmax
from test_gpsa import assert_equal, output_and_gradients, perturbed
from torch_citizens import TorchCitizens

CASES = {  # height, width, channels, out, kernel, stride, padding, groups, window
    "plain": (6, 7, 4, 5, 3, 1, 1, 1, 3),
    "window of one": (4, 5, 3, 4, 3, 1, 1, 1, 1),
    "stride, oblong window": (7, 6, 4, 6, 3, 2, 1, 2, (3, 5)),
    "wide padding": (3, 4, 4, 4, 3, (2, 1), (2, 0), 4, 5),
    "window over the map": (3, 2, 4, 4, 5, 1, 2, 1, 9),
    "one tap": (4, 5, 4, 4, 1, 2, 0, 1, 3),
}


def similar_attention(layer, x):
    """The formula of the class, query by query and key by key, on the padded map. -> (B, nh, Nq, Nk)"""
    (ph, pw), (sh, sw), k = layer.padding, layer.stride, layer.kernel_size
    H, W = x.shape[-2:]
    Hp, Wp = H + 2 * ph, W + 2 * pw
    keys = [(r, c) for r in range(Hp) for c in range(Wp)]
    corners = [(r, c) for r in range(0, Hp - k + 1, sh) for c in range(0, Wp - k + 1, sw)]
    alpha = torch.log(1 + torch.exp(5 * layer.raw_locality)) / 5

    def score(dy, dx):
        delta_1, delta_2 = layer.centre.unbind(1)
        return -alpha * (dy**2 + dx**2 - 2 * delta_1 * dy - 2 * delta_2 * dx)

    position = position_softmax(keys=keys, queries=[(r + k // 2, c + k // 2) for r, c in corners], score=score)
    embedded = torch.einsum("dc,bchw->bhwd", layer.embedding.weight, x)

    def similar(r, c):  # of a position of the padded map
        if not (ph <= r < ph + H and pw <= c < pw + W):
            return F.one_hot(torch.tensor(r * Wp + c), Hp * Wp).to(x.dtype).expand(len(x), -1)
        own, near, scores = embedded[:, r - ph, c - pw], [], []
        for place, (i, j) in enumerate(keys):
            inside = ph <= i < ph + H and pw <= j < pw + W
            if inside and abs(i - r) <= layer.window[0] // 2 and abs(j - c) <= layer.window[1] // 2:
                distance = (own - embedded[:, i - ph, j - pw]).square().sum(1)
                near.append(place)
                scores.append(-torch.exp(layer.log_sharpness) * distance / 2)
        weights = torch.softmax(torch.stack(scores, 1), 1)
        return torch.zeros(len(x), Hp * Wp, dtype=x.dtype).index_add(1, torch.tensor(near), weights)

    maps = []
    for h in range(k * k):
        content = torch.stack([similar(r + h // k, c + h % k) for r, c in corners], 1)
        share = torch.sigmoid(layer.gate[h])
        maps.append((1 - share) * content + share * position[h])
    return torch.stack(maps, 1)


def reference(layer, x):
    """The sum over heads of attention times input times filter."""
    ph, pw = layer.padding
    values = F.pad(x, (pw, pw, ph, ph)).flatten(2)
    columns = torch.einsum("bhqk,bck->bchq", similar_attention(layer, x), values).flatten(1, 2)
    y = F.conv1d(columns, layer.weight.flatten(1)[:, :, None], layer.bias, groups=layer.groups)
    return y.unflatten(-1, layer.query_grid(*x.shape[-2:]))


@pytest.mark.parametrize("case", CASES)
def test_the_layer_is_its_formula(case, monkeypatch):
    H, W, channels, *sizes, groups, window = CASES[case]
    layer = perturbed(SimilarGPSA2d(channels, *sizes, groups=groups, window=window, sharpness=0.7).double())
    x = torch.randn(3, channels, H, W, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(layer.attention(x), similar_attention(layer, x), rtol=1e-11, atol=1e-12)
    expected = output_and_gradients(lambda x: reference(layer, x), x, layer)
    assert_equal(output_and_gradients(layer, x, layer), expected)
    monkeypatch.setattr(similar_mean_file, "MAX_BYTES", 1)  # one image at a time
    assert_equal(output_and_gradients(layer, x, layer), expected)


def test_rows_of_the_map_sum_to_one():
    layer, x = perturbed(SimilarGPSA2d(4, 4, 3, 2, 1)), torch.randn(2, 4, 9, 8)
    maps = layer.attention(x)
    torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))
    assert maps.min() >= 0


def test_a_mean_forgets_noise_and_keeps_edges():
    edge = torch.zeros(1, 1, 16, 16)
    edge[..., 8:] = 1
    noisy = edge + 0.05 * torch.randn(edge.shape, generator=torch.Generator().manual_seed(0))
    mean = similar_mean(noisy, noisy * 50**0.5, (5, 5))
    assert (mean - edge).square().mean() < 0.2 * (noisy - edge).square().mean()
    blurred = F.avg_pool2d(F.pad(noisy, (2,) * 4, mode="replicate"), 5, 1)
    assert (mean - edge).square().mean() < 0.1 * (blurred - edge).square().mean()


@pytest.mark.parametrize("gate", [15.0, 0.0, -15.0])
def test_sharp_content_is_the_convolution_at_every_gate(gate):
    conv, x = nn.Conv2d(4, 6, 3, 2, 1), torch.randn(2, 4, 9, 8)
    layer = iso.ConvToGPSA(content="similar", locality=40.0, gate=gate, sharpness=1e6).build(conv)
    torch.testing.assert_close(layer(x), conv(x), rtol=1e-5, atol=1e-5)


class TestTorchCitizens(TorchCitizens):
    @pytest.fixture(autouse=True)
    def prepare(self):
        self.layer, self.x = perturbed(SimilarGPSA2d(6, 4, 3, 2, 1)), torch.randn(2, 6, 9, 7)

    def test_an_empty_batch(self):
        assert self.layer(self.x[:0]).shape == (0, *self.layer(self.x).shape[1:])


def test_functional_gradients_and_second_derivatives():
    layer = perturbed(SimilarGPSA2d(3, 2, 3, 1, 1, sharpness=0.5).double())
    x = torch.randn(1, 3, 3, 2, dtype=torch.float64, requires_grad=True)
    parameters = dict(layer.named_parameters())

    def loss(p, x):
        return torch.func.functional_call(layer, p, (x,)).square().sum()

    loss(parameters, x).backward()
    for name, gradient in torch.func.grad(loss)(parameters, x).items():
        torch.testing.assert_close(gradient, parameters[name].grad)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, torch.randn(2, 1, 3, 3, 2).double())
    assert each["gate"].shape == (2, 9)
    assert torch.autograd.gradgradcheck(layer, (x,))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler and the exporter warn about themselves
def test_compiles_as_one_graph_and_exports_at_any_size(tmp_path):
    layer, x = perturbed(SimilarGPSA2d(3, 8, 3, 2, 1, window=5)), torch.randn(2, 3, 12, 9)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)
    compiled(x).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    net = nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    assert iso.export(net, tmp_path / "net.onnx", dynamic="batch,size", size=(12, 16)).deviation.passed
    assert iso.export(net, tmp_path / "net.pt2", dynamic="batch,size", size=(12, 16)).deviation.passed


def test_memory_does_not_grow_with_the_window():
    """What the layer keeps for the backward pass, in copies of its input: the input, the mean and the embedding."""
    kept = []
    for window in (3, 9):
        layer = SimilarGPSA2d(16, 16, 3, 1, 1, window=window)
        layer.set_gating(locality=30.0)
        kept.append(iso.evaluation.saved_bytes(layer, (16, 32, 32), 4) / (16 * 32 * 32 * 4))
    assert kept[0] == kept[1] < 4


class SmallNet(nn.Module):
    """A stem with stride, a grouped and a depthwise convolution."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 7, 2, 3, bias=False)
        self.grouped = nn.Conv2d(12, 18, 3, padding=1, groups=3)
        self.depthwise = nn.Conv2d(18, 18, 3, 2, 1, groups=18)

    def forward(self, x):
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x.mean((2, 3))


def test_there_and_back_and_through_a_file(tmp_path):
    cnn, x = SmallNet().eval(), torch.randn(2, 3, 21, 30)
    rule = iso.ConvToGPSA(content="similar", window=5, sharpness=4.0)
    tcnn = iso.recast(cnn, rule)
    assert [type(layer) for layer in tcnn.children()] == [SimilarGPSA2d] * 3
    assert iso.verify(cnn, tcnn, x, atol=2e-5).passed
    assert tcnn.stem.window == (5, 5)
    assert tcnn.stem.sharpness.item() == pytest.approx(4.0)
    assert [type(layer) for layer in iso.revert(tcnn).children()] == [nn.Conv2d] * 3
    assert [type(layer) for layer in iso.prune(tcnn).children()] == [nn.Conv2d] * 3
    maps = iso.attention_maps(tcnn, x)
    assert maps["depthwise"].shape[:2] == (2, 9)
    assert iso.gates(tcnn)["stem"].shape == (49,)
    assert iso.nonlocality(tcnn, x)["stem"].shape == (49,)


def test_fitted_sharpness_is_relative_to_what_a_layer_reads():
    cnn, images, seen = SmallNet().eval(), 3 * torch.randn(4, 3, 32, 32), {}
    tcnn = iso.recast(cnn, iso.ConvToGPSA(content="similar"))
    fitted = iso.fit_sharpness(tcnn, images, 8.0)
    assert tcnn.stem.sharpness.item() == pytest.approx(10)  # fit_sharpness returns a copy
    for name, layer in fitted.named_children():
        layer.register_forward_pre_hook(lambda _, x, name=name: seen.update({name: x[0]}))
    fitted(images)
    for name, x in seen.items():
        expected = 8 / x.var((0, 2, 3), unbiased=False).sum().item()
        assert getattr(fitted, name).sharpness.item() == pytest.approx(expected, rel=1e-4)
    assert fitted.stem.sharpness.item() == pytest.approx(8 / 27, rel=0.1)


def test_fitting_refuses_what_it_cannot_fit():
    tcnn = iso.recast(SmallNet(), iso.ConvToGPSA(content="similar"))
    with pytest.raises(iso.UserError, match="the model has no SimilarGPSA2d"):
        iso.fit_sharpness(SmallNet(), torch.zeros(1, 3, 21, 30))
    with pytest.raises(iso.UserError, match="sharpness 0 must be above 0"):
        iso.fit_sharpness(tcnn, torch.zeros(1, 3, 21, 30), 0)
    with pytest.raises(iso.UserError, match="stem reads the same value everywhere"):
        iso.fit_sharpness(tcnn, torch.zeros(1, 3, 21, 30))


def test_only_closed_layers_are_pruned():
    layer = iso.ConvToGPSA(content="similar", locality=4.0).build(nn.Conv2d(4, 6, 3, padding=1)).double()
    x = torch.randn(2, 4, 6, 7, dtype=torch.float64)
    assert closed_heads(layer, 1e-5) == "p" * 9
    torch.testing.assert_close(prune_heads(layer, "p" * 9)(x), layer(x), rtol=0, atol=1e-5)
    layer.gate.data[4] = 0
    assert closed_heads(layer, 1e-5) == "b" * 9
    with pytest.raises(ValueError, match="share their means"):
        prune_heads(layer, "ppppbpppp")


def test_wrong_values_are_refused_in_words():
    with pytest.raises(ValueError, match="window 4 x 4 has no centre; use odd numbers above 0"):
        SimilarGPSA2d(4, 4, 3, window=4)
    with pytest.raises(ValueError, match="sharpness 0 must be above 0 and finite"):
        SimilarGPSA2d(4, 4, 3, sharpness=0)
    with pytest.raises(iso.UserError, match="sharpness 3 has no effect with content='global'; use 'similar'"):
        iso.ConvToGPSA(sharpness=3)
    with pytest.raises(iso.UserError, match="sharpness -1 must be above 0"):
        iso.ConvToGPSA(content="similar", sharpness=-1)
