"""The command line as a user meets it, in a process of its own."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from inspect import signature
from typing import get_args, get_type_hints

import pytest
import timm

import isomorph as iso
import isomorph_command
from command_line import isomorph, refusal
from isomorph.cli.options import LIMITS
from isomorph.cli.run import app
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


def test_recast_verify_evaluate(tmp_path, weights):
    out = tmp_path / "t.safetensors"
    run = isomorph("recast", weights, "--where", "layer3.2.conv?", "--out", out)
    assert run.returncode == 0, run.stderr
    assert "on 2 modules" in run.stdout
    assert "equal within 0.001" in run.stdout
    run = isomorph("verify", weights, out, "--size", 32, 32, "--size", 37, 45, "--json")
    assert json.loads(run.stdout)["passed"]
    run = isomorph("evaluate", out, "--data", "digits", "--json", "--max-images", 100)
    assert json.loads(run.stdout)["images"] == 100
    back = isomorph("revert", out, "--out", tmp_path / "back.safetensors", "--json")
    found = json.loads(back.stdout)
    assert found["report"]["passed"]
    assert found["after"] < found["before"]
    assert iso.edits(iso.load(tmp_path / "back.safetensors")) == ()
    isomorph("recast", weights, "--where", "layer3.2.conv?", "--out", tmp_path / "paper.safetensors", "--init", "paper")
    assert "NOT equal" in refused("verify", weights, tmp_path / "paper.safetensors")


def test_refine_and_calibrate(tmp_path):
    out = tmp_path / "refined.safetensors"
    vit = ["vit_tiny_patch16_224", "--no-pretrained", "--rule", "AttentionToRefined", "--where", "blocks.[01].attn"]
    run = isomorph("recast", *vit, "--ratio", 2, "--no-reduce", "--out", out)
    assert run.returncode == 0, run.stderr
    assert "AttentionToRefined(ratio=2" in run.stdout
    assert "reduce=False" in run.stdout
    assert "equal within 0.0001" in run.stdout
    assert "--ratio 2.5 must be a whole number" in refused("recast", *vit, "--ratio", 2.5, "--out", out)
    assert "14.5" in refused("recast", *vit, "--grid-size", 14.5, 14, "--out", out)
    assert "kernel 4 must be odd" in refused("recast", *vit, "--kernel", 4, "--out", out, "--overwrite")
    small = tmp_path / "small.safetensors"
    iso.save(timm.create_model("cifar_resnet20"), small)
    ratios = ["--rfc", 1, "--rfc", 1.2, "--no-cost", "--max-images", 50]
    run = isomorph("evaluate", small, "--data", "digits", *ratios, "--rfc-fill", "black", "--json")
    curve = json.loads(run.stdout)["curve"]
    assert [point["rfc"] for point in curve] == [1, 1.2]
    assert {point["rfc_fill"] for point in curve} == {"black"}
    run = isomorph("evaluate", small, "--data", "digits", *ratios)
    rows = [line.split() for line in run.stdout.splitlines()[2:4]]
    assert [row[0] for row in rows] == ["1", "1.2"]
    assert sum("*" in row for row in rows) == 1
    assert "leaves no image" in refused("evaluate", small, "--data", "digits", "--rfc", 0)


def test_train_with_flags_in_every_form(tmp_path):
    flags = [
        "--epochs",
        1,
        "--data.fraction=0.05",
        f"out={tmp_path / 'run'}",
        "--data.size",
        "[16,16]",
        "--optim.warmup_epochs",
        0,
    ]
    run = isomorph("train", "digits_cnn", *flags)
    assert run.returncode == 0, run.stderr
    assert "top-1" in run.stdout
    trained = json.loads((tmp_path / "run/log.jsonl").read_text().splitlines()[-1])
    again = json.loads(isomorph("evaluate", tmp_path / "run/model.safetensors", "--json", "--no-cost").stdout)
    assert again["images"] == 450
    assert again["top1"] == trained["top1"]


def test_train_wide_fuse_and_train_on(tmp_path):
    """The life of a pyramid: trained, stopped mid-run, fused with fresh statistics, fine-tuned thin."""
    small = ["model.kwargs={img_size: 16, patch_size: 4, embed_dim: 12, depth: 1, num_heads: 2}", "data.source=digits"]
    small += ["data.size=[16,16]", "data.fraction=0.1", "epochs=1", "optim.warmup_epochs=0", "model.num_classes=10"]
    run = isomorph("train", "cifar_tdrl", *small, "out=run", "ema=0.9", "--monitor_every", "2", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "run/monitor.jsonl").is_file()
    whole = isomorph("fuse", "run/model.safetensors", folder=tmp_path)
    assert "modules fused" in whole.stdout, whole.stderr
    (tmp_path / "run/model.safetensors").unlink()  # as if the run had not come to its end
    for flags in ([], ["--no-ema", "--overwrite"], ["--overwrite", "--recalibrate", "2", "--json"]):
        fused = isomorph("fuse", "run", "--out", "thin.safetensors", *flags, folder=tmp_path)
        assert fused.returncode == 0, fused.stderr
    found = json.loads(fused.stdout)
    assert found["after"] < found["before"]
    assert found["report"]["passed"]
    assert "nothing to fuse" in refused("fuse", "thin.safetensors", folder=tmp_path)
    plain = [field.replace("{img", "{layout: plain, img") for field in small]
    again = isomorph("train", "cifar_tdrl", *plain, "model.weights=thin.safetensors", "out=again", folder=tmp_path)
    assert again.returncode == 0, again.stderr


def test_lists(tmp_path):
    models = json.loads(isomorph("models", "--json").stdout)
    assert {row["name"]: row["parameters"] for row in models}["cifar_resnet20"] == 269_722
    listing = isomorph("recipes").stdout
    assert "tcnn_resnetrs50" in listing
    assert "81.0 top-1" in listing
    shown = tmp_path / "mine.yaml"
    shown.write_text(isomorph("recipes", "show", "tcnn_resnetrs50").stdout)
    assert iso.load_recipe(str(shown)).optim.gate_lr == 0.1


def test_doctor_finds_a_sound_machine():
    run = isomorph("doctor", "--json")
    found = json.loads(run.stdout)
    assert found["torchvision operators"]["ok"]
    assert found["torch"]["finding"]


def test_help_documents_every_field():
    text = isomorph("train", "--help").stdout
    assert "--optim.gate_lr" in text
    assert "--anneal.epochs" in text


SHORT = {
    "{recast}": "recast {w} --where layer3.* --out x.safetensors",
    "{vit}": "recast vit_tiny_patch16_224 --no-pretrained --where blocks.0.attn --out x.safetensors {refined}",
    "{refined}": "--rule AttentionToRefined",
    "{digits}": "9" * 5000,
    "{name}": "a" * 300,
}
BAD = [
    ("recast {w} --where layer9.* --out x.safetensors", "matches no module; nearest names"),
    ("recast {w} --where layer3.*.bn? --out x.safetensors", "recasts Conv2d"),
    ("recast convnext_atto --no-pretrained --where stages.3.downsample.1 --out x.safetensors", "even sides"),
    ("recast few.safetensors --where layer3.* --out few.safetensors", "give another file"),
    ("recast {w} --where layer3.* --out few.safetensors", "give --overwrite"),
    ("{vit} --size 100", "built for 224; give --size 224"),
    ("evaluate {w} --data digits --max-images 0", "must be at least 1"),
    ("recast {w} --where layer3.* --out x.pth", "must end in .safetensors"),
    ("{recast} --locality -1", "must be above 0"),
    ("{recast} --init exakt", "exact"),
    ("evaluate none.safetensors", "no checkpoint none.safetensors"),
    ("evaluate cifar_resnet21", "cifar_resnet20"),
    ("evaluate cut.safetensors", "truncated"),
    ("evaluate cifar_resnet20 --weights foreign.safetensors --data digits", "does not fit"),
    ("evaluate few.safetensors --data digits", "has 3 classes, the data has 10"),
    ("evaluate {w} --data imagefolder --root nowhere", "no folder nowhere"),
    ("evaluate {w} --data imagefolder --root images", "cannot read images/airplane/broken.png"),
    ("evaluate {w} --data imagefolder --root images --workers 1", "cannot read images/airplane/broken.png"),
    ("evaluate {w} --data cifar", "data source 'cifar' is unknown"),
    ("evaluate {w} --batch-size 0", "at least 1"),
    ("verify {w} {w} --atol x", "--atol x must be a number"),
    ("evaluate {w} --batch-size many", "--batch-size many must be a whole number"),
    ("evaluate {w} --data digits --device tpu", "device 'tpu' is not available"),
    ("train cifar_exat", "did you mean cifar_exact"),
    ("train digits_cnn --optim.lrr 3", "did you mean --optim.lr?"),
    ("train digits_cnn --optim.lr=0 --epochs=0", "2 problems"),
    ("train upernet_camvid --epochs 2", "is 400 iterations, so --epochs has no effect"),
    ("train digits_cnn --epochs", "--epochs VALUE"),
    ("recats", "recats"),
    ("evaluate {w} --dta digits", "--dta"),
    ("verify {w} {w} --size 2 0", "--size 0 must be at least 1"),
    ("verify {w} {w} --atol -1", "--atol -1 must be at least 0"),
    ("verify {w} {w} --atol nan", "--atol nan must be a number"),
    ("verify {w} {w} --max-images 5", "give --data too"),
    ("analyze {w} --image text.pth --out page.txt", "--out page.txt must end in .html"),
    ("fuse resnet18.pth", "there is no checkpoint resnet18.pth"),
    ("fuse text.pth --out x.safetensors", "cannot read checkpoint text.pth; it may be"),
    ("train digits_cnn --optim.min_lr 1 --optim.min-lr=2", "--optim.min-lr is given twice"),
    ("train digits_cnn --epochs 1 --epochs=2", "--epochs is given twice"),
    ("fuse resnet18", "resnet18 is a timm model, not a checkpoint; give a checkpoint"),
    ("trian", 'unknown command "trian"; did you mean "train"? See `isomorph --help`'),
    ("verify {w} {w} --batch -1", "--batch -1 must be at least 1"),
    ("{recast} --size -3 5", "--size -3 must be at least 1"),
    ("evaluate cspresnet50d --data digits", "cspresnet50d has no public weights"),
    ("{recast} --gate nan", "must be finite"),
    ("recast {w} --where layer3.* --out folder.safetensors", "cannot write"),
    ("train digits_cnn out=/proc/foo data.fraction=0.03", "cannot write /proc/foo"),
    ("train digits_cnn --augment.auto_augment rubbish", "cannot parse the policy"),
    ("train digits_cnn --anneal.epochs=1 out=never", "no gated attention layer to anneal"),
    ("evaluate four.safetensors --data digits", "the model reads images of 4 channels"),
    ("{recast} --layout P-W2S", "ConvToGPSA has no layout"),
    ("{recast} --rule LinearToPyramid --layout W2", "layout 'W2' is unknown"),
    ("{recast} --init same-function", "init 'same-function' is unknown; choose 'exact' or 'paper'"),
    ("{vit} --ratio 99999999999999999999", "ratio 99999999999999999999 must be a whole number from 0 to 64"),
    ("{recast} --rule AttentionToRefined --kernel {digits}", "must be a whole number"),
    ("{recast} --rule LinearToPyramid --layout P-W999999S", "numbers from 1 to 32"),
    ("fuse {w} --no-norms --out x.safetensors", "has nothing to fuse"),
    ("fuse none.safetensors", "no checkpoint none.safetensors"),
    ("fuse images", "nor the folder of a run with a snapshot"),
    ("fuse few.safetensors --out few.safetensors", "give another file"),
    ("fuse few.safetensors --out few.pth", "must end in .safetensors"),
    ("fuse few.safetensors --recalibrate -1", "--recalibrate -1 must be at least 0"),
    ("revert few.safetensors --where no*", "selects no layer that can be reverted"),
    ("revert few.safetensors --atol -1", "--atol -1 must be at least 0"),
    ("revert few.safetensors --out few.safetensors", "give another file"),
    ("train digits_cnn --monitor_every=5 out=never", "no attention layer with a known map"),
    ("models vgg*", "no model of isomorph matches"),
    ("analyze {w} --image x.png --megabytes inf", "--megabytes inf is out of"),
    ("analyze {w} --image x.png --megabytes nan", "--megabytes nan must be a number"),
    ("bench {w} --batch-size 0", "--batch-size 0 must be at least 1"),
    ("bench {w} --against {w}", "twice"),
    ("bench vit_tiny_patch16_224 --size 5 5", "takes no images of 5 x 5"),
    ("bench {w} --seconds inf", "--seconds inf is out of range; give at most 86,400"),
    ("bench {w} --seconds -1", "--seconds -1 must be at least 0"),
    ("sample {w} --out grid.png --steps 0", "--steps 0 must be at least 1"),
    ("evaluate {w} --data digits --batch-size 99999999999999999999", "--batch-size 1e+20 is out of"),
    ("verify {w} {w} --size 8 99999999999999999999", "--size 1e+20 is out of range"),
    ("robustness {w} --data digits --workers 9999", "--workers 9,999 is out of"),
    ("robustness {w} --data digits --max-images 1.5", "1.5 must be a whole number"),
    ("bench {w} --size 32 32.5", "is not a size; write --size 96, or"),
    ("robustness {w} --folder empty", "empty has no folder gaussian_noise; unpack it"),
    ("bench vit_tiny_patch16_224.nope", "vit_tiny_patch16_224 has no weights tagged 'nope'"),
    ("bench {name}", "cannot open aaa"),
    ("analyze {w} --image text.pth --image none.png", "there is no file none.png"),
    ("predict {w} --image images", "images is a folder"),
    ("evaluate --model nets:build --data digits", "cannot build a model by nets:build (ModuleNotFoundError: No module"),
    ("verify {w} {w} --split 0.5", "--split is about the images of --data; give --data too"),
    ("train tcnn_late_100 --iterations 10 data.source=digits", "give --model.recast_epoch=0 too, or epochs"),
]
"""Command lines that fail, and what their one line says."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, weights):
    folder = tmp_path_factory.mktemp("bad")
    whole = weights.read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    iso.save(timm.create_model("cifar_resnet32"), folder / "foreign.safetensors")
    iso.save(timm.create_model("cifar_resnet20", num_classes=3), folder / "few.safetensors")
    iso.save(timm.create_model("cifar_resnet20", in_chans=4), folder / "four.safetensors")
    (folder / "folder.safetensors").mkdir()
    (folder / "text.pth").write_text("hello, this is a text file\n")
    (folder / "empty").mkdir()
    for name in CIFAR10_CLASSES:
        (folder / "images" / name).mkdir(parents=True)
    (folder / "images/airplane/broken.png").write_bytes(b"not an image")
    return folder


@pytest.mark.parametrize(("line", "expected"), BAD)
def test_bad_input_is_one_clear_line_and_leaves_nothing(line, expected, folder, weights):
    before = sorted(folder.rglob("*"))
    for short, long in {**SHORT, "{w}": str(weights)}.items():
        line = line.replace(short, long)
    said = refused(*shlex.split(line), folder=folder)
    assert any(part in said for part in expected.split("|")), said
    assert sorted(folder.rglob("*")) == before


def plain_types(annotation):
    """The types that an annotation is made of."""
    parts = get_args(annotation)
    return {annotation} if not parts and isinstance(annotation, type) else set().union(*map(plain_types, parts))


def test_every_number_has_a_limit():
    """In every command, whatever it does with it; fields of rules have their own."""
    commands = [app[name] for name in app if not name.startswith("-")]
    options = [p for c in commands if c.default_command for p in signature(c.default_command).parameters.values()]
    groups = [p.annotation for p in options if dataclasses.is_dataclass(p.annotation) and p.name != "fields"]
    given = [(p.name, p.annotation) for p in options]
    given += [named for group in groups for named in get_type_hints(group, include_extras=True).items()]
    numbers = [name for name, annotation in given if {int, float} & plain_types(annotation)]
    assert len(numbers) > 20
    assert set(numbers) == set(LIMITS)


NOBODY_READS = {
    "more than a buffer": (["recipes"], 141, ""),
    "less": (["recipes", "digits_cnn"], 141, ""),
    "help": (["--help"], 141, ""),
    "table": (["evaluate", "{weights}", "--data", "digits", "--max-images", "20"], 141, ""),
    "error": (["evaluate", "nothing"], 2, "isomorph: there is no model 'nothing'"),
}


@pytest.mark.parametrize("case", NOBODY_READS)
def test_output_that_nobody_reads_ends_quietly(case, weights):
    arguments, status, said = NOBODY_READS[case]
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, isomorph_command.__file__, *(a.format(weights=weights) for a in arguments)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, env=env)
    os.close(writing)
    assert ended.returncode == status
    assert ended.stderr.startswith(said)
    assert len(ended.stderr.splitlines()) == bool(said)
