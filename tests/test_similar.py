"""Gated attention whose heads attend by content to positions similar to the one under their tap."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import isomorph as iso
from isomorph.layers import similar_mean as similar_mean_file
from isomorph.layers.prune_heads import closed_heads, prune_heads
from isomorph.layers.similar_gpsa2d import SimilarGPSA2d
from isomorph.layers.similar_mean import similar_mean
from references import similar_attention, similar_gpsa2d
from test_gpsa import assert_equal, output_and_gradients, perturbed
from test_gpsa_forms import SmallNet
from torch_citizens import TorchCitizens

CASES = {  # height, width, channels, out, kernel, stride, padding, groups, window
    "plain": (6, 7, 4, 5, 3, 1, 1, 1, 3),
    "window of one": (4, 5, 3, 4, 3, 1, 1, 1, 1),
    "stride, oblong window": (7, 6, 4, 6, 3, 2, 1, 2, (3, 5)),
    "wide padding": (3, 4, 4, 4, 3, (2, 1), (2, 0), 4, 5),
    "window over the map": (3, 2, 4, 4, 5, 1, 2, 1, 9),
    "one tap": (4, 5, 4, 4, 1, 2, 0, 1, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_the_layer_is_its_formula(case, monkeypatch):
    H, W, channels, *sizes, groups, window = CASES[case]
    layer = perturbed(SimilarGPSA2d(channels, *sizes, groups=groups, window=window, sharpness=0.7).double())
    x = torch.randn(3, channels, H, W, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(layer.attention(x), similar_attention(layer, x), rtol=1e-11, atol=1e-12)
    expected = output_and_gradients(lambda x: similar_gpsa2d(layer, x), x, layer)
    assert_equal(output_and_gradients(layer, x, layer), expected)
    monkeypatch.setattr(similar_mean_file, "MAX_NUMBERS", 1)  # one image at a time
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


def test_memory_does_not_grow_with_the_window():
    """What the layer keeps for the backward pass, in copies of its input: the input, the mean and the embedding."""
    kept = []
    for window in (3, 9):
        layer = SimilarGPSA2d(16, 16, 3, 1, 1, window=window)
        layer.set_gating(locality=30.0)
        kept.append(iso.evaluation.saved_bytes(layer, (16, 32, 32), 4) / (16 * 32 * 32 * 4))
    assert kept[0] == kept[1] < 4


def test_there_and_back():
    cnn, x = SmallNet().eval(), torch.randn(2, 3, 21, 30)
    rule = iso.ConvToGPSA(content="similar", window=5, sharpness=4.0)
    tcnn = iso.recast(cnn, rule)
    assert [type(layer) for layer in tcnn.children()] == [SimilarGPSA2d] * 4
    assert iso.verify(cnn, tcnn, x, atol=2e-5).passed
    assert tcnn.stem.window == (5, 5)
    assert tcnn.stem.sharpness.item() == pytest.approx(4.0)
    assert [type(layer) for layer in iso.revert(tcnn).children()] == [nn.Conv2d] * 4
    assert [type(layer) for layer in iso.prune(tcnn).children()] == [nn.Conv2d] * 4
    maps = iso.attention_maps(tcnn, x)
    assert maps["depthwise"].shape[:2] == (2, 9)
    assert iso.gates(tcnn)["stem"].shape == (49,)
    assert iso.nonlocality(tcnn, x)["stem"].shape == (49,)
    stats = iso.analysis.logit_stats(tcnn, x)["grouped"]
    assert stats.entropy.min() >= 0
    assert stats.entropy.max() <= math.log(25) + 1e-6


def test_entropy_is_that_of_the_content_map():
    layer, x = perturbed(SimilarGPSA2d(6, 4, 3, 1, 1, sharpness=0.3)).eval(), torch.randn(2, 6, 5, 7)
    stats = iso.analysis.logit_stats(nn.Sequential(layer), x)["0"]
    with torch.no_grad():
        content = layer.content_attention(x)
    torch.testing.assert_close(stats.entropy, torch.special.entr(content).sum(-1).mean((0, 2)))
    assert (content > 0).sum(-1).max() == 9


def test_fitted_layers_are_saved_with_the_model(tmp_path):
    cnn, images = timm.create_model("cifar_resnet20").eval(), torch.randn(4, 3, 32, 32)
    rule = iso.ConvToGPSA(content="similar", gate=0.0, window=5)
    tcnn = iso.fit_sharpness(iso.recast(cnn, rule, "conv1"), images, 3.0)
    iso.save(tcnn, tmp_path / "tcnn.safetensors")
    again = iso.load(tmp_path / "tcnn.safetensors").eval()
    assert iso.edits(again)[0].rule == rule
    assert torch.equal(again.conv1.sharpness, tcnn.conv1.sharpness)
    assert torch.equal(again(images), tcnn(images))


@pytest.mark.parametrize("gate", [6.0, 0.0])
def test_open_gates_have_no_way_back(gate):
    """Positions of noise are never similar: the comparison must not take the layer for a convolution."""
    net = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1))
    tcnn = iso.recast(net, iso.ConvToGPSA(content="similar", gate=gate))
    with pytest.raises(ValueError, match="is no longer a convolution"):
        tcnn[0].to_conv()
    with pytest.raises(iso.UserError, match="no longer a convolution"):
        iso.revert(tcnn)


def test_low_precision_keeps_the_gradients():
    layer = SimilarGPSA2d(8, 8, 3, 1, 1, window=7, sharpness=2.0)
    layer.set_gating(locality=20.0, gate=0.0)
    x = F.interpolate(torch.randn(2, 8, 4, 4), (24, 24), mode="bilinear") + 0.05 * torch.randn(2, 8, 24, 24)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = layer(x)
        found[dtype] = torch.autograd.grad(y.float().square().mean(), [layer.embedding.weight, layer.log_sharpness])
    for low, full in zip(found[torch.bfloat16], found[torch.float32], strict=True):
        assert (low - full).norm() < 0.05 * full.norm()


def test_frozen_parts_get_no_gradients():
    layer, x = perturbed(SimilarGPSA2d(3, 4, 3, 1, 1)), torch.randn(2, 3, 8, 8)
    layer.embedding.requires_grad_(False)
    layer.log_sharpness.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.embedding.weight.grad is None
    assert layer.gate.grad is not None
    group = {each["name"]: each for each in iso.training.parameter_groups(SimilarGPSA2d(3, 4, 3, 1, 1))}["positions"]
    assert {tuple(p.shape) for p in group["params"]} == {(1,), (9,), (9, 2)}
    assert group["weight_decay"] == 0


def test_a_map_smaller_than_the_window_of_taps_is_rejected():
    with pytest.raises(ValueError, match="use a larger input"):
        SimilarGPSA2d(3, 4, 7)(torch.randn(1, 3, 5, 5))


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


def test_fitting_rejects_what_it_cannot_fit():
    tcnn = iso.recast(SmallNet(), iso.ConvToGPSA(content="similar"))
    with pytest.raises(iso.UserError, match="the model has no SimilarGPSA2d"):
        iso.fit_sharpness(SmallNet(), torch.zeros(1, 3, 21, 30))
    with pytest.raises(iso.UserError, match="sharpness 0 must be above 0"):
        iso.fit_sharpness(tcnn, torch.zeros(1, 3, 21, 30), 0)
    with pytest.raises(iso.UserError, match="stem reads the same value everywhere"):
        iso.fit_sharpness(tcnn, torch.zeros(1, 3, 21, 30))
    with pytest.raises(iso.UserError, match="stem reads NaN or infinite values"):
        iso.fit_sharpness(tcnn, torch.full((1, 3, 21, 30), torch.nan))
    with pytest.raises(iso.UserError, match=r"the fitted sharpness of stem, .* must be from"):
        iso.fit_sharpness(tcnn, 1e-6 * torch.randn(1, 3, 21, 30))
    unused = nn.ModuleDict({"used": SimilarGPSA2d(3, 4, 3), "left": SimilarGPSA2d(3, 4, 3)})
    unused.forward = lambda x: unused["used"](x)
    with pytest.raises(iso.UserError, match="left did not run on these images"):
        iso.fit_sharpness(unused, torch.randn(1, 3, 9, 9))


def test_only_closed_layers_are_pruned():
    layer = iso.ConvToGPSA(content="similar", locality=4.0).build(nn.Conv2d(4, 6, 3, padding=1)).double()
    x = torch.randn(2, 4, 6, 7, dtype=torch.float64)
    assert closed_heads(layer, 1e-5) == "p" * 9
    torch.testing.assert_close(prune_heads(layer, "p" * 9)(x), layer(x), rtol=0, atol=1e-5)
    layer.gate.data[4] = 0
    assert closed_heads(layer, 1e-5) == "b" * 9
    with pytest.raises(ValueError, match="share their means"):
        prune_heads(layer, "ppppbpppp")


def test_wrong_values_are_rejected_in_words():
    with pytest.raises(ValueError, match="window 4 x 4 has no centre; use odd numbers above 0"):
        SimilarGPSA2d(4, 4, 3, window=4)
    with pytest.raises(ValueError, match="sharpness 0 must be above 0 and finite"):
        SimilarGPSA2d(4, 4, 3, sharpness=0)
    with pytest.raises(iso.UserError, match="sharpness 3 has no effect with content='global'; use 'similar'"):
        iso.ConvToGPSA(sharpness=3)
    with pytest.raises(iso.UserError, match="sharpness -1 must be above 0"):
        iso.ConvToGPSA(content="similar", sharpness=-1)


def test_nothing_to_prune_says_which_head_is_open():
    net = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1))
    tcnn = iso.recast(net, iso.ConvToGPSA(content="similar", gate=6.0))
    tcnn[0].gate.data[2] = 1.0
    with pytest.raises(
        iso.UserError, match=r"heads of 0 share their means.*head 2 is 0\.73.*: train on, or .* least 0\.27"
    ):
        iso.prune(tcnn)
    tcnn[0].gate.data[2] = 1.2  # a share of 0.769: 1 - 0.769 is rounded up
    with pytest.raises(iso.UserError, match=r"at least 0\.24$"):
        iso.prune(tcnn)
    assert type(iso.prune(tcnn, 0.24)[0]).__name__ == "Conv2d"
    tcnn[0].set_gating(gate=-15.0)  # all open: no tolerance closes them
    with pytest.raises(iso.UserError, match=r"head 0 is 3\.059e-07: train on$"):
        iso.prune(tcnn)


def test_attention_of_one_position_needs_no_map():
    net = nn.Sequential(nn.Conv2d(3, 4, 7, stride=2, padding=3))
    tcnn = iso.recast(net, iso.ConvToGPSA(content="similar", gate=0.0))
    images = torch.randn(1, 3, 224, 224)
    seen = iso.analysis.attention_from(tcnn, images, (0.0, 0.5))["0"]
    assert seen.shape == (1, 49, 224, 224)
    torch.testing.assert_close(seen[:, 24].sum((1, 2)), torch.ones(1))  # the tap in the middle
    assert seen[:, :21].sum() < 1e-6  # the taps above the image
    with pytest.raises(iso.UserError, match=r"attention maps of 0 .* take 121\.1 GiB .*iso\.analysis\.attention_from"):
        iso.attention_maps(tcnn, images)
    with pytest.raises(iso.UserError, match=r"position \(2, 0\.5\) must be two fractions"):
        iso.analysis.attention_from(tcnn, images, (2, 0.5))


CALLS = [iso.fit_sharpness, iso.attention_maps, iso.analysis.attention_from, lambda net, x: iso.verify(net, net, x)]


@pytest.mark.parametrize("call", CALLS)
def test_a_loader_is_not_a_batch(call):
    tcnn = iso.recast(nn.Sequential(nn.Conv2d(3, 4, 3)), iso.ConvToGPSA(content="similar"))
    with pytest.raises(iso.UserError, match=r"give a batch as the model reads it.*next\(iter\(loader\)\)\[0\]"):
        call(tcnn, [(torch.randn(2, 3, 8, 8), torch.zeros(2))])
