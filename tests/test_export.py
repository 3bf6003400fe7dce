"""Exported models: equal to the model, complete in what they say of themselves, and never half-written."""

import copy
import errno
import json
import math
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import create_conv2d, create_pool2d
from torch import nn

import isomorph as iso
from command_line import isomorph, refusal
from isomorph.deployment.artefact import describe, load_artefact
from isomorph.deployment.program import name_failure, prepare, to_onnx, trace
from isomorph.deployment.shapes import parse_dynamic, plan_shapes
from isomorph.evaluation.robustness.cells import weights_hash
from refusals import refused

CONFIG = dict(input_size=(3, 16, 16), mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.1), interpolation="bilinear")
CONFIG |= dict(crop_pct=0.9, crop_mode="center", label_names=("cat", "dog"))


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
        y = self.attention(x) if isinstance(self.attention, iso.layers.RelativeAttention) else self.by_grid(x)
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def local():
    return perturbed(Net(iso.layers.GPSA(8, num_heads=4)))


@pytest.fixture(scope="module")
def relative():
    return perturbed(Net(iso.layers.RelativeAttention(8, num_heads=2, grid_size=(8, 8))))


@pytest.fixture(scope="module")
def onnx_file(folder, local):
    report = iso.export(local, folder / "local.onnx", dynamic="batch,size", opset=21)
    return folder / "local.onnx", report


@pytest.fixture(scope="module")
def pt2_file(folder, relative):
    report = iso.export(relative, folder / "relative.pt2", dynamic=["size", "batch"])
    return folder / "relative.pt2", report


class Scaled(nn.Module):
    """The smallest model; `function` is applied to the mean of its images."""

    def __init__(self, function=torch.square):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.function = function

    def forward(self, images):
        return self.function(images.mean((2, 3)) * self.weight)


def test_an_onnx_file_equals_the_model_at_any_size(onnx_file, local):
    path, report = onnx_file
    assert report.deviation.passed
    shapes = ["1x3x16x16", "2x3x16x48", "5x3x48x16", "2x3x18x18"]
    assert [row.shape for row in report.deviation.inputs] == shapes
    assert (report.format, report.opset, report.dynamic, report.size_multiple) == ("onnx", 21, ("batch", "size"), 2)
    assert report.fused == 1
    session = onnxruntime.InferenceSession(path)
    assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
    images = torch.randn(3, 3, 30, 22)
    (out,) = session.run(["logits"], {"images": images.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(out, local(images), atol=1e-5)


def test_a_pt2_file_equals_the_model_at_any_size(pt2_file, relative):
    path, report = pt2_file
    assert report.deviation.passed
    assert report.opset is None
    images = torch.randn(3, 3, 30, 22)
    with torch.no_grad():
        expected = relative(images)
    torch.testing.assert_close(torch.export.load(path).module()(images), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(iso.deployment.open_artefact(path)(images), expected, atol=1e-5, rtol=1e-5)


def test_the_metadata_says_how_to_use_the_file(onnx_file, pt2_file):
    said = onnxruntime.InferenceSession(onnx_file[0]).get_modelmeta().custom_metadata_map
    assert json.loads(said["class_names"]) == ["cat", "dog"]
    assert json.loads(said["mean"]) == [0.5, 0.4, 0.3]
    assert said["interpolation"] == "bilinear"
    assert said["isomorph_version"] == iso.__version__
    for path, _ in (onnx_file, pt2_file):
        artefact = iso.deployment.open_artefact(path)
        config = timm.data.resolve_data_config(model=artefact)
        assert config["input_size"] == (3, 16, 16)
        assert (config["mean"], config["crop_pct"]) == (CONFIG["mean"], 0.9)
        assert artefact.num_classes == 2
        assert artefact.metadata["dynamic"] == ["batch", "size"]


def test_no_file_names_a_folder_of_this_machine(onnx_file, pt2_file):
    for path, _ in (onnx_file, pt2_file):
        assert str(Path(iso.__file__).parent).encode() not in path.read_bytes()


def onnx_graph(model, shapes):
    return to_onnx(trace(prepare(model, shapes)[0], shapes), shapes, 20, describe(model, shapes))


def test_a_graph_of_one_image_runs_on_a_batch():
    model = Scaled()
    model.pretrained_cfg = CONFIG
    proto = onnx_graph(model, plan_shapes(model, "none"))
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    assert [tensor.name for tensor in proto.graph.initializer][:1] == ["weight"]
    artefact = load_artefact(proto.SerializeToString(), "onnx")
    images = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(artefact(images), model(images).detach(), atol=1e-6, rtol=1e-5)
    with pytest.raises(iso.UserError, match="images has the size 3x16x24, and the artefact takes 3x16x16; export it"):
        artefact(torch.randn(3, 3, 16, 24))


def test_an_exported_model_is_evaluated_as_its_model(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 10, 8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    model.num_classes, model.pretrained_cfg = 10, {**CONFIG, "label_names": None}
    source = iso.data.open_source("digits", "test").subset(range(50))
    iso.export(model, folder / "small.pt2")
    expected = iso.evaluate(model, source)
    artefact = iso.deployment.open_artefact(folder / "small.pt2")
    assert iso.evaluate(artefact, source) == pytest.approx(expected, abs=1e-4)
    with torch.no_grad():
        model[0].bias += 1
    iso.export(model, folder / "other.pt2")
    other = iso.deployment.open_artefact(folder / "other.pt2")
    assert weights_hash(artefact) == weights_hash(copy.deepcopy(artefact)) != weights_hash(other)


def test_what_is_dynamic():
    assert parse_dynamic("size, batch") == ("batch", "size")
    assert parse_dynamic("none") == ()
    with pytest.raises(iso.UserError, match="dynamic width is unknown; give batch, size"):
        parse_dynamic(["batch", "width"])
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, dynamic_img_size=True)
    shapes = plan_shapes(vit, "batch,size")
    assert shapes.size_multiple == 16
    assert [shape for shape, _ in shapes.examples()] == ["1x3x32x32", "2x3x32x64", "5x3x64x32", "2x3x48x48"]
    assert shapes.near == 1
    assert plan_shapes(vit, "batch", (64, 48)).checks[1]["images"].shape == (2, 3, 64, 48)
    fixed = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    with pytest.raises(iso.UserError, match=r"takes images of 32 x 32 only \(.*dynamic_img_size=True"):
        plan_shapes(fixed, "batch,size")


class PadsToCells(nn.Module):
    """Pools cells of `cell` pixels, after it has padded images to whole cells: another graph for other sizes."""

    def __init__(self, cell, both=True):
        super().__init__()
        self.cell, self.both, self.conv = cell, both, nn.Conv2d(3, 8, 3, padding=1)
        self.pretrained_cfg = {"input_size": (3, 32, 32)}

    def forward(self, x):
        x = self.conv(x)
        for axis, pad in ((3, (0, 1)), (2, (0, 0, 0, 1))) if self.both else ((3, (0, 1)),):
            while x.shape[axis] % self.cell:
                x = F.pad(x, pad)
        return F.avg_pool2d(x, 2).amax((2, 3)) + x.mean((2, 3))


@pytest.mark.parametrize("ending", ["pt2", "onnx"])
def test_same_padding_keeps_every_size_open(tmp_path, ending):
    layer = {
        "pt2": create_conv2d(3, 4, 5, stride=3, padding="same"),
        "onnx": create_pool2d("max", 3, 2, padding="same"),
    }
    model = nn.Sequential(nn.Conv2d(3, 3, 1), layer[ending], nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    path = tmp_path / f"m.{ending}"
    assert iso.export(model, path, dynamic="batch,size", size=(24, 24)).size_multiple == 1
    images = torch.randn(3, 3, 25, 31)
    torch.testing.assert_close(iso.deployment.open_artefact(path)(images), model(images), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("cell", "ending", "both"), [(2, "onnx", True), (4, "pt2", False), (2, "pt2", True)])
def test_sizes_that_take_another_way_through_the_model_are_not_claimed(tmp_path, ending, cell, both):
    model, path = PadsToCells(cell, both).eval(), tmp_path / f"m.{ending}"
    report = iso.export(model, path, dynamic="batch,size")
    assert report.size_multiple == cell
    artefact = iso.deployment.open_artefact(path)
    images = torch.randn(3, 3, 32 - 3 * cell, 32 + 5 * cell)
    torch.testing.assert_close(artefact(images), model(images), rtol=0, atol=1e-4)
    with pytest.raises(iso.UserError, match=f"multiples of {cell}"):
        artefact(torch.randn(1, 3, 33, 32))


class CutsHalf(nn.Module):
    """Cuts images at the middle of their width, rounded up: torch.export cannot write `ceil`."""

    def forward(self, x):
        return x[..., : math.ceil(x.shape[-1] / 2)]


class Returns(nn.Module):
    """Returns its logits in something, as models of transformers and feature extractors do."""

    def __init__(self, wrap):
        super().__init__()
        self.scaled, self.wrap = Scaled(), wrap

    def forward(self, images):
        return self.wrap(self.scaled(images))


OUTPUTS = {
    "list": lambda x: [x],
    "dictionary": lambda x: {"out": x},
    "dictionary with logits": lambda x: {"aux": x + 1, "logits": x},
    "output of transformers": lambda x: pytest.importorskip("transformers").modeling_outputs.ImageClassifierOutput(
        logits=x
    ),
}


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("ending", ["pt2", "onnx"])
def test_one_tensor_in_a_list_or_dictionary_is_the_output(tmp_path, kind, ending):
    assert iso.export(Returns(OUTPUTS[kind]), tmp_path / f"m.{ending}", size=(8, 8)).deviation.passed
    images = torch.randn(3, 3, 8, 8)
    artefact = iso.deployment.open_artefact(tmp_path / f"m.{ending}")
    torch.testing.assert_close(artefact(images), Scaled()(images).detach())


def test_a_vit_of_any_size_is_exported_from_its_smallest_grid(tmp_path):
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=12, num_heads=3, dynamic_img_size=True
    )
    assert iso.export(vit, tmp_path / "m.pt2", dynamic="batch,size").size_multiple == 16
    images = torch.randn(2, 3, 64, 48)
    torch.testing.assert_close(
        iso.deployment.open_artefact(tmp_path / "m.pt2")(images), vit.eval()(images), atol=1e-4, rtol=0
    )


FORGED = {
    "types": dict(dynamic="5", num_classes='"ten"'),
    "an unknown axis": dict(dynamic='["depth"]'),
    "nested deep": dict(input_size="[" * 100_000),
    "nested in a dictionary": dict(class_names='{"a":' * 3000 + "1" + "}" * 3000),
    "not JSON": dict(mean="grey"),
    "no inputs": dict(inputs="[]"),
    "inputs of other types": dict(inputs='{"x": 1}'),
    "a size of other types": dict(input_size='"32"'),
    "a fraction of classes": dict(num_classes="2.5"),
    "a large step": dict(size_multiple="0"),
    "a length": dict(length="[]", inputs='["images"]'),
    "words": dict(interpolation="by hand"),
    "a task": dict(task="5"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_forged_metadata_is_one_line(kind, onnx_file, tmp_path):
    proto = onnx.load(onnx_file[0])
    known = {entry.key: entry.value for entry in proto.metadata_props}
    onnx.helper.set_model_props(proto, known | FORGED[kind])
    onnx.save(proto, tmp_path / "x.onnx")
    refused(r"cannot read the metadata of .*x\.onnx: ", iso.deployment.open_artefact, tmp_path / "x.onnx")


def test_metadata_of_another_graph_is_one_line(onnx_file, tmp_path):
    proto = onnx.load(onnx_file[0])
    known = {entry.key: entry.value for entry in proto.metadata_props}
    onnx.helper.set_model_props(proto, known | {"inputs": '["pixels"]'})
    onnx.save(proto, tmp_path / "x.onnx")
    artefact = iso.deployment.open_artefact(tmp_path / "x.onnx")
    refused(
        "the exported model does not run on pixels of 1x3x16x16", lambda: artefact(pixels=torch.zeros(1, 3, 16, 16))
    )


def test_a_file_that_cannot_be_run(tmp_path):
    halved = nn.Sequential(nn.Conv2d(3, 4, 1), CutsHalf(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    with pytest.raises(iso.UserError, match=r"cannot save the model: .*; try it with dynamic batch alone") as error:
        iso.export(halved, tmp_path / "m.pt2", dynamic="batch,size", size=(8, 8))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_traced_is_said_with_the_place():
    shapes = plan_shapes(Scaled(), "batch", (8, 8))
    with pytest.raises(iso.UserError, match=r"torch.export cannot trace the model: "):
        trace(Scaled(lambda x: x if x.sum() > 0 else -x), shapes)
    refused(r"returns a tuple with 2 tensors, .*: model\(x\)\[0\]", trace, Scaled(lambda x: (x, x)), shapes)
    refused(r"returns a dict with 2 .*: model\(x\)\['a'\]", trace, Scaled(lambda x: {"a": x, "b": x}), shapes)


def test_an_operator_without_onnx_form_is_named(tmp_path):
    with pytest.raises(
        iso.UserError, match=r"ONNX cannot express the model: operator \w+\.(special_)?bessel_j0"
    ) as error:
        iso.export(Scaled(torch.special.bessel_j0), tmp_path / "x.onnx", size=(8, 8))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_the_cause_of_a_failure_is_named():
    failure = ValueError("step 2 failed")
    failure.__cause__ = RuntimeError("no kernel for aten::foo.bar here\nand more")
    assert name_failure(failure) == "operator aten.foo.bar (no kernel for aten::foo.bar here)"
    assert name_failure(ValueError("no")) == "no"


def test_a_file_that_deviates_is_not_written(tmp_path):
    model = Scaled(lambda x: x + torch.compiler.is_exporting())
    with pytest.raises(iso.surgery.NotEqual, match=r"NOT equal within 0.0001") as error:
        iso.export(model, tmp_path / "x.pt2", size=(8, 8))
    assert error.value.report.fp32 == pytest.approx(1)
    assert not list(tmp_path.iterdir())
    assert iso.export(model, tmp_path / "x.pt2", size=(8, 8), atol=20).deviation.passed


def test_constants_stay_small_and_weights_are_constants():
    """Of a T-CNN layer's position attention the file has the maps along its axes, not their product."""
    layer = iso.layers.GPSA2d(12, 12, kernel_size=3, padding=1)  # 9 heads do not divide 12 channels
    model = perturbed(nn.Sequential(nn.Conv2d(3, 12, 1), layer))
    proto = onnx_graph(model, plan_shapes(model, "batch", (8, 8)))
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    assert max(np.prod(tensor.dims) for tensor in weights.values()) <= 12 * 12 * 9
    products = [node for node in proto.graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    constant = [sum(name in weights for name in node.input[:2]) for node in products]
    assert sorted(constant) == [0, 0, 1, 1, 1]  # map, its product with the values; layers, chains merged


def test_export_leaves_the_model_alone():
    model = Net(iso.layers.GPSA(8, num_heads=4)).train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepared, _ = prepare(model, plan_shapes(model, "batch"))
    assert not any(module.training for module in prepared.modules())
    assert all(module.training for module in model.modules())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_files_that_cannot_be_written(tmp_path, monkeypatch):
    model, there = Scaled(), tmp_path / "there.pt2"
    there.write_text("mine")
    with pytest.raises(iso.UserError, match=r"there.pt2 exists; give overwrite to replace it"):
        iso.export(model, there, size=(8, 8))
    with pytest.raises(iso.UserError, match=r"x.jpg must end in .onnx or .pt2"):
        iso.export(model, tmp_path / "x.jpg")
    with pytest.raises(iso.UserError, match="opset 20 is for ONNX files"):
        iso.export(model, tmp_path / "x.pt2", opset=20)
    with pytest.raises(iso.UserError, match="opset 9 cannot be written; give 18 to 23"):
        iso.export(model, tmp_path / "x.onnx", opset=9)
    with pytest.raises(iso.UserError, match=r"cannot write .*there.pt2/x.pt2: "):
        iso.export(model, there / "x.pt2", size=(8, 8))
    with pytest.raises(iso.UserError, match=r"takes no images of 0 x 8|no pixels"):
        iso.export(model, tmp_path / "x.pt2", size=(0, 8))

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(iso.UserError, match=r"cannot write .*No space left on device"):
        iso.export(model, there, size=(8, 8), overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["there.pt2"]
    assert there.read_text() == "mine"


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(iso.UserError, match=r"needs onnxruntime, which .*pip install .*\[export\]"):
        iso.export(Scaled(), tmp_path / "x.onnx", size=(8, 8))
    (tmp_path / "x.onnx").write_bytes(b"")
    with pytest.raises(iso.UserError, match=r"needs onnxruntime"):
        iso.deployment.open_artefact(tmp_path / "x.onnx")


def test_other_files_are_not_opened(tmp_path):
    for name in ("x.onnx", "x.pt2"):
        (tmp_path / name).write_bytes(b"not a model")
        with pytest.raises(iso.UserError, match=f"{name} is not a readable .{name[2:]} file"):
            iso.deployment.open_artefact(tmp_path / name)
    program = torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    torch.export.save(program, tmp_path / "other.pt2")
    with pytest.raises(iso.UserError, match="does not say which images it expects"):
        iso.deployment.open_artefact(tmp_path / "other.pt2")
    with pytest.raises(iso.UserError, match="is not an exported model"):
        iso.deployment.open_artefact(tmp_path / "x.bin")
    with pytest.raises(iso.UserError, match="there is no file"):
        iso.deployment.open_artefact(tmp_path / "none.pt2")


def test_the_command_line_exports_and_evaluates(tmp_path):
    checkpoint = tmp_path / "small.safetensors"
    torch.manual_seed(0)
    small = dict(img_size=32, depth=1, embed_dim=12, num_heads=3, num_classes=10)
    iso.save(timm.create_model("vit_tiny_patch16_224", **small), checkpoint)
    run = isomorph("export", checkpoint, "--format", "pt2")
    assert run.returncode == 0, run.stderr
    assert "equal within 0.0001" in run.stdout
    assert f"wrote {tmp_path / 'small.pt2'}" in run.stdout
    test = ("--data", "digits", "--max-images", 20, "--json")
    exported = isomorph("evaluate", tmp_path / "small.pt2", *test)
    assert exported.returncode == 0, exported.stderr
    result = json.loads(exported.stdout)
    assert "macs" not in result
    assert "images_per_second" in result
    eager = json.loads(isomorph("evaluate", checkpoint, *test, "--no-cost").stdout)
    assert result["top1"] == eager["top1"]
    assert "give --overwrite" in refusal(isomorph("export", checkpoint, "--format", "pt2"))


BAD = {
    "format": (["--format", "jpg"], 'choose from: "onnx", "pt2"'),
    "ending": (["--format", "onnx", "--out", "x.pt2"], "--out x.pt2 must end in .onnx, or leave --format out"),
    "other ending": (["--out", "x.bin"], "--out x.bin must end in .onnx or .pt2"),
    "opset": (["--opset", "9"], "choose from: 18"),
    "opset of a program": (["--format", "pt2", "--opset", "20"], "--opset is for ONNX files"),
    "dynamic": (["--dynamic", "width"], 'choose from: "batch"'),
    "atol": (["--atol", "0"], "--atol 0 must be above 0"),
    "folder": (["--out", "/proc/none/x.onnx"], "cannot write /proc/none/x.onnx"),
    "weights": (["--weights", "x.pth"], "there is no checkpoint x.pth"),
}


def test_an_exported_model_is_not_exported_again():
    assert "give the checkpoint that it was made from" in refusal(isomorph("export", "x.onnx"))
    assert "x.onnx is an exported model" in refusal(isomorph("verify", "x.onnx", "cifar_resnet20"))


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(case, tmp_path):
    options, expected = BAD[case]
    pretrained = [] if "--weights" in options else ["--no-pretrained"]
    assert expected in refusal(isomorph("export", "cifar_resnet20", *options, *pretrained, folder=tmp_path))
    assert not list(tmp_path.iterdir())


def test_relative_attention_with_gradients_converts():
    """Users call torch's exporter themselves, without no_grad."""
    layer = iso.layers.RelativeAttention(8, num_heads=2, grid_size=(4, 4)).eval()
    program = torch.export.export(layer, (torch.randn(2, 4, 4, 8),))
    assert program.run_decompositions()


def test_branches_of_timm_merge_after_fused_pyramids():
    torch.manual_seed(0)
    net = timm.create_model("mobileone_s0", num_classes=3).stages[0][:2].eval()
    with torch.no_grad():
        for tensor in net.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand_like(tensor))
    wide = iso.recast(net, iso.LinearToPyramid("P-W1S"), where=["0", "1"])
    x = torch.randn(2, 48, 8, 8)
    assert iso.verify(net, iso.fuse(wide, x), x, atol=1e-4).passed
