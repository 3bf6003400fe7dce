"""Exported models: equal to the model, complete in what they say of themselves, and never half-written."""

import copy
import errno
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.layers import create_pool2d
from torch import nn

import isomorph as iso
from command_line import isomorph
from isomorph.deployment.artefact import describe
from isomorph.deployment.program import prepare, to_onnx, trace
from isomorph.deployment.shapes import plan_shapes
from isomorph.lab.evaluation.robustness.cells import weights_hash
from refusals import refused

CONFIG = dict(
    input_size=(3, 16, 16), mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.1), interpolation="bilinear"
)
CONFIG |= dict(crop_pct=0.9, crop_mode="center", label_names=("cat", "dog"))
open_artefact = iso.deployment.open_artefact


class Net(nn.Module):
    """Layers whose geometry depends on the image size, and fusible ones."""

    num_classes = 2
    pretrained_cfg = CONFIG

    def __init__(self, attention):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 2, 2)
        self.attention = attention
        self.pyramid = iso.layers.PyramidLinear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, images):
        x = self.conv(images).permute(0, 2, 3, 1)  # (B, H, W, 8)
        y = (
            self.attention(x)
            if isinstance(self.attention, iso.layers.RelativeAttention)
            else self.by_grid(x)
        )
        return self.head(self.pyramid(x + y).mean((1, 2)))

    def by_grid(self, x):
        grid = (x.shape[1], x.shape[2])
        return self.attention(x.flatten(1, 2), grid).unflatten(1, grid)


def perturbed(model):
    """The model in eval mode with none of its values at a special one, such as a gate of 0 or a norm of variance 1."""
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in (t for t in model.state_dict().values() if t.is_floating_point()):
            tensor += 0.1 * torch.rand_like(tensor)
    return model.eval()


@pytest.fixture(scope="module", params=["onnx", "pt2"])
def exported(request, tmp_path_factory):
    """A file of either format, open in batch and size: its path, the report, and the model."""
    attention = {
        "onnx": lambda: iso.layers.GPSA(8, num_heads=4),
        "pt2": lambda: iso.layers.RelativeAttention(8, num_heads=2, grid_size=(8, 8)),
    }
    path = tmp_path_factory.mktemp("exported") / f"m.{request.param}"
    model = perturbed(Net(attention[request.param]()))
    return path, iso.export(model, path, dynamic="batch,size"), model


class Scaled(nn.Module):
    """The smallest model; `function` is applied to the mean of its images."""

    def __init__(self, function=torch.square):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.function = function

    def forward(self, images):
        return self.function(images.mean((2, 3)) * self.weight)


def test_a_file_equals_the_model_at_any_size(exported):
    path, report, model = exported
    assert report.deviation.passed
    shapes = [row.name.split(",")[0].split()[-1] for row in report.deviation.inputs]
    assert shapes[:3] == ["1x3x16x16", "2x3x16x48", "5x3x48x16"]
    assert report.axes == ("batch", "height", "width")
    assert report.size_multiple == 1
    assert report.fused == 1
    images = torch.randn(3, 3, 31, 22)
    with torch.no_grad():
        torch.testing.assert_close(open_artefact(path)(images), model(images), atol=1e-5, rtol=1e-5)
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(path)
        assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
        assert np.array_equal(
            session.run(["logits"], {"images": images.numpy()})[0], open_artefact(path)(images)
        )
    else:
        plain = torch.export.load(path).module()
        assert torch.equal(plain(images), open_artefact(path)(images))


def test_the_metadata_says_how_to_use_the_file(exported):
    artefact = open_artefact(exported[0])
    assert artefact.metadata["isomorph_version"] == iso.__version__
    assert artefact.metadata["label_names"] == ["cat", "dog"]
    config = timm.data.resolve_data_config(model=artefact)
    assert {
        key: config[key] for key in ("input_size", "mean", "crop_pct")
    }.items() <= CONFIG.items()
    assert artefact.num_classes == 2
    assert artefact.metadata["dynamic"] == ["batch", "size"]
    # of the machine that wrote it
    assert str(Path(iso.__file__).parent).encode() not in exported[0].read_bytes()


def test_a_graph_of_one_image_runs_on_a_batch(tmp_path):
    model = Scaled()
    images = torch.randn(3, 3, 16, 16)
    model.pretrained_cfg = CONFIG
    iso.export(model, tmp_path / "m.onnx", dynamic="none")
    proto = onnx.load(tmp_path / "m.onnx")
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    assert [tensor.name for tensor in proto.graph.initializer][:1] == ["weight"]
    artefact = open_artefact(tmp_path / "m.onnx")
    torch.testing.assert_close(artefact(images), model(images).detach(), atol=1e-6, rtol=1e-5)
    refused(
        "images has the size 3x16x24, and the file takes 3x16x16",
        artefact,
        torch.randn(3, 3, 16, 24),
    )
    assert weights_hash(artefact) == weights_hash(copy.deepcopy(artefact))
    iso.export(Scaled(torch.exp), tmp_path / "other.onnx", size=(16, 16))
    assert weights_hash(artefact) != weights_hash(open_artefact(tmp_path / "other.onnx"))


class PadsToCells(nn.Module):
    """Pools cells of `cell` pixels, after it has padded images to whole cells: another graph for other sizes."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.pretrained_cfg = {"input_size": (3, 32, 32)}

    def forward(self, x):
        x = self.conv(x)
        for axis, pad in (3, (0, 1)), (2, (0, 0, 0, 1)):
            while x.shape[axis] % self.cell:
                x = F.pad(x, pad)
        return F.avg_pool2d(x, 2).amax((2, 3)) + x.mean((2, 3))


def same_padding(layer):
    model = nn.Sequential(nn.Conv2d(3, 3, 1), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.pretrained_cfg = {"input_size": (3, 24, 24)}
    return model


SIZES = {
    "timm's pooling": (lambda: same_padding(create_pool2d("max", 3, 2, padding="same")), "onnx", 1),
    "cells, a program": (lambda: PadsToCells(4), "pt2", 4),
}


@pytest.mark.parametrize("case", SIZES)
def test_the_sizes_that_are_claimed_are_right(tmp_path, case):
    """Also of networks that take another way for other sizes, which a graph cannot."""
    build, ending, multiple = SIZES[case]
    model = build().eval()
    path = tmp_path / f"m.{ending}"
    assert iso.export(model, path, dynamic="batch,size").size_multiple == multiple
    artefact = open_artefact(path)
    _, height, width = artefact.metadata["input_size"]
    images = torch.randn(3, 3, height + 3 * multiple, width + 2 * multiple)
    torch.testing.assert_close(artefact(images), model(images), rtol=0, atol=1e-4)
    if multiple > 1:
        refused(f"multiples of {multiple}", artefact, torch.randn(1, 3, height + 1, width))


FORGED = [
    dict(dynamic="5", num_classes='"ten"'),
    dict(input_size="[" * 100_000),
    dict(mean="grey"),
    dict(length="[]", inputs='["images"]'),
]


def test_forged_metadata_is_one_line(tmp_path):
    path = tmp_path / "x.onnx"
    iso.export(Scaled(), path, size=(8, 8))
    proto = onnx.load(path)
    known = {entry.key: entry.value for entry in proto.metadata_props}
    for values in FORGED:
        onnx.helper.set_model_props(proto, known | values)
        onnx.save(proto, path)
        refused(r"cannot read the metadata of .*x\.onnx: ", open_artefact, path)


def test_a_file_that_deviates_is_not_written(tmp_path):
    model = Scaled(lambda x: x + torch.compiler.is_exporting())
    with pytest.raises(iso.surgery.NotEqual, match=r"NOT equal within 1e-05") as error:
        iso.export(model, tmp_path / "x.pt2", size=(8, 8))
    assert error.value.report.fp32 == pytest.approx(1)
    assert not list(tmp_path.iterdir())
    assert iso.export(model, tmp_path / "x.pt2", size=(8, 8), atol=20).deviation.passed


class Pooled(nn.Module):
    """A convolution and what a function makes of its channel means and the images."""

    def __init__(self, then):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.then = then

    def forward(self, images):
        return self.then(self.conv(images).mean((2, 3)), images)


UNTRACEABLE = {
    "len": (
        lambda y, x: torch.zeros(len(x), 4) + y,
        r"fixes batch at 2, as len\(images\) does; write images.shape\[0\]; try it with dynamic size$",
    ),
    "an int": (
        lambda y, x: y.reshape(-1, 4, 1) * torch.ones(int(x.shape[3])),
        r"fixes width at 48, as int\(images.shape\[3\]\) does; write images.shape\[3\]; try .* batch$",
    ),
    "a branch on values": (
        lambda y, x: y if y.max() < 1000 else y / 2,
        "its code branches on values of the images .*; write it without the branch, as with torch.where$",
    ),
    "random in eval mode": (
        lambda y, x: F.dropout(y),
        "other outputs when it is called again with the same inputs, .* F.dropout without",
    ),
    "a size that onnxruntime cannot pool": (
        lambda y, x: F.adaptive_avg_pool2d(x[:, :, ::2, ::2], 3),
        "does not run on images of 1x3x16x16: .*; try it with dynamic batch$",
    ),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_no_file_can_hold_is_said_with_what_to_write(name, tmp_path, capfd):
    then, said = UNTRACEABLE[name]
    path = tmp_path / "net.onnx"
    refused(said, iso.export, Pooled(then), path, size=16, dynamic="batch,size")
    assert not path.exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["len", "an int", "a size that onnxruntime cannot pool"])
def test_the_advice_to_leave_fewer_axes_open_works(name, tmp_path):
    then, _ = UNTRACEABLE[name]
    dynamic = "size" if name == "len" else "batch"
    assert iso.export(Pooled(then), tmp_path / "net.onnx", size=16, dynamic=dynamic)


class Detects(nn.Module):
    """Boxes in pixels and scores in one tensor; `wrong` is added to the scores in the exported graph."""

    def __init__(self, wrong):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 4, 4)
        self.wrong = wrong

    def forward(self, images):
        y = self.conv(images).flatten(2)  # (B, 6, N)
        scores = y[:, 4:].sigmoid() + self.wrong * torch.compiler.is_exporting()
        return torch.cat([640 * y[:, :4], scores], 1)


def test_scores_next_to_boxes_are_compared_by_their_own_scale(tmp_path):
    torch.manual_seed(0)
    with pytest.raises(iso.surgery.NotEqual, match=r"NOT equal within 0.0001: .* in \[:, 4:6\]"):
        iso.export(Detects(0.035), tmp_path / "x.pt2", size=(16, 16), atol=1e-4)
    assert iso.export(Detects(0.0), tmp_path / "x.pt2", size=(16, 16)).deviation.passed


def test_files_have_one_tolerance(tmp_path):
    """A row of the classifier that is scaled by 1.001 is noticed by the command, in Python and by export itself."""
    torch.manual_seed(0)
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=12, num_heads=3, num_classes=10
    )
    with torch.no_grad():
        vit.head.weight.normal_()
        vit.head.weight[0] *= 100  # a logit by which those of other classes are small
    iso.save(vit.eval(), tmp_path / "a.safetensors")
    report = iso.export(vit, tmp_path / "a.pt2")
    artefact = open_artefact(tmp_path / "a.pt2")
    images = torch.randn(2, 3, 32, 32)
    assert report.deviation.atol == iso.verify(vit, artefact, images).atol
    equal = json.loads(
        isomorph("verify", tmp_path / "a.safetensors", tmp_path / "a.pt2", "--json").stdout
    )
    assert (equal["atol"], equal["passed"]) == (report.deviation.atol, True)
    with torch.no_grad():
        vit.head.weight[3] *= 1.001
    iso.save(vit, tmp_path / "b.safetensors")
    with pytest.raises(iso.surgery.NotEqual):
        iso.verify(vit, artefact, images)
    assert isomorph("verify", tmp_path / "b.safetensors", tmp_path / "a.pt2").returncode == 2


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
@pytest.mark.parametrize(
    ("options", "size"),
    [("--size 48x32", "48x32"), ("--raw-images", "32x32"), ("--size 48 --raw-images", "48x48")],
)
def test_verify_takes_size_and_pixels_from_the_file(suffix, options, size, tmp_path):
    small = dict(img_size=32, patch_size=16, depth=1, embed_dim=12, num_heads=3, num_classes=10)
    torch.manual_seed(0)
    iso.save(timm.create_model("vit_tiny_patch16_224", **small), tmp_path / "a.safetensors")
    file = tmp_path / f"a.{suffix}"
    made = isomorph("export", tmp_path / "a.safetensors", "--out", file, *options.split())
    assert made.returncode == 0, made.stderr
    equal = isomorph("verify", tmp_path / "a.safetensors", file)
    assert equal.stdout.startswith("equal within 1e-05"), equal.stderr
    assert f"input 2x3x{size}" in equal.stdout
    named = isomorph("verify", tmp_path / "a.safetensors", file, "--size", size)
    assert named.stdout.startswith("equal within 1e-05"), named.stderr


def test_the_command_takes_what_stays_open_and_how_far_outputs_may_differ(tmp_path):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def small(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1))"
    )
    line = "export nets:small --size 8 --json --out"

    def export(options):
        return isomorph(*line.split(), *options.split(), folder=tmp_path)

    for options, axes, atol in (
        ("none.pt2 --dynamic none", [], 1e-5),
        ("size.pt2 --dynamic batch,size --atol 0.01", ["batch", "size"], 0.01),
    ):
        done = export(options)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["deviation"]["atol"] == atol
        assert open_artefact(tmp_path / options.split()[0]).metadata["dynamic"] == axes
    failed = export("never.pt2 --atol 0")
    said = failed.stderr.splitlines()[-1]
    assert failed.returncode == 2
    assert said.startswith("isomorph: NOT equal within 0:")
    assert said.endswith("no file was written (see --atol)")
    assert not (tmp_path / "never.pt2").exists()


def test_verify_takes_the_size_of_another_program_s_file(tmp_path):
    net = timm.create_model("cifar_resnet20").eval()
    iso.save(net, tmp_path / "a.safetensors")
    path = str(tmp_path / "theirs.onnx")
    torch.onnx.export(net, (torch.randn(1, 3, 40, 24),), path, verbose=False)
    equal = isomorph("verify", tmp_path / "a.safetensors", path, "--batch", 1)
    assert "input 1x3x40x24" in equal.stdout, equal.stderr


SWAPPED = {
    "export": (lambda net, x, path: iso.export(path, net), r"in the order export\(model, path\)"),
    "quantize": (
        lambda net, x, path: iso.quantize(net, path, [x]),
        r"order quantize\(model, calibration_loader, path\)",
    ),
    "quantize, loader": (
        lambda net, x, path: iso.quantize(net, net, path),
        "calibration loader is a Sequential",
    ),
    "quantize, model": (lambda net, x, path: iso.quantize([x], net, path), "is not a model"),
    "push": (lambda net, x, path: iso.push("me/net", net), r"in the order push\(model, name\)"),
    "save_for_hub": (
        lambda net, x, path: iso.save_for_hub(path, net),
        r"in the order save_for_hub\(model, folder\)",
    ),
}


@pytest.mark.parametrize("call", SWAPPED)
def test_swapped_arguments_are_one_line(call, tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 2, 4), nn.Flatten())
    run, said = SWAPPED[call]
    refused(said, run, net, torch.randn(1, 3, 4, 4), tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())


def test_what_is_not_merged_is_named(tmp_path):
    """A norm before a convolution that pads with zeros stays."""
    net = nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten()
    ).eval()
    with torch.no_grad():
        net[0].bias.fill_(1.0)
    report = iso.export(net, tmp_path / "x.pt2", size=(8, 8))
    assert list(report.left) == ["0"]
    assert f"left 0: {report.left['0']}" in str(report)
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["left"] == report.left
    rounded = iso.quantize(net, [torch.randn(2, 3, 8, 8)], tmp_path / "x.onnx", size=(8, 8))
    assert rounded.left == report.left
    assert f"left 0: {report.left['0']}" in str(rounded)
    assert "same class" in str(rounded)  # of 256 columns


def test_several_outputs_are_refused_before_any_work(tmp_path):
    class Two(nn.Module):
        def forward(self, images):
            return images, images

    steps = []
    refused(
        "returns a tuple, and a file has one output",
        iso.export,
        Two(),
        tmp_path / "x.pt2",
        size=4,
        progress=steps.append,
    )
    assert steps == ["choosing shapes"]


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    def fail(path, _):
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "there.pt2").write_text("mine")
    monkeypatch.setattr(Path, "write_bytes", fail)
    full = r"cannot write .*No space left on device"
    refused(full, iso.export, Scaled(), tmp_path / "there.pt2", size=(8, 8), overwrite=True)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("there.pt2", "mine")]


def test_constants_stay_small_and_weights_are_constants():
    """Of a T-CNN layer's position attention the file has the maps along its axes, not their product."""
    layer = iso.layers.GPSA2d(12, 12, kernel_size=3, padding=1)  # 9 heads do not divide 12 channels
    model = perturbed(nn.Sequential(nn.Conv2d(3, 12, 1), layer))
    shapes = plan_shapes(model, "batch", (8, 8))
    proto = to_onnx(trace(prepare(model, shapes)[0], shapes), shapes, describe(model, shapes))
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    assert max(np.prod(tensor.dims) for tensor in weights.values()) <= 12 * 12 * 9
    products = [node for node in proto.graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    constant = [sum(name in weights for name in node.input[:2]) for node in products]
    # map, its product with the values; layers, chains merged
    assert sorted(constant) == [0, 0, 1, 1, 1]


def test_export_leaves_the_model_alone():
    model = Net(iso.layers.GPSA(8, num_heads=4)).train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepared, _ = prepare(model, plan_shapes(model, "batch"))
    for module in prepared.modules():
        assert not module.training
    for module in model.modules():
        assert module.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor)


def test_the_command_line_exports_and_evaluates(tmp_path):
    checkpoint = tmp_path / "small.safetensors"
    torch.manual_seed(0)
    small = dict(img_size=32, depth=1, embed_dim=12, num_heads=3, num_classes=10)
    iso.save(timm.create_model("vit_tiny_patch16_224", **small), checkpoint)
    command = ("export", checkpoint, "--out", tmp_path / "small.pt2")
    run = isomorph(*command)
    assert run.returncode == 0, run.stderr
    assert "equal within 1e-05" in run.stdout
    assert f"wrote {tmp_path / 'small.pt2'}" in run.stdout
    test = ("--data", "digits", "--max-images", 20, "--json")
    exported = isomorph("evaluate", tmp_path / "small.pt2", *test)
    assert exported.returncode == 0, exported.stderr
    result = json.loads(exported.stdout)
    assert "macs" not in result
    assert "images_per_second" in result
    eager = json.loads(isomorph("evaluate", checkpoint, *test, "--no-cost").stdout)
    assert result["top1"] == eager["top1"]
    equal = isomorph("verify", checkpoint, tmp_path / "small.pt2")
    assert equal.stdout.startswith("equal within 1e-05"), equal.stderr


@pytest.mark.parametrize("write", ["export", "quantize"])
def test_the_size_of_a_model_that_says_none_is_asked_for(write, tmp_path, monkeypatch):
    """It would be 224, which a network of any size runs on; as of a network of timm without pretrained_cfg."""
    monkeypatch.chdir(tmp_path)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    calls = {
        "export": lambda **size: iso.export(net, "net.onnx", **size),
        "quantize": lambda **size: iso.quantize(net, [torch.randn(2, 3, 9, 8)], "net.onnx", **size),
    }
    said = "which size of images it takes; give size=224, or size=(224, 160) for height and width"
    refused(re.escape(said), calls[write])
    assert not list(tmp_path.iterdir())
    calls[write](size=(9, 8))
    assert iso.deployment.open_artefact("net.onnx").own_size == (9, 8)


def test_a_model_that_does_not_say_which_images_it_takes_is_noted(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    assert "3 x 4 x 4, prepared as for ImageNet" in str(
        iso.export(net, tmp_path / "net.pt2", size=4)
    )
    net.pretrained_cfg = dict(input_size=(3, 4, 4), mean=(0.1, 0.2, 0.3), std=(0.5,) * 3)
    assert not iso.export(net, tmp_path / "own.pt2").notes
    assert iso.deployment.open_artefact(tmp_path / "own.pt2").metadata["mean"] == (0.1, 0.2, 0.3)


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_a_file_of_a_model_without_a_number_of_classes_is_evaluated(tmp_path, suffix):
    net = nn.Sequential(nn.Conv2d(3, 3, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    iso.export(net, tmp_path / f"net.{suffix}", size=16)
    for label in range(3):
        for split in ("train", "val"):
            (tmp_path / "data" / split / f"class {label}").mkdir(parents=True)
            image = Image.new("RGB", (20, 16), (80 * label, 90, 200))
            image.save(tmp_path / "data" / split / f"class {label}" / "a.png")
    artefact = iso.deployment.open_artefact(tmp_path / f"net.{suffix}")
    expected = iso.evaluate(net, tmp_path / "data", size=16)
    assert iso.evaluate(artefact, tmp_path / "data") == pytest.approx(expected)
    refused(
        r"size 16\.5 must be a height and a width", iso.evaluate, net, tmp_path / "data", size=16.5
    )
    refused("is not a model", iso.verify, net, torch.zeros(1, 3, 16, 16), net)


class TakesTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 8)

    def forward(self, x, y):
        return self.conv(x) + y


def test_a_model_of_two_inputs_is_an_error_of_one_line(tmp_path):
    with pytest.raises(iso.UserError, match="required positional"):
        iso.export(TakesTwo(), tmp_path / "x.pt2", size=8)


def test_meta_and_nan_models_are_rejected(tmp_path):
    layer = nn.Conv2d(3, 4, 3)
    layer.weight.data[0, 0, 0, 0] = math.nan
    refused("outputs are NaN", iso.export, layer, tmp_path / "x.pt2", size=32)
    empty = nn.Conv2d(3, 4, 3, device="meta")
    refused("weight has no values", iso.export, empty, tmp_path / "x.pt2", size=32)
    images = [torch.randn(4, 3, 8, 8)]
    refused("weight has no values", iso.quantize, empty, images, tmp_path / "x.onnx")


EDITED = {
    "inserted": lambda net: iso.insert(net, iso.layers.MapAttention, "0", torch.randn(1, 3, 8, 8)),
    "gated": lambda net: iso.recast(net, iso.ConvToGPSA(init="exact"), "0"),
}


@pytest.mark.parametrize("edit", EDITED)
def test_a_file_is_verified_at_its_own_tolerance(edit, tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(2), nn.AdaptiveAvgPool1d(1))
    model = EDITED[edit](nn.Sequential(*net, nn.Flatten()).eval())
    iso.export(model, tmp_path / "x.pt2", size=8)
    artefact = iso.deployment.open_artefact(tmp_path / "x.pt2")
    report = iso.verify(model, artefact, torch.randn(1, 3, 8, 8))
    assert report.atol == 1e-5
    assert report.passed


def test_a_model_too_large_for_onnx_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["isomorph.deployment.export"], "_LARGEST_ONNX", 100)
    refused(
        "GB of weights in float32.*export a .pt2 file",
        iso.export,
        nn.Conv2d(3, 4, 3),
        tmp_path / "x.onnx",
        size=8,
    )
