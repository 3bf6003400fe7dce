"""Pruned heads: position-only and content-only attention against the formulas, and models pruned, saved and trained."""

import copy
import json

import pytest
import timm
import torch
from torch import nn

import isomorph as iso
import references
from command_line import isomorph
from isomorph.layers import GPSA, ContentConv2d, GPSA2d, PositionalConv2d, PrunedGPSA, PrunedGPSA2d, ViTGPSA
from isomorph.layers.content_heads import group_rows_by_head
from isomorph.layers.prune_heads import closed_heads, current_heads, prune_heads
from isomorph.surgery.prune import PruneHeads
from test_gpsa import assert_equal, output_and_gradients, perturbed
from torch_citizens import TorchCitizens

GRIDS = [  # height, width, channels, kernel, stride, padding
    (7, 9, 20, 3, 1, 1),
    (7, 4, 18, 5, 2, 2),
    (8, 7, 4, 3, 1, 0),
    (11, 4, 17, 3, (2, 1), (1, 2)),
    (5, 6, 16, 1, 1, 0),
]
MIXED = [60.0, 60.0, 0.3, -60.0, 60.0, 0.1, 60.0, -60.0, 60.0]
"""Gates (logits) of nine heads: closed to content, open to it, and between."""


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_positional_conv_is_the_formula(grid):
    H, W, channels, *sizes = grid
    layer = perturbed(PositionalConv2d(channels, 6, *sizes).double())
    x = torch.randn(2, channels, H, W, dtype=torch.float64, requires_grad=True)
    expected = output_and_gradients(lambda x: references.positional_conv(layer, x), x, layer)
    assert_equal(output_and_gradients(layer, x, layer), expected)


def test_soft_taps_have_second_derivatives():
    layer = perturbed(PositionalConv2d(16, 1, 3, 1, 1).double())
    x = torch.randn(1, 16, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(layer, (x,))


@pytest.mark.parametrize("gates", [MIXED, [60.0] * 9, [-60.0] * 9], ids=["mixed", "closed", "open"])
@pytest.mark.parametrize("grid", [(7, 9, 3, 1, 1), (9, 8, 3, 2, 0), (4, 5, 3, 1, (2, 1))], ids=str)
def test_a_pruned_map_layer_is_the_whole_one(grid, gates):
    H, W, *sizes = grid
    whole = perturbed(GPSA2d(20, 6, *sizes).double())
    whole.gate.data = torch.tensor(gates).double()
    pruned = prune_heads(whole, closed_heads(whole, 1e-6))
    x = torch.randn(2, 20, H, W, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(pruned(x), references.gpsa2d(whole, x), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(pruned.attention(x), references.gpsa2d_attention(whole, x), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(pruned.position_share, whole.position_share)
    expected, actual = (torch.autograd.grad(layer(x).square().sum(), x) for layer in (whole, pruned))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    pruned(x).sum().backward()
    assert all(p.grad is not None for p in pruned.parameters())


@pytest.mark.parametrize("gates", [MIXED, [60.0] * 9, [-60.0] * 9], ids=["mixed", "closed", "open"])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("kind", [GPSA, ViTGPSA])
def test_a_pruned_token_layer_is_the_whole_one(kind, prefix, gates):
    whole = perturbed(kind(36, 9, (5, 7), qkv_bias=prefix == 0, prefix_tokens=prefix).double())
    whole.gate.data = torch.tensor(gates).double()
    if kind is ViTGPSA:
        whole.q_norm, whole.k_norm = nn.LayerNorm(4).double(), nn.LayerNorm(4).double()
    pruned = prune_heads(whole, closed_heads(whole, 1e-6))
    x = torch.randn(2, prefix + 35, 36, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(pruned(x), whole(x), rtol=1e-11, atol=1e-12)
    if kind is ViTGPSA and gates[0] == -60:
        assert type(pruned) is timm.layers.Attention
        return
    torch.testing.assert_close(pruned.attention(x), whole.attention(x), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(pruned.position_share, whole.position_share)
    expected, actual = (torch.autograd.grad(layer(x).square().sum(), x) for layer in (whole, pruned))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert pruned(x, grid_size=(7, 5)).shape == x.shape
    with pytest.raises(ValueError, match="do not fill the 6 x 6 grid"):
        pruned(x, grid_size=(6, 6))


@pytest.mark.parametrize("kind", ["map", "tokens"])
def test_pruning_again_takes_more(kind):
    make = {"map": lambda: GPSA2d(20, 6, 3, 1, 1), "tokens": lambda: GPSA(36, 9, (5, 7), prefix_tokens=1)}
    x = {"map": torch.randn(2, 20, 6, 5), "tokens": torch.randn(2, 36, 36)}[kind].double()
    whole = perturbed(make[kind]().double())
    whole.gate.data = torch.tensor(MIXED).double()
    once = prune_heads(whole, closed_heads(whole, 1e-6))
    assert current_heads(once) == "ppbcpbpcp"
    (once.both if kind == "map" else once).gate.data = torch.tensor([60.0, -60.0]).double()
    whole.gate.data[[2, 5]] = torch.tensor([60.0, -60.0]).double()
    twice = prune_heads(once, closed_heads(once, 1e-6))
    assert current_heads(twice) == "pppcpcpcp"
    torch.testing.assert_close(twice(x), whole(x), rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match="do not fit"):
        prune_heads(twice, "b" * 9)


def test_a_layer_on_its_taps_becomes_the_convolution():
    conv = nn.Conv2d(8, 6, 3, 2, 1)
    layer = iso.ConvToGPSA().build(conv)
    assert closed_heads(layer, 1e-6) == "t" * 9
    torch.testing.assert_close(prune_heads(layer, "t" * 9).weight, conv.weight)
    layer.centre.data[0] = torch.tensor([0.0, 1.0])  # two heads on one tap: still a convolution
    both = prune_heads(layer, closed_heads(layer, 1e-6))
    assert type(both) is nn.Conv2d
    torch.testing.assert_close(both(torch.ones(1, 8, 9, 7)), layer(torch.ones(1, 8, 9, 7)), atol=1e-4, rtol=1e-4)
    layer.centre.data[0] = torch.tensor([0.0, 2.0])  # outside of the window: not one
    assert closed_heads(layer, 1e-6) == "p" * 9
    layer.centre.data[0] = torch.tensor([0.4, 1.0])  # between two pixels
    assert closed_heads(layer, 1e-6) == "p" * 9
    layer.set_gating(locality=3.0)
    layer.centre_on_taps()
    assert closed_heads(layer, 0.1) == "p" * 9
    assert closed_heads(layer, 0.2) == "t" * 9  # 0.82 of the attention at locality 3 is on the tap


CITIZENS = {
    "PositionalConv2d": (lambda: PositionalConv2d(20, 6, 3, 1, 1), (2, 20, 6, 5)),
    "few channels": (lambda: PositionalConv2d(3, 6, 5, 2, 2), (2, 3, 9, 8)),
    "ContentConv2d": (lambda: ContentConv2d(20, 6, 3, 1, 1), (2, 20, 6, 5)),
    "PrunedGPSA2d": (lambda: PrunedGPSA2d("ppbcpbpcp", 20, 6, 3, 1, 1), (2, 20, 6, 5)),
    "PrunedGPSA": (lambda: PrunedGPSA("ppbc", 32, (6, 5), prefix_tokens=1), (2, 31, 32)),
}


@pytest.mark.parametrize("name", CITIZENS)
class TestTorchCitizens(TorchCitizens):
    @pytest.fixture(autouse=True)
    def prepare(self, name):
        make, shape = CITIZENS[name]
        self.layer, self.x = perturbed(make()), torch.randn(shape)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")  # the compiler and the exporter warn about themselves
    def test_compiles_and_exports(self, name):
        if name not in ("PrunedGPSA2d", "PrunedGPSA"):
            pytest.skip("part of PrunedGPSA2d")
        compiled = torch.compile(self.layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(self.x), self.layer(self.x))
        batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
        exported = torch.export.export(self.layer.eval(), (self.x,), dynamic_shapes=batch)
        torch.testing.assert_close(exported.module()(self.x[:1]), self.layer(self.x[:1]))


def test_soft_taps_keep_the_input_only():
    """What a convolution keeps for its backward pass, in arrays of the size of x: x, here in another layout."""
    layer, x = PositionalConv2d(32, 32, 3, 1, 1), torch.randn(8, 32, 12, 12)
    own, kept = {p.untyped_storage().data_ptr() for p in layer.parameters()}, {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() / x.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = layer(x)
    assert held.requires_grad
    assert sum(kept.values()) < 1.3  # and the axis maps, which do not grow with the batch


def small_tcnn(gates=MIXED, locality=5.0):
    cnn = timm.create_model("cifar_resnet20").eval()
    tcnn = iso.recast(cnn, iso.ConvToGPSA(locality=locality), "layer3.0.conv?")
    for layer in (tcnn.layer3[0].conv1, tcnn.layer3[0].conv2):
        layer.gate.data = torch.tensor(gates)
    return tcnn


def small_convit():
    vit = timm.create_model("convit_ti", img_size=32, patch_size=8, depth=2, local_up_to_layer=1).eval()
    vit.blocks[0].attn.gate.data = torch.tensor([9.0, 9.0, 0.0, -9.0])
    return vit


def small_vit():
    vit = timm.create_model("deit_tiny_patch16_224", img_size=32, depth=2, num_classes=10).eval()
    vit = iso.recast(vit, iso.AttentionToGPSA(locality=1.0, gate=0.0), "blocks.*.attn")
    vit.blocks[0].attn.gate.data = torch.tensor([9.0, 0.0, -9.0])
    vit.blocks[1].attn.gate.data = torch.tensor([-9.0, -9.0, -9.0])
    return vit


MODELS = {
    "T-CNN": (small_tcnn, {"layer3.0.conv1": "PrunedGPSA2d", "layer3.0.conv2": "PrunedGPSA2d"}),
    "closed T-CNN": (lambda: small_tcnn([9.0] * 9), {"layer3.0.conv2": "PositionalConv2d"}),
    "T-CNN on its taps": (lambda: small_tcnn([9.0] * 9, 20.0), {"layer3.0.conv1": "Conv2d"}),
    "model with its own edits": (
        lambda: timm.create_model("t_cifar_resnet20", init="exact"),
        {"layer3.1.conv1": "Conv2d"},
    ),
    "ConViT": (small_convit, {"blocks.0.attn": "PrunedGPSA"}),
    "ViT": (small_vit, {"blocks.0.attn": "PrunedViTGPSA", "blocks.1.attn": "Attention"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_pruned_model_is_an_ordinary_model(name, tmp_path):
    make, expected = MODELS[name]
    model, images = make(), torch.randn(2, 3, 32, 32)
    before = copy.deepcopy(model.state_dict())
    pruned = iso.prune(model)
    assert iso.verify(model, pruned, images, atol=0.02).passed
    assert {layer: type(pruned.get_submodule(layer)).__name__ for layer in expected} == expected
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in before.items())
    pruned.eval()
    iso.save(pruned, tmp_path / "pruned.safetensors")
    loaded = iso.load(tmp_path / "pruned.safetensors").eval()
    torch.testing.assert_close(loaded(images), pruned(images))
    optimizer = torch.optim.SGD(iso.training.parameter_groups(loaded.train(), lr=1e-3))
    loaded(images).square().sum().backward()
    optimizer.step()
    assert all(p.grad is not None for p in loaded.parameters())
    iso.save(loaded, tmp_path / "trained.safetensors")


def test_pruned_layers_are_analysed():
    model, images = small_tcnn(), torch.randn(1, 3, 32, 32)
    pruned = iso.prune(model)
    assert list(iso.gates(pruned)) == list(iso.gates(model))
    torch.testing.assert_close(iso.gates(pruned), iso.gates(model), atol=1e-3, rtol=0)
    torch.testing.assert_close(iso.attention_maps(pruned, images), iso.attention_maps(model, images), atol=1e-3, rtol=0)
    torch.testing.assert_close(iso.nonlocality(pruned, images), iso.nonlocality(model, images), atol=1e-2, rtol=0)
    spans = iso.analysis.attention_spans(pruned)["layer3.0.conv1"]
    assert spans.isnan().tolist() == [h == "c" for h in "ppbcpbpcp"]
    assert iso.analysis.centres(pruned)["layer3.0.conv1"][0].tolist() == [-1.0, -1.0]
    vit = iso.prune(small_vit())
    assert iso.gates(vit)["blocks.0.attn"].tolist() == [1.0, 0.5, 0.0]
    assert iso.attention_maps(vit, images)["blocks.0.attn"].shape == (1, 3, 5, 5)


def test_prunable_heads_are_listed():
    heads = iso.surgery.prunable_heads(small_convit())
    assert [(head.number, head.becomes) for head in heads] == [
        (0, "position only"),
        (1, "position only"),
        (3, "content only"),
    ]
    assert all(head.layer == "blocks.0.attn" and head.was == "position and content" for head in heads)


def test_verify_accepts_ten_times_the_tolerance_but_at_most_a_tenth_of_the_output():
    bounds = {0.0: 1e-4, 0.001: 0.01, 0.01: 0.1, 0.3: 0.1}
    assert {tolerance: PruneHeads("p", tolerance).atol for tolerance in bounds} == pytest.approx(bounds)


def test_bad_arguments_are_one_clear_line():
    with pytest.raises(iso.UserError, match=r"tolerance 0.7 must be from 0 to 0.5"):
        iso.prune(small_convit(), 0.7)
    with pytest.raises(iso.UserError, match="must be a number"):
        iso.prune(small_convit(), "much")
    with pytest.raises(iso.UserError, match=r"nothing to prune.*the nearest is 0\.99988.*at least 0\.00013"):
        iso.prune(small_convit(), 1e-6)
    with pytest.raises(iso.UserError, match="no head has a gate left"):
        iso.prune(iso.prune(small_tcnn([9.0] * 9)))
    with pytest.raises(iso.UserError, match="no gated attention layer"):
        iso.prune(timm.create_model("cifar_resnet20"))
    with pytest.raises(iso.UserError, match=r"there are layer3\.0\.conv1"):
        iso.prune(small_tcnn(), where="layer1.*")
    with pytest.raises(iso.UserError, match="do not fit the 9 heads"):
        iso.surgery.PruneHeads("ppx").build(GPSA2d(4, 4, 3))
    with pytest.raises(iso.UserError, match="has no gated heads"):
        iso.surgery.PruneHeads("p").build(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="letters of p, c and b"):
        PrunedGPSA2d("ppp", 4, 4, 3)
    with pytest.raises(ValueError, match="letters of p, c and b"):
        PrunedGPSA("xy", 4)
    with pytest.raises(iso.UserError, match="has no effect with content='none'"):
        iso.ConvToGPSA(content="none", gate=1.0)


def test_hooks_are_not_lost():
    model = small_tcnn()
    model.layer3[0].conv1.register_forward_hook(lambda *_: None)
    with pytest.raises(iso.UserError, match="would be lost"):
        iso.prune(model)


def test_heads_without_content_from_the_start():
    cnn = timm.create_model("cifar_resnet20").eval()
    soft = iso.recast(cnn, iso.ConvToGPSA(content="none"), "*conv*")
    images = torch.randn(1, 3, 32, 48)
    assert iso.verify(cnn, soft, images).passed
    assert {type(m) for m in soft.modules() if hasattr(m, "kernel_size")} == {PositionalConv2d}
    assert type(iso.revert(soft).conv1) is nn.Conv2d
    assert type(iso.prune(soft).conv1) is nn.Conv2d
    iso.Anneal(steps=10).apply(soft, 10)
    assert soft.conv1.locality[0].item() == pytest.approx(1.0)
    with pytest.raises(iso.UserError, match="PositionalConv2d is no longer a convolution"):
        iso.revert(soft)


def test_group_rows_of_some_heads():
    rows = torch.arange(6.0)[:, None]
    assert group_rows_by_head(rows, 4).flatten().tolist() == [0, 4, 1, 5, 2, 0, 3, 0]


def test_the_command(tmp_path):
    iso.save(small_tcnn([9.0, 9.0, 0.3, -9.0, 9.0, 0.1, 9.0, -9.0, 9.0]), tmp_path / "t.safetensors")
    done = isomorph("prune", "t.safetensors", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "14 heads in 2 layers pruned" in done.stdout
    assert "content only" in done.stdout
    assert "wrote" in done.stdout
    out = json.loads(isomorph("prune", "t.safetensors", "--out", "j.safetensors", "--json", folder=tmp_path).stdout)
    first = out["layers"][0]
    assert (first["layer"], first["becomes"], len(first["heads"])) == ("layer3.0.conv1", "PrunedGPSA2d", 7)
    assert first["parameters"][1] < first["parameters"][0]
    assert first["macs"][1] < first["macs"][0]
    bad = {
        ("t.safetensors",): "t-pruned.safetensors exists",
        ("t.safetensors", "--out", "n.safetensors", "--tolerance", "0.6"): "--tolerance 0.6 is out of range",
        ("t.safetensors", "--out", "n.safetensors", "--tolerance", "0"): "nothing to prune",
        ("t.safetensors", "--out", "n.safetensors", "--batch", "0"): "--batch 0 must be at least 1",
        ("t.safetensors", "--out", "n.safetensors", "--root", "x"): "give both",
        ("t.safetensors", "--out", "n.safetensors", "--atol", "1e-9"): "give a smaller --tolerance, or a larger --atol",
    }
    for arguments, message in bad.items():
        said = isomorph("prune", *arguments, folder=tmp_path)
        assert said.returncode == 2, said.stdout
        assert message in said.stderr
        assert len(said.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "n.safetensors").exists()
