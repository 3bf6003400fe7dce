"""Quantised models: close to the model, honest about every layer, and never half-written."""

import copy
import errno
import json
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import isomorph as iso
from command_line import isomorph, refusal

quantize_module = sys.modules["isomorph.deployment.quantize"]  # the function has the name of its module


@pytest.fixture(scope="module")
def vit():
    """A small ViT with pyramids."""
    torch.manual_seed(0)
    net = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=24, depth=1, num_classes=5)
    with torch.no_grad():
        net.head.weight.normal_()
    return iso.recast(net, iso.LinearToPyramid("P-W1S"), where="blocks.*.mlp.fc?").eval()


@pytest.fixture(scope="module")
def images():
    return torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def graphs():
    """The graphs that were exported, which take most of the time."""
    return []


@pytest.fixture(scope="module")
def quantized(vit, images, graphs, tmp_path_factory):
    """The report of each mode; the graph of the first one serves for both."""
    folder = tmp_path_factory.mktemp("quantized")
    reports, to_onnx = {}, quantize_module.to_onnx

    def record(*arguments):
        graphs.append(to_onnx(*arguments))
        return copy.deepcopy(graphs[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize_module, "to_onnx", record)
        reports["static"] = iso.quantize(vit, [images[:8], images[8:]], folder / "static.onnx")
        exported_already(patch, graphs)
        loader = [(images, torch.zeros(12))]
        reports["weights"] = iso.quantize(vit, loader, folder / "weights.onnx", weights_only=True)
    return reports


def exported_already(patch, graphs):
    """Take the graph of an earlier export instead of another."""
    patch.setattr(quantize_module, "trace", lambda *_: None)
    patch.setattr(quantize_module, "to_onnx", lambda *_: copy.deepcopy(graphs[0]))


@pytest.mark.parametrize(("mode", "decibels"), [("static", 20), ("weights", 30)])
def test_outputs_are_close_and_the_file_says_what_it_is(vit, images, quantized, mode, decibels):
    report = quantized[mode]
    artefact = iso.deployment.open_artefact(report.path)
    assert artefact.metadata["quantization"] == f"int8 {mode}"
    assert artefact.pretrained_cfg["input_size"] == (3, 16, 16)
    with torch.no_grad():
        exact = vit(images)
        noise = 10 * torch.log10(exact.square().sum() / (exact - artefact(images)).square().sum()).item()
    assert noise == pytest.approx(report.output_sqnr, abs=0.01)
    assert noise > decibels
    assert report.megabytes < report.float_megabytes
    assert iso.evaluate(artefact, [(images, vit(images).argmax(1))])["top1"] == pytest.approx(report.agreement)


def test_every_layer_is_listed_with_its_precision(quantized):
    layers = {(layer.name, layer.operator): layer for layer in quantized["static"].layers}
    precisions = {name: layer.precision for (name, _), layer in layers.items() if name != "blocks.0.attn"}
    expected = ["patch_embed.proj", "blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2"]
    assert precisions == dict.fromkeys([*expected, "head"], "int8")
    products = [layer for layer in quantized["static"].layers if layer.name == "blocks.0.attn"]
    assert [(layer.precision, layer.reason) for layer in products] == [("float", "a product of two activations")] * 2
    assert {layer.precision for layer in quantized["weights"].layers} == {"int8 w", "float"}
    assert quantized["static"].float_operators["Softmax"] == 1
    assert quantized["static"].float_operators["LayerNormalization"] == 3
    assert json.loads(json.dumps(quantized["static"].as_dict()))["mode"] == "static"
    text = str(quantized["static"])
    assert "6 of 8 layers have weights and activations in int8 (7-bit weights)" in text
    assert "float: blocks.0.attn (a product of two activations)" in text


def test_weights_are_integers_with_a_scale_for_each_output_channel(vit, quantized):
    for mode, largest in (("static", 64), ("weights", 127)):
        graph = onnx.load(quantized[mode].path).graph
        tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
        head = next(name for name in tensors if name.startswith("head.weight") and name.endswith("_quantized"))
        assert np.abs(tensors[head]).max() <= largest
        scale = tensors[head.replace("_quantized", "_scale")]
        weight = vit.head.weight.detach().numpy()
        assert scale == pytest.approx(np.abs(weight).max(1) / largest)
        integers = tensors[head].T if tensors[head].shape != weight.shape else tensors[head]
        assert np.abs(integers * scale[:, None] - weight).max() <= scale.max() / 2 + 1e-6
        large = [name for name, tensor in tensors.items() if tensor.dtype == np.float32 and tensor.size > 1000]
        assert large == []


def test_the_file_runs_with_onnxruntime_alone(quantized, images):
    session = onnxruntime.InferenceSession(quantized["static"].path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": images[:3].numpy()})
    artefact = iso.deployment.open_artefact(quantized["static"].path)
    assert np.array_equal(logits, artefact(images[:3]).numpy())


def test_chosen_layers_stay_in_float(vit, images, quantized, graphs, tmp_path, monkeypatch):
    exported_already(monkeypatch, graphs)
    options = dict(float_layers=["blocks.*.mlp.*"], weight_bits=8)
    report = iso.quantize(vit, [images[:2]], tmp_path / "q.onnx", **options)
    kept = {(layer.name, layer.precision) for layer in report.layers if layer.reason == "chosen by float_layers"}
    assert kept == {("blocks.0.mlp.fc1", "float"), ("blocks.0.mlp.fc2", "float")}
    assert report.weight_bits == 8
    assert iso.deployment.open_artefact(tmp_path / "q.onnx")(images[:1]).shape == (1, 5)


BAD = {
    "size": (lambda x: [x[..., :8, :]], {}, r"have shape 12x3x8x16, the model takes B x 3 x 16 x 16"),
    "channels": (lambda x: [x[:, :1]], {}, "have shape 12x1x16x16"),
    "flat": (lambda x: [x[0]], {}, "have shape 3x16x16"),
    "no images": (lambda x: [], {}, "no calibration images"),
    "not batches": (lambda x: x, {}, "one tensor"),
    "integers": (lambda x: [x.to(torch.uint8)], {}, "torch.uint8; give normalised float images"),
    "not finite": (lambda x: [x / 0], {}, "not finite"),
    "names": (lambda x: ["cat"], {}, "calibration images are str"),
    "bits": (lambda x: [x], dict(weight_bits=4), "weight_bits=4 is not possible; give 7 or 8"),
    "layers": (
        lambda x: [x],
        dict(float_layers=["blocks.0.mlp.fc9"]),
        "matches no layer; nearest names: blocks.0.mlp.fc",
    ),
    "dynamic": (lambda x: [x], dict(dynamic="width"), "dynamic width is unknown"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(vit, images, tmp_path, case):
    batches, options, message = BAD[case]
    with pytest.raises(iso.UserError, match=message):
        iso.quantize(vit, batches(images), tmp_path / "q.onnx", **options)
    assert list(tmp_path.iterdir()) == []


def test_the_file_must_be_new_and_end_in_onnx(vit, images, tmp_path):
    (tmp_path / "old.onnx").write_text("mine")
    with pytest.raises(iso.UserError, match=r"old.onnx exists; give overwrite"):
        iso.quantize(vit, [images], tmp_path / "old.onnx")
    with pytest.raises(iso.UserError, match=r"must end in .onnx, the format of quantised models"):
        iso.quantize(vit, [images], tmp_path / "q.pt2")
    assert (tmp_path / "old.onnx").read_text() == "mine"


def test_a_full_disk_leaves_nothing(vit, images, quantized, graphs, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    exported_already(monkeypatch, graphs)
    with monkeypatch.context() as patch:
        for write in ("os.link", "os.replace"):
            patch.setattr(write, full)
        with pytest.raises(iso.UserError, match=r"cannot write .*q.onnx: .*No space left"):
            iso.quantize(vit, [images], tmp_path / "q.onnx", weights_only=True)
    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(iso.UserError, match=r"cannot write temporary files in .*No space left"):
        iso.quantize(vit, [images], tmp_path / "q.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_the_command_that_installs_it(vit, images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(iso.UserError, match=r"needs onnxruntime.*\[export\]"):
        iso.quantize(vit, [images], tmp_path / "q.onnx")


def test_the_command_quantises_and_tests(tmp_path):
    shape = dict(img_size=16, patch_size=8, embed_dim=24, depth=1, num_classes=10)
    iso.save(timm.create_model("vit_tiny_patch16_224", **shape), tmp_path / "vit.safetensors")
    data = ["--data", "digits", "--max-images", "20"]
    run = isomorph("quantize", tmp_path / "vit.safetensors", *data, "--images", "8", "--weights-only")
    assert run.returncode == 0, run.stderr
    assert "6 of 8 layers have weights in int8" in run.stdout
    assert "top-1" in run.stdout
    run = isomorph("evaluate", tmp_path / "vit-int8.onnx", *data, "--no-cost", "--json")
    assert json.loads(run.stdout)["images"] == 20


COMMANDS = {
    "exists": (["--out", "old.onnx"], "--out old.onnx exists; give --overwrite"),
    "ending": (["--out", "q.pt2"], "--out q.pt2 must end in .onnx"),
    "none": (["--images", "0", "--data", "digits"], "--images 0 must be at least 1"),
    "bits": (["--weight-bits", "4"], "--weight-bits"),
    "data": (["--data", "digit"], "did you mean digits?"),
    "layers": (["--data", "digits", "--images", "4", "--float-layers", "conv9"], "in --float-layers matches no layer"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_the_command_refuses_in_one_line(case, tmp_path):
    (tmp_path / "old.onnx").write_text("mine")
    options, message = COMMANDS[case]
    text = refusal(isomorph("quantize", "cifar_resnet20", "--no-pretrained", *options, folder=tmp_path))
    assert message in text
    assert [path.name for path in tmp_path.iterdir()] == ["old.onnx"]


class PadsToPairs(nn.Module):
    """Pools pairs of columns, after it has padded an odd width: another graph for odd widths."""

    pretrained_cfg = dict(input_size=(3, 16, 16))

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        x = self.conv(x)
        return F.avg_pool2d(F.pad(x, (0, 1)) if x.shape[3] % 2 else x, 2).mean((2, 3))


def test_sizes_that_take_another_way_through_the_model_are_not_claimed(tmp_path):
    path, images = tmp_path / "m.onnx", torch.randn(8, 3, 16, 16)
    iso.quantize(PadsToPairs().eval(), [images, images[:0]], path, weights_only=True, dynamic="batch,size")
    artefact = iso.deployment.open_artefact(path)
    assert artefact(torch.randn(2, 3, 20, 14)).shape == (2, 8)
    with pytest.raises(iso.UserError, match="multiples of 2"):
        artefact(torch.randn(2, 3, 20, 15))
    with pytest.raises(iso.UserError, match="no calibration images"):
        iso.quantize(PadsToPairs().eval(), [images[:0]], tmp_path / "n.onnx")
    with pytest.raises(iso.UserError, match=r"'linear' in float_layers matches no layer"):
        iso.quantize(PadsToPairs().eval(), [images], tmp_path / "n.onnx", float_layers="linear")


def test_what_is_not_a_model_is_said_by_its_class(tmp_path):
    state = timm.create_model("cifar_resnet20").state_dict()
    for call in (
        lambda: iso.quantize(state, [torch.zeros(1, 3, 32, 32)], tmp_path / "m.onnx"),
        lambda: iso.export(state, tmp_path / "m.onnx"),
        lambda: iso.save(state, tmp_path / "m.safetensors"),
        lambda: iso.recast(state, iso.ConvToGPSA()),
    ):
        with pytest.raises(iso.UserError, match=r"^OrderedDict is not a model; create it first"):
            call()
    with pytest.raises(iso.UserError, match=r"size 32 must be a height and a width"):
        iso.export(timm.create_model("cifar_resnet20"), tmp_path / "m.onnx", size=32)
