"""The command line as a user meets it, in a process of its own."""

import json
import os
import shlex
import subprocess
import sys

import pytest
import timm

import isomorph as iso
import isomorph_command
from command_line import isomorph, refusal
from isomorph.models.cifar_resnet import CIFAR10_CLASSES

pytestmark = pytest.mark.slow


def refused(*arguments, folder=None):
    """Runs a command that must fail as a user's error; returns its one line."""
    return refusal(isomorph(*arguments, folder=folder))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "cnn.safetensors"
    iso.save(timm.create_model("cifar_resnet20"), path)
    return path


def test_recast_verify_revert(tmp_path, weights):
    out = tmp_path / "t.safetensors"
    run = isomorph("recast", weights, "--where", "layer3.2.conv?", "--out", out)
    assert run.returncode == 0, run.stderr
    assert "on 2 modules" in run.stdout
    assert "equal within 0.001" in run.stdout
    run = isomorph("verify", weights, out, "--size", 32, "37x45", "--json")
    assert json.loads(run.stdout)["passed"]
    back = isomorph("revert", out, "--out", tmp_path / "back.safetensors", "--json")
    found = json.loads(back.stdout)
    assert found["report"]["passed"]
    assert found["after"] < found["before"]
    assert iso.edits(iso.load(tmp_path / "back.safetensors")) == ()
    inserted = isomorph(
        "insert", weights, "--after", "layer3.1", "layer3.2", "--out", tmp_path / "new.safetensors"
    )
    assert inserted.stdout.startswith("equal within 0:"), inserted.stderr
    assert "after inserting 2 blocks" in inserted.stdout
    assert iso.edits(iso.load(tmp_path / "new.safetensors"))[-1].names == ("layer3.1", "layer3.2")
    isomorph(
        "recast",
        weights,
        "--where",
        "layer3.2.conv?",
        "--out",
        tmp_path / "paper.safetensors",
        "--init",
        "paper",
    )
    assert "NOT equal" in refused("verify", weights, tmp_path / "paper.safetensors")


def test_train_wide_fuse_and_train_on(tmp_path):
    """The life of a pyramid: trained, stopped mid-run, fused, fine-tuned thin."""
    small = [
        "model.kwargs={img_size: 16, patch_size: 4, embed_dim: 12, depth: 1, num_heads: 2}",
        "data.source=digits",
    ]
    small += [
        "data.size=[16,16]",
        "data.fraction=0.1",
        "epochs=1",
        "optim.warmup_epochs=0",
        "model.num_classes=10",
    ]
    run = isomorph(
        "train",
        "cifar_tdrl_scratch",
        *small,
        "out=run",
        "ema=0.9",
        "--monitor_every",
        "2",
        folder=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "run/monitor.jsonl").is_file()
    whole = isomorph("fuse", "run/model.safetensors", "--out", "whole.safetensors", folder=tmp_path)
    assert "replaced by their own fuse()" in whole.stdout, whole.stderr
    (tmp_path / "run/model.safetensors").unlink()  # as if the run had not come to its end
    for flags in ([], ["--no-ema", "--overwrite", "--json"]):
        fused = isomorph("fuse", "run", "--out", "thin.safetensors", *flags, folder=tmp_path)
        assert fused.returncode == 0, fused.stderr
    found = json.loads(fused.stdout)
    assert found["after"] < found["before"]
    assert found["report"]["passed"]
    assert "nothing to fuse" in refused(
        "fuse", "thin.safetensors", "--out", "x.safetensors", folder=tmp_path
    )
    plain = [field.replace("{img", "{layout: plain, img") for field in small]
    again = isomorph(
        "train",
        "cifar_tdrl_scratch",
        *plain,
        "model.weights=thin.safetensors",
        "out=again",
        folder=tmp_path,
    )
    assert again.returncode == 0, again.stderr


def test_lists(tmp_path):
    models = json.loads(isomorph("models", "--json").stdout)
    assert {row["name"]: row["parameters"] for row in models}["cifar_resnet20"] == 269_722
    shown = tmp_path / "mine.yaml"
    shown.write_text(isomorph("recipes", "show", "tcnn_resnetrs50").stdout)
    assert iso.load_recipe(str(shown)).optim.gate_lr == 0.1


BAD = {
    "evaluate {w} --dta digits": "--dta",
    "evaluate {w} --batch-size 0": '"0" for --batch-size; must be >= 1',
    "verify {w} {w} --atol nan": '"nan" for --atol; must be',
    "evaluate none.safetensors": "there is no checkpoint none.safetensors",
    "evaluate {w} --data imagefolder --root nowhere": "no folder nowhere",
    "recast {w} --where layer3.* --out few.safetensors": "give --overwrite",
    "evaluate cut.safetensors": "truncated",
    "evaluate {w} --data imagefolder --root images": "cannot read images/airplane/broken.png",
    "evaluate few.safetensors --data digits": "has 3 classes, the data has 10",
    "evaluate {w} --data digits --rfc-fill black": "give --rfc too",
    "evaluate {w} --suite imagenet --split 0.2": "--split cannot be combined with --suite",
    "robustness {w} --folder images --classes 5": "--classes is about the clean images",
    "analyze {w} --image images/airplane/broken.png --split 0.2": "--split is about the test images",
    "fuse {w} --no-norms --out x.safetensors": "has nothing to fuse",
    "recast {w} --no-pretrained --where layer3.* --out x.safetensors": "--no-pretrained asks for",
    "insert {w} --no-pretrained --after layer3.1 --out x.safetensors": "--no-pretrained asks for",
    "analyze {w} --no-pretrained --image images/airplane/broken.png": "--no-pretrained asks for",
    "resize {w} --patch 8 --out x.safetensors": "is not a vision transformer of timm",
    "port {w} cifar_resnet32 --out x.safetensors": "NOT equal",
    "recast {w} --where layer9.* --out x.safetensors": "'layer9.*' in --where matches no module; nearest names",
    "recast convnext_atto --no-pretrained --where stages.3.downsample.1 --out x.safetensors": "even sides",
    "train digits_cnn --optim.lrr 3": "optim.lrr is not a field (did you mean lr?)",
    "train digits_cnn --dry-run --data.batch_size 30 --scale.accumulate 4": "cannot be split evenly",
    "train digits_cnn --dry-run --model.freeze nothing": "matches no parameter",
    "train digits_cnn --monitor_every=5 out=never": "no attention layer with a known map",
}
"""Command lines that fail, and what their one line says."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, weights):
    folder = tmp_path_factory.mktemp("bad")
    whole = weights.read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    iso.save(timm.create_model("cifar_resnet20", num_classes=3), folder / "few.safetensors")
    for name in CIFAR10_CLASSES:
        (folder / "images" / name).mkdir(parents=True)
    (folder / "images/airplane/broken.png").write_bytes(b"not an image")
    return folder


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_clear_line_and_leaves_nothing(line, folder, weights):
    before = sorted(folder.rglob("*"))
    expected = BAD[line]
    said = refused(*shlex.split(line.replace("{w}", str(weights))), folder=folder)
    assert expected in said
    assert sorted(folder.rglob("*")) == before


def test_output_that_nobody_reads_ends_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, isomorph_command.__file__, "models"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, env=env
    )
    os.close(writing)
    assert ended.returncode == 141
    assert ended.stderr == ""


def test_the_model_of_a_run_is_not_replaced(tmp_path, weights):
    (tmp_path / "run").mkdir()
    model = tmp_path / "run" / "model.safetensors"
    model.write_bytes(weights.read_bytes())
    said = refused("fuse", tmp_path / "run", "--out", model, "--overwrite")
    assert "is the model that is changed" in said
    assert model.read_bytes() == weights.read_bytes()


def test_max_images_without_images_is_an_error(tmp_path, folder, weights):
    image = folder / "images/airplane/broken.png"
    said = refused("analyze", weights, "--image", image, "--max-images", 64)
    assert "--max-images is about the test images for CKA" in said
    (tmp_path / "run").mkdir()
    said = refused("compare", tmp_path / "run", "--max-images", 64)
    assert "--max-images is about the images of --along" in said
