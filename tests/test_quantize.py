"""Quantised models: close to the model, honest about every layer, and never half-written."""

import copy
import errno
import json
import sys

import numpy as np
import onnx
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import isomorph as iso
from command_line import isomorph, refusal
from refusals import refused

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
    assert json.loads(json.dumps(quantized["static"].as_dict()))["mode"] == "static"
    text = str(quantized["static"])
    assert "6 of 8 layers have weights and activations in int8" in text
    assert "MatMul    float   a product of two activations" in text


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


def test_chosen_layers_stay_in_float(vit, images, quantized, graphs, tmp_path, monkeypatch):
    exported_already(monkeypatch, graphs)
    report = iso.quantize(vit, [images[:2]], tmp_path / "q.onnx", float_layers=["blocks.*.mlp.*"])
    kept = {(layer.name, layer.precision) for layer in report.layers if layer.reason == "chosen by float_layers"}
    assert kept == {("blocks.0.mlp.fc1", "float"), ("blocks.0.mlp.fc2", "float")}
    assert iso.deployment.open_artefact(tmp_path / "q.onnx")(images[:1]).shape == (1, 5)


IMAGES = "give normalised images, finite floats of B x 3 x 16 x 16"
BAD = {
    "size": (lambda x: [x[..., :8, :]], {}, f"images are 12x3x8x16 in float32; {IMAGES}"),
    "channels": (lambda x: [x[:, :1]], {}, f"images are 12x1x16x16 in float32; {IMAGES}"),
    "flat": (lambda x: [x[0]], {}, f"images are 3x16x16 in float32; {IMAGES}"),
    "no images": (lambda x: [], {}, "no calibration images"),
    "empty": (lambda x: [x[:0]], {}, "no calibration images"),
    "not batches": (lambda x: x, {}, f"images are 3x16x16 in float32; {IMAGES}"),
    "integers": (lambda x: [x.to(torch.uint8)], {}, f"images are 12x3x16x16 in uint8; {IMAGES}"),
    "not finite": (lambda x: [x / 0], {}, IMAGES),
    "names": (lambda x: ["cat"], {}, f"images are str; {IMAGES}"),
    "layers": (lambda x: [x], dict(float_layers="blocks.0.mlp.fc9"), "in float_layers matches no layer; nearest"),
    "dynamic": (lambda x: [x], dict(dynamic="width"), "dynamic width is unknown"),
    "exists": (lambda x: [x], dict(path="old.onnx"), r"old.onnx exists; give overwrite"),
    "ending": (lambda x: [x], dict(path="q.pt2"), r"must end in .onnx, the format of quantised models"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(vit, images, quantized, graphs, tmp_path, case, monkeypatch):
    batches, options, message = BAD[case]
    exported_already(monkeypatch, graphs)
    (tmp_path / "old.onnx").write_text("mine")
    path = tmp_path / options.get("path", "q.onnx")
    others = {key: value for key, value in options.items() if key != "path"}
    refused(message, iso.quantize, vit, batches(images), path, **others)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("old.onnx", "mine")]


def test_a_full_disk_leaves_nothing(vit, images, quantized, graphs, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    exported_already(monkeypatch, graphs)
    with monkeypatch.context() as patch:
        for write in ("os.link", "os.replace"):
            patch.setattr(write, full)
        written = r"cannot write .*q.onnx: .*No space left"
        refused(written, iso.quantize, vit, [images], tmp_path / "q.onnx", weights_only=True)
    monkeypatch.setattr("tempfile.mkdtemp", full)
    refused(r"cannot write temporary files in .*No space left", iso.quantize, vit, [images], tmp_path / "q.onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_command_quantises_and_tests(tmp_path):
    shape = dict(img_size=16, patch_size=8, embed_dim=24, depth=1, num_classes=10)
    iso.save(timm.create_model("vit_tiny_patch16_224", **shape), tmp_path / "vit.safetensors")
    data = ["--data", "digits", "--max-images", "20"]
    out = tmp_path / "int8.onnx"
    run = isomorph("quantize", tmp_path / "vit.safetensors", *data, "--images", "8", "--weights-only", "--out", out)
    assert run.returncode == 0, run.stderr
    assert "6 of 8 layers have weights in int8" in run.stdout
    assert "top-1" in run.stdout
    run = isomorph("evaluate", out, *data, "--no-cost", "--json")
    assert json.loads(run.stdout)["images"] == 20


COMMANDS = {
    "--out old.onnx": "--out old.onnx exists; give --overwrite",
    "--out q.pt2": "--out q.pt2 must end in .onnx",
    "--out q.onnx --images 0 --data digits": '"0" for --images; must be >= 1',
    "--out q.onnx --data digit": "did you mean digits?",
    "--out q.onnx --data digits --images 4 --float-layers conv9": "in --float-layers matches no layer",
}


@pytest.mark.parametrize("options", COMMANDS)
def test_the_command_refuses_in_one_line(options, tmp_path):
    (tmp_path / "old.onnx").write_text("mine")
    text = refusal(isomorph("quantize", "cifar_resnet20", "--no-pretrained", *options.split(), folder=tmp_path))
    assert COMMANDS[options] in text
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
    refused("multiples of 2", artefact, torch.randn(2, 3, 20, 15))


def test_what_is_not_a_model_is_said_by_its_class(tmp_path):
    state = timm.create_model("cifar_resnet20").state_dict()
    for call in (
        lambda: iso.quantize(state, [torch.zeros(1, 3, 32, 32)], tmp_path / "m.onnx"),
        lambda: iso.export(state, tmp_path / "m.onnx"),
        lambda: iso.save(state, tmp_path / "m.safetensors"),
        lambda: iso.recast(state, iso.ConvToGPSA()),
    ):
        refused(r"^OrderedDict is not a model; create it first", call)
    refused(r"size 32 must be a height and a width", iso.export, PadsToPairs(), tmp_path / "m.onnx", size=32)
