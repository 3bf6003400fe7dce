"""The operation that `verify` names as the first after which two models differ."""

import copy

import onnx
import pytest
import timm
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import isomorph as iso
from command_line import isomorph
from isomorph.deployment import open_artefact
from isomorph.surgery import compare_outputs
from same_networks import OwnViT, give_random_weights, hf_vit, timm_vit

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def ported(target):
    """A model, and another implementation with its weights, as far as it is the same function."""
    torch.manual_seed(0)
    source = give_random_weights(timm_vit())
    return source, iso.port_weights(source, target, X, partial=True).model


@torch.no_grad()
def other_weight(target, layer):
    source, new = ported(target)
    new.get_submodule(layer).weight[3, 4] += 0.1
    return source, new


def other_eps():
    cnn = give_random_weights(timm.create_model("cifar_resnet20"))
    new = copy.deepcopy(cnn)
    new.layer2[1].bn2.eps = 0.1
    return cnn, new


@torch.no_grad()
def merged_norms():
    """Convolutions that hold their norms, so that no value before these is in both models."""
    cnn = give_random_weights(timm.create_model("cifar_resnet20"))
    merged = iso.fuse(cnn, example=X)
    merged.layer2[1].conv2.weight[1] *= 2
    return cnn, merged


class NotFinite(nn.Module):
    """A model whose second layer gives infinity."""

    def __init__(self, other):
        super().__init__()
        self.one = nn.Linear(32, 8)
        self.two = nn.Linear(8, 8)
        self.other = other

    def forward(self, x):
        y = self.two(self.one(x.mean((1, 2))).relu())
        return (y / 0 if self.other else y).sigmoid() + y


def not_finite():
    one = NotFinite(False).eval()
    other = NotFinite(True).eval()
    other.load_state_dict(one.state_dict())
    return one, other


CASES = {  # two models, module and operation of the second, module of the first, and a reason
    "a weight": (
        lambda: other_weight(OwnViT(), "layers.1.up"),
        "layers.1.up",
        "linear",
        "blocks.1.mlp.fc1",
        "weight",
    ),
    "a weight, transformers": (
        lambda: other_weight(hf_vit(), "vit.layers.1.mlp.fc1"),
        "vit.layers.1.mlp.fc1",
        "linear",
        "blocks.1.mlp.fc1",
        "weight",
    ),
    "eps": (
        lambda: ported(OwnViT(eps=1e-3)),
        "layers.0.a",
        "layer_norm",
        "blocks.0.norm1",
        "eps: 1e-06",
    ),
    "eps of a norm between": (
        other_eps,
        "layer2.1.bn2",
        "batch_norm",
        "layer2.1.bn2",
        "eps: 1e-05",
    ),
    "an activation": (lambda: ported(OwnViT(act=F.silu)), "", "silu", "blocks.0.mlp.act", ""),
    "heads": (
        lambda: ported(timm_vit(num_heads=4)),
        "blocks.0.attn",
        "unbind",
        "blocks.0.attn",
        "",
    ),
    "merged norms": (merged_norms, "layer2.1.conv2", "conv2d", "layer2.1.conv2", ""),
    "infinity": (not_finite, "", "div", "", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_operation_is_named(case):
    make, module, operation, original, reason = CASES[case]
    report = compare_outputs(*make(), X)
    first = report.first
    assert not report.passed
    assert first.module == module
    assert first.operation == operation
    assert first.original_module == original
    assert first.before < 1e-6
    assert first.after > 1e-3
    assert reason in "; ".join(first.reasons)
    assert f"first at {operation}" in str(report)


def test_equal_models_have_none():
    assert compare_outputs(*ported(OwnViT()), X).first is None


def test_a_difference_of_rounded_constants_does_not_hide_a_larger_one():
    one = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    other = copy.deepcopy(one)
    with torch.no_grad():
        other[0].weight *= 1 + 1e-6
        other[2].weight *= 2
    first = compare_outputs(one, other, X).first
    assert first.module == "2"
    assert 1e-7 < first.before < 1e-5


SCOPES = "pkg.torch.onnx.name_scopes"


def onnx_file(path, model, noted, batch="batch"):
    """A file of two linear layers as another program writes it, with notes on modules or names by module."""
    nodes = []
    value = "x"
    for name in ("a", "b"):
        given = [value, f"{name}.weight", f"{name}.bias"]
        value = f"of {name}"
        node = helper.make_node("Gemm", given, [value], f"/net/net.{name}/Gemm", transB=1)
        if noted:
            node.name = f"node_{name}"
            scopes = f"['', 'net.{name}', 'linear']"
            node.metadata_props.add(key=SCOPES, value=scopes)
        nodes.append(node)
    weights = [
        numpy_helper.from_array(x.detach().numpy(), name[4:])
        for name, x in model.state_dict().items()
    ]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 8])]
    made = [helper.make_tensor_value_info(value, TensorProto.FLOAT, [batch, 8])]
    proto = helper.make_model(
        helper.make_graph(nodes, "two layers", given, made, weights),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    onnx.save(proto, path)
    return path


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

    def forward(self, x):
        return self.net["b"](self.net["a"](x))


@pytest.mark.parametrize("noted", [True, False])
def test_a_file_of_another_program_is_compared_by_its_modules(noted, tmp_path):
    model = TwoLayers().eval()
    artefact = open_artefact(onnx_file(tmp_path / "x.onnx", model, noted), to_compare=True)
    x = torch.randn(3, 8)
    assert iso.verify(model, artefact, x).passed
    with torch.no_grad():
        model.net["b"].bias += 1
    first = compare_outputs(model, artefact, x).first
    assert first.module == "net.b"
    assert first.operation == "Gemm"
    assert first.original_module == "net.b"
    assert first.original_operation == "linear"
    assert first.before < 1e-6
    assert first.after > 1e-2


@pytest.mark.parametrize("count", [1, 4, 6])
def test_a_file_of_another_program_for_batches_of_one_size_takes_any(count, tmp_path):
    model = TwoLayers().eval()
    artefact = open_artefact(onnx_file(tmp_path / "x.onnx", model, True, batch=4), to_compare=True)
    x = torch.randn(count, 8)
    torch.testing.assert_close(artefact(x), model(x))
    assert iso.verify(model, artefact, x).passed
    with torch.no_grad():
        model.net["b"].bias += 1
    report = compare_outputs(model, artefact, x)
    assert not report.passed
    assert count != 4 or report.first.module == "net.b"


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "operation"), [("onnx", "MatMul"), ("pt2", "linear")])
def test_an_exported_file_is_compared_by_its_modules(suffix, operation, tmp_path):
    vit = give_random_weights(timm_vit())
    iso.export(vit, tmp_path / f"vit.{suffix}")
    artefact = open_artefact(tmp_path / f"vit.{suffix}")
    with torch.no_grad():
        vit.blocks[1].mlp.fc1.weight[3, 4] += 0.1
    first = compare_outputs(vit, artefact, X).first
    assert (first.module, first.operation) == ("blocks.1.mlp.fc1", operation)


def test_a_pt2_file_says_settings_and_weights_that_differ(tmp_path):
    cnn = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten())
    cnn = give_random_weights(cnn)
    iso.export(cnn, tmp_path / "cnn.pt2", size=(8, 8))
    artefact = open_artefact(tmp_path / "cnn.pt2")
    x = torch.randn(2, 3, 8, 8)
    assert iso.verify(cnn, artefact, x).first is None
    cnn[1].eps = 0.1
    first = compare_outputs(cnn, artefact, x).first
    assert (first.module, first.operation) == ("1", "group_norm")
    assert any(reason.startswith("eps: 0.1 in the original") for reason in first.reasons)


@pytest.mark.slow
def test_an_int8_file_has_no_first_difference_but_by_a_tolerance(tmp_path):
    cnn = give_random_weights(timm.create_model("cifar_resnet20"))
    images = torch.randn(8, 3, 32, 32)
    iso.quantize(cnn, [images], tmp_path / "int8.onnx", weights_only=True)
    artefact = open_artefact(tmp_path / "int8.onnx")
    with torch.no_grad():
        cnn.layer2[1].conv2.weight.mul_(-1)
    report = compare_outputs(cnn, artefact, images)
    assert not report.passed
    assert report.first is None
    assert any("no operation is the first" in note for note in report.notes)
    assert compare_outputs(cnn, artefact, images, atol=1e-5).first.module


@pytest.mark.slow
def test_the_command_prints_the_first_operation(tmp_path):
    cnn, _ = other_eps()
    iso.save(cnn, tmp_path / "cnn.safetensors")
    with torch.no_grad():
        cnn.layer2[1].conv1.weight *= 2
    iso.save(cnn, tmp_path / "other.safetensors")
    done = isomorph("verify", tmp_path / "cnn.safetensors", tmp_path / "other.safetensors")
    assert done.returncode == 2
    assert "first at conv2d in layer2.1.conv1 (original: conv2d in layer2.1.conv1)" in done.stdout
    assert len(done.stderr.strip().splitlines()) == 1
