"""Quantised models: close to the model, honest about every layer, and never half-written."""

import copy
import importlib
import json
import math

import numpy as np
import onnx
import pytest
import timm
import torch
from torch import nn

import isomorph as iso
from command_line import isomorph
from isomorph.surgery.comparison import Fidelity, signal_to_noise
from refusals import refused

# the function has the name of its module
quantize_module = importlib.import_module("isomorph.deployment.quantize")


@pytest.fixture(scope="module")
def vit():
    """A small ViT with pyramids."""
    torch.manual_seed(0)
    net = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=24, depth=1, num_classes=5
    )
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
    reports = {}
    to_onnx = quantize_module.to_onnx

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
        noise = (
            10
            * torch.log10(exact.square().sum() / (exact - artefact(images)).square().sum()).item()
        )
    assert noise == pytest.approx(report.output_sqnr, abs=0.01)
    assert noise > decibels
    assert report.megabytes < report.float_megabytes
    assert 0 < report.float_difference < 1e-5
    assert iso.evaluate(artefact, [(images, vit(images).argmax(1))])["top1"] == pytest.approx(
        report.agreement
    )


def test_every_layer_is_listed_with_its_precision(quantized):
    layers = {(layer.name, layer.operator): layer for layer in quantized["static"].layers}
    precisions = {
        name: layer.precision for (name, _), layer in layers.items() if name != "blocks.0.attn"
    }
    expected = [
        "patch_embed.proj",
        "blocks.0.attn.qkv",
        "blocks.0.attn.proj",
        "blocks.0.mlp.fc1",
        "blocks.0.mlp.fc2",
    ]
    assert precisions == dict.fromkeys([*expected, "head"], "int8")
    products = [layer for layer in quantized["static"].layers if layer.name == "blocks.0.attn"]
    assert [(layer.precision, layer.reason) for layer in products] == [
        ("float", "a product of two activations")
    ] * 2
    assert {layer.precision for layer in quantized["weights"].layers} == {"int8 w", "float"}


def test_weights_are_integers_with_a_scale_for_each_output_channel(vit, quantized):
    for mode, largest in (("static", 64), ("weights", 127)):
        graph = onnx.load(quantized[mode].path).graph
        tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
        head = next(
            name
            for name in tensors
            if name.startswith("head.weight") and name.endswith("_quantized")
        )
        assert np.abs(tensors[head]).max() <= largest
        scale = tensors[head.replace("_quantized", "_scale")]
        weight = vit.head.weight.detach().numpy()
        assert scale == pytest.approx(np.abs(weight).max(1) / largest)
        integers = tensors[head].T if tensors[head].shape != weight.shape else tensors[head]
        assert np.abs(integers * scale[:, None] - weight).max() <= scale.max() / 2 + 1e-6
        large = [
            name
            for name, tensor in tensors.items()
            if tensor.dtype == np.float32 and tensor.size > 1000
        ]
        assert large == []


def test_chosen_layers_stay_in_float(vit, images, quantized, graphs, tmp_path, monkeypatch):
    exported_already(monkeypatch, graphs)
    report = iso.quantize(vit, [images[:2]], tmp_path / "q.onnx", float_layers=["blocks.*.mlp.*"])
    kept = {
        (layer.name, layer.precision)
        for layer in report.layers
        if layer.reason == "chosen by float_layers"
    }
    assert kept == {("blocks.0.mlp.fc1", "float"), ("blocks.0.mlp.fc2", "float")}
    tied = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 48), torch.nn.Linear(48, 48))
    tied[2].weight = tied[1].weight  # which ONNX stores under one name
    monkeypatch.undo()
    report = iso.quantize(
        tied, [torch.randn(4, 3, 4, 4)], tmp_path / "tied.onnx", size=4, float_layers=["1"]
    )
    assert [(layer.name, layer.precision) for layer in report.layers] == [
        ("1", "float"),
        ("2", "int8"),
    ]
    assert iso.deployment.open_artefact(tmp_path / "q.onnx")(images[:1]).shape == (1, 5)


UNFIT = {
    "integers": (lambda images: [(255 * images).byte()], "are 12x3x16x16 in uint8"),
    "another size": (lambda images: [images, images[..., :8]], "are 12x3x16x8 in float32"),
    "one channel": (lambda images: [images[:, :1]], "are 12x1x16x16 in float32"),
    "not finite": (lambda images: [images / images.clamp(min=0)], "finite floats of B x 3 x 16"),
    "empty batches": (lambda images: [images[:0]] * 2, "batches are empty; give at least one"),
    "no batches": (lambda images: [], "there is no batch; give at least one"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_images_that_do_not_fit_are_rejected_and_no_file_is_written(what, vit, images, tmp_path):
    make, said = UNFIT[what]
    refused(said, iso.quantize, vit, make(images), tmp_path / "int8.onnx")
    assert not list(tmp_path.iterdir())


def test_a_glob_that_matches_no_layer_is_rejected(
    vit, images, quantized, graphs, tmp_path, monkeypatch
):
    exported_already(monkeypatch, graphs)
    said = r"'blocks.0.mlp.fc3' in `float_layers` matches no layer.*blocks.0.mlp.fc"
    globs = ["head", "blocks.0.mlp.fc3"]
    refused(said, iso.quantize, vit, [images], tmp_path / "q.onnx", float_layers=globs)
    assert not list(tmp_path.iterdir())


def test_images_that_the_model_does_not_expect_are_noted(
    vit, images, graphs, quantized, tmp_path, monkeypatch
):
    """Pixels from 0 to 255, and a batch of which all have one class; agreement is perfect for both."""
    exported_already(monkeypatch, graphs)
    for given, said in (
        (255 * images.sigmoid(), "reach from"),
        (images[:1].expand(4, -1, -1, -1), "one class for all"),
    ):
        report = iso.quantize(vit, [given], tmp_path / "int8.onnx", overwrite=True)
        assert said in " ".join(report.notes)
        assert said in str(report)
    usual = iso.quantize(vit, [images.clamp(-1, 1)], tmp_path / "int8.onnx", overwrite=True)
    assert "reach from" not in " ".join(usual.notes)


def test_images_unlike_what_the_file_says_of_them_are_noted(tmp_path):
    """Of a network that says nothing of its images the file says ImageNet's mean and std."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    pixels = 255 * torch.rand(4, 3, 8, 8)
    path = tmp_path / "int8.onnx"
    said = iso.quantize(net, [pixels], path, size=8).notes
    assert any("reach from" in note and "set model.pretrained_cfg" in note for note in said)
    net.pretrained_cfg = dict(input_size=(3, 8, 8), mean=(0, 0, 0), std=(1 / 255,) * 3)
    notes = iso.quantize(net, [pixels], path, overwrite=True).notes
    assert "reach from" not in " ".join(notes)


def test_a_file_is_compared_with_what_it_was_when_it_was_made(vit, images, quantized):
    """By noise and classes, as its outputs differ from the model's on purpose."""
    for mode, report in quantized.items():
        artefact = iso.deployment.open_artefact(report.path)
        assert artefact.fidelity == Fidelity(report.output_sqnr, report.agreement, report.images)
        found = iso.verify(vit, artefact, [images[:8], images[8:]])
        assert found.fidelity.output_sqnr == pytest.approx(report.output_sqnr, abs=0.01)
        assert found.verdict.startswith("as close as when it was made")
        assert iso.verify(vit, artefact, torch.randn(64, 3, 16, 16)).passed
        with pytest.raises(iso.surgery.NotEqual, match="NOT equal within 1e-05"):
            iso.verify(vit, artefact, images, atol=1e-5)
        other = copy.deepcopy(vit)
        with torch.no_grad():
            other.head.weight[0] *= 1.5
        with pytest.raises(iso.surgery.NotEqual, match="NOT as close as when it was made"):
            iso.verify(other, artefact, images)
        assert artefact.metadata["quantization"] == f"int8 {mode}"


def test_the_command_compares_a_file_on_images(tmp_path):
    net = timm.create_model("cifar_resnet20", num_classes=10).eval()
    iso.save(net, tmp_path / "net.safetensors")
    test = ("--data", "digits")
    calibration = iso.data.open_source("digits", "train").subset(range(16))
    loader = iso.data.eval_loader(calibration, timm.data.resolve_data_config(model=net), 16)
    iso.quantize(net, loader, tmp_path / "int8.onnx")
    both = (tmp_path / "net.safetensors", tmp_path / "int8.onnx")
    run = isomorph("verify", *both, *test, "--max-images", 20)
    assert run.stdout.startswith("as close as when it was made"), run.stderr
    assert "of 20 images" in run.stdout
    alone = isomorph("verify", *both)
    assert alone.returncode == 2
    assert "is an int8 file, calibrated on images; give --data" in alone.stderr
    assert "NOT equal within 0.001" in isomorph("verify", *both, "--atol", "0.001").stderr


OUTPUTS = {  # a network's last layers, and whether its outputs are classes
    "classes": (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), True),
    "a map": (nn.Identity, False),
    "boxes": (lambda: nn.Flatten(2), False),
    "one number": (lambda: nn.Flatten(0), False),
}


@pytest.mark.parametrize("what", OUTPUTS)
def test_only_rows_of_classes_have_a_class(what, tmp_path):
    make, classes = OUTPUTS[what]
    net = nn.Sequential(nn.Conv2d(3, 5, 4, 4), make()).eval()
    if what == "one number":
        net = nn.Sequential(nn.Conv2d(3, 1, 8), make()).eval()
    images = torch.randn(4, 3, 8, 8)
    report = iso.quantize(net, [images], tmp_path / "int8.onnx", size=(8, 8))
    assert ("same class" in str(report)) is classes
    assert (report.agreement is not None) is classes
    assert math.isfinite(report.output_sqnr)
    assert iso.verify(net, iso.deployment.open_artefact(report.path), images).passed


def test_reports_are_json_and_torch_draws_as_before(
    vit, images, quantized, graphs, tmp_path, monkeypatch
):
    exported_already(monkeypatch, graphs)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    report = iso.quantize(vit, [images[:2]], tmp_path / "q.onnx")
    assert torch.equal(torch.get_rng_state(), state)
    for value in (math.inf, -math.inf, math.nan):
        broken = copy.copy(report)
        vars(broken)["output_sqnr"] = value
        assert json.loads(json.dumps(broken.as_dict(), allow_nan=False))["output_sqnr"] is None


def test_calibration_images_may_have_several_sizes_where_only_these_are_open(tmp_path):
    """Every one of them is calibrated on and compared, also those of another size."""
    model = timm.create_model("cifar_resnet20").eval()
    images = [torch.randn(2, 3, 32, 32), torch.randn(1, 3, 64, 48)]
    report = iso.quantize(model, images, tmp_path / "int8.onnx", dynamic="size")
    int8 = iso.deployment.open_artefact(tmp_path / "int8.onnx")
    single = [image for batch in images for image in batch.split(1)]
    with torch.no_grad():
        exact, rounded = (torch.cat([net(image) for image in single]) for net in (model, int8))
    assert report.images == len(exact) == 3
    for signal, noise in zip(exact, exact - rounded, strict=True):
        assert 10 * torch.log10(signal.square().sum() / noise.square().sum()) > 15
    assert signal_to_noise(exact, rounded) == pytest.approx(report.output_sqnr, abs=0.01)


def test_the_command_measures_both_models_at_the_given_size(tmp_path):
    small = dict(img_size=16, patch_size=8, embed_dim=24, depth=1, num_classes=10)
    iso.save(timm.create_model("vit_tiny_patch16_224", **small), tmp_path / "vit.safetensors")
    options = (
        "--data digits --images 8 --max-images 20 --weights-only --size 24 --out q.onnx --json"
    )
    run = isomorph("quantize", "vit.safetensors", *options.split(), folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["accuracy"]["float"]["images"] == 20


def test_the_command_takes_float_layers_and_what_stays_open(tmp_path):
    small = dict(img_size=16, patch_size=8, embed_dim=24, depth=1, num_classes=10)
    iso.save(timm.create_model("vit_tiny_patch16_224", **small), tmp_path / "vit.safetensors")
    options = "--data digits --images 8 --max-images 4 --weights-only --out q.onnx --json"
    more = "--float-layers head blocks.0.mlp.* --dynamic none"
    line = f"quantize vit.safetensors {options} {more}"
    run = isomorph(*line.split(), folder=tmp_path)
    assert run.returncode == 0, run.stderr
    precisions = {layer["name"]: layer["precision"] for layer in json.loads(run.stdout)["layers"]}
    in_float = [name for name, precision in precisions.items() if precision == "float"]
    assert in_float == ["blocks.0.attn", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "head"]
    assert precisions["blocks.0.attn.qkv"] == "int8 w"
    assert iso.deployment.open_artefact(tmp_path / "q.onnx").metadata["dynamic"] == []


def test_thorough_of_an_int8_file_needs_a_tolerance(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten())
    images = torch.randn(4, 3, 8, 8)
    iso.quantize(net, [images], tmp_path / "q.onnx", size=8, weights_only=True)
    int8 = iso.deployment.open_artefact(tmp_path / "q.onnx")
    assert iso.verify(net, int8, images).passed
    with pytest.raises(iso.UserError, match="leave thorough=True out"):
        iso.verify(net, int8, images, thorough=True)
