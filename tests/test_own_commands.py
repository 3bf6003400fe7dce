"""Every command on a checkpoint of another program and a folder of images; what a stranger gets wrong is one line."""

import json

import pytest
import timm
import torch

import isomorph as iso
from command_line import isomorph, refusal
from isomorph.lab.training.open import needs_options
from test_own_checkpoints import cnn, timm_script
from test_own_images import images


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of three classes, one of timm's script with averaged weights, a ViT built for 48, and photos."""
    top = tmp_path_factory.mktemp("own")
    model = cnn("cifar_resnet20")
    torch.save(
        {"state_dict": {f"module.{n}": t for n, t in model.state_dict().items()}}, top / "my.pth"
    )
    torch.save(
        timm_script(model, cnn("cifar_resnet20"), model="cifar_resnet20", img_size=32),
        top / "best.pth.tar",
    )
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=48, depth=1)
    torch.save(vit.state_dict(), top / "vit.pth")
    iso.save(cnn("cifar_resnet20", in_chans=1), top / "grey.safetensors")
    iso.save(
        iso.recast(torch.nn.Sequential(torch.nn.Linear(4, 4)), iso.LinearToPyramid()),
        top / "own.safetensors",
    )
    (top / "code.yaml").write_text("model: {name: os:system}")
    torch.save(
        {name: tensor * float("nan") for name, tensor in model.state_dict().items()},
        top / "nan.pth",
    )
    images(top / "photos", each=4)
    return top


OWN = "my.pth --arch cifar_resnet20"
VIT = "vit.pth --arch vit_tiny_patch16_224 --model-kwargs depth=1"
SPLIT = "--data photos --split 0.25"
FINETUNE = f"train finetune {SPLIT} --epochs 1 --optim.warmup_epochs 0"


def answer(folder, line):
    """What a command prints as JSON, and its notes."""
    run = isomorph(*line.split(), "--json", folder=folder)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1]), run.stderr


def left_out(folder):
    """The number of photos that a split of a quarter leaves out."""
    return len(iso.data.open_source(folder / "photos", "test", test_fraction=0.25))


def test_recast_verify_evaluate(folder):
    made, _ = answer(folder, f"recast {OWN} --where layer3.2.conv? --out t.safetensors")
    assert made["recast"] == ["layer3.2.conv1", "layer3.2.conv2"]
    verify = "verify my.pth t.safetensors --arch cifar_resnet20 --data photos"
    assert answer(folder, verify)[0]["passed"]
    assert [row["name"][:9] for row in answer(folder, f"{verify} --size 24x16")[0]["inputs"]] == [
        "2x3x24x16"
    ] * 2
    models = (OWN, "t.safetensors")
    own, recast = (
        answer(folder, f"evaluate {model} --data photos --no-cost")[0] for model in models
    )
    assert own["images"] == recast["images"] == 12
    assert own["top1"] == recast["top1"]
    assert answer(folder, f"evaluate t.safetensors {SPLIT} --no-cost")[0]["images"] == left_out(
        folder
    )


def test_the_script_of_timm_and_the_choice_of_weights(folder):
    averaged = "averaged weights (EMA, state_dict_ema); --no-ema"
    last = "last weights (state_dict)"
    for more, said in (("", averaged), ("--no-ema", last)):
        assert said in answer(folder, f"evaluate best.pth.tar --data photos --no-cost {more}")[1]


def test_the_other_commands(folder):
    quick = "--seconds 0 --batch-size 1 --no-peak"
    rows, _ = answer(folder, f"bench {VIT} {quick}")
    assert rows[0]["height"] == rows[0]["width"] == 48
    rows, _ = answer(folder, f"bench {OWN} --num-classes 3 --against resnet18 {quick}")
    # the options are those of the checkpoint alone
    assert [row["model"] for row in rows] == ["my.pth", "resnet18"]
    result, _ = answer(folder, f"robustness {VIT} --data photos --corruption fog --severity 1")
    assert result["size"] == [48, 48]
    assert result["images"] == 12
    answer(folder, f"analyze {VIT} --image photos/pear/0.png --data photos --max-images 8")
    answer(
        folder,
        f"recast {VIT} --rule LinearToPyramid --where blocks.*.mlp.fc? --out wide.safetensors",
    )
    answer(folder, "fuse wide.safetensors --out thin.safetensors")


def test_train_on_the_folder(folder):
    for more in ("my.pth --model.name cifar_resnet20 --out runs/b", "best.pth.tar --out runs/c"):
        run = isomorph(*f"{FINETUNE} --model.weights {more}".split(), folder=folder)
        assert run.returncode == 0, run.stderr
    for command, where in SPLIT_COMMANDS.items():
        found, _ = answer(folder, f"{command} --data photos")
        for key in where:
            found = found[key]
        assert not where or found == left_out(folder), command
    assert answer(folder, "evaluate runs/c --data photos --no-cost --split 1")[0]["images"] == 12
    said = refusal(
        isomorph(
            *["evaluate", "runs/c/model.safetensors", "--data", "photos", "--split", "0.5"],
            folder=folder,
        )
    )
    assert "--split 0.25 to test on the images left out" in said
    _, notes = answer(folder, "evaluate runs/c --no-cost")  # and the folder
    assert "isomorph: runs/c: weights of the finished run, after 1 of 1 epochs" in notes


SPLIT_COMMANDS = {
    "evaluate runs/c --no-cost": ["images"],
    "evaluate runs/c/model.safetensors --no-cost": ["images"],
    "robustness runs/c --corruption fog --severity 1": ["images"],
    "quantize runs/c --images 4 --out q.onnx --weights-only": ["accuracy", "int8", "images"],
    "analyze runs/c --image photos/pear/0.png --max-images 4 --out split.html": [],
}
"""Commands that test on the images that training left out, a quarter of twelve, without being told."""

WRONG = {
    "evaluate my.pth": "give --arch NAME, one of timm.list_models(), or --arch package.module:function",
    "evaluate my.pth --arch resnet18": "resnet18 without other arguments asks for 11,186,132",
    "evaluate my.pth --arch resnet_18": "there is no model 'resnet_18'",
    "evaluate my.pth --arch Net()": "timm.list_models(). A class of yours is package.module:Net",
    "evaluate networks.Net": "A function of yours is networks:Net",
    f"evaluate {OWN} --num-classes 4": "the checkpoint has 3",
    f"evaluate {OWN} --model-kwargs img_size": "must be NAME=VALUE",
    f"evaluate {OWN} --model-kwargs img_size=96": "timm cannot create cifar_resnet20",
    "evaluate resnet18 --arch cifar_resnet20": "--arch is for checkpoints",
    "evaluate mine.pth --arch cifar_resnet20": "no checkpoint mine.pth",
    "bench resnet18 --against resnet34 --arch resnet18": "--arch is for checkpoints",
    "verify grey.safetensors grey.safetensors --arch resnet18": "leave --arch resnet18 out",
    "verify my.pth grey.safetensors --arch cifar_resnet20": "1-channel",
    f"fuse {VIT} --out x.safetensors": "has nothing to fuse",
    f"{FINETUNE} --model.weights my.pth --out runs/a": "give --model.name NAME",
    f"{FINETUNE} --model.name net:build --model.kwargs.classes 4 --out runs/a": "4 classes, the data has 3 (",
    f"{FINETUNE} --model.name net:build --model.num_classes 3 --out runs/a": "model.num_classes cannot be passed to",
    f"{FINETUNE} --model.name net:built --out runs/a": "no attribute 'built'); did you mean net:build?",
    "evaluate nett:build": "No module named 'nett'); give it as Python imports it",
    "evaluate net:build --model-kwargs classes=none": "its arguments as --model-kwargs",
    "evaluate own.safetensors": "give --arch package.module:function of your code",
    "train code.yaml": "model.name os:system would run code that a file names",
    "train finetun": "did you mean finetune, ",
}

NET = """from torch import nn
def build(classes=3):
    conv = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    blocks = [nn.Sequential(*conv[:3]), nn.Sequential(conv[3], nn.ReLU())]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))
"""


def test_a_model_of_a_function_from_its_weights_to_the_compared_runs(folder, monkeypatch):
    (folder / "net.py").write_text(NET)
    arch = "--arch net:build"
    page = "--overwrite --out own.html"
    answer(folder, "recast net:build --where 1.0 --size 16 --out t_own.safetensors")
    for name, more in (("own", "--model.weights t_own.safetensors"), ("plain", "")):
        train = f"{FINETUNE} --model.name net:build --size 16 {more} --out runs/{name}"
        run = isomorph(*train.split(), folder=folder)
        assert run.returncode == 0, run.stderr
        assert " images of 16 x 16 in batches of" in run.stdout
        shown, notes = answer(folder, f"evaluate runs/{name} {arch} --data photos --no-cost")
        assert shown["images"] == left_out(folder)
        assert "as for ImageNet" not in notes  # a run says which images it takes
    both = f"runs/own {arch} --against runs/plain/model.safetensors"
    answer(folder, f"analyze {both} --image photos/pear/0.png --data photos {page}")
    found, _ = answer(folder, f"compare runs/own runs/plain {arch} {page}")
    assert [point["name"] for point in found["points"]] == ["own", "plain"]
    _, notes = answer(folder, "evaluate net:build --data photos --no-cost --size 16")
    with monkeypatch.context() as patched:  # what needs --arch is seen without reading the tensors
        patched.setattr("isomorph.lab.training.run.snapshot._checksum", None)
        assert [needs_options(str(folder / f"runs/{name}")) for name in ("own", "plain")] == [
            True,
            True,
        ]
    answer(folder, "fuse net:build --size 16 --out merged.safetensors")
    assert (
        "its weights are those that the function returns; images are prepared as for ImageNet: own size 224 x 224"
        in notes
    )


def test_weights_that_are_not_finite_are_said(folder):
    train = f"{FINETUNE} --model.name cifar_resnet20 --model.weights nan.pth --out runs/a"
    run = isomorph(*train.split(), folder=folder)
    assert run.returncode == 1
    assert run.stderr == "isomorph: conv1.weight is not finite; load weights that are\n"
    layer = torch.nn.Linear(2, 2)
    layer.weight.data[0, 0] = float("nan")
    with pytest.warns(UserWarning, match="weight is not finite"):
        iso.save(layer, folder / "nan.safetensors")


def test_what_a_stranger_gets_wrong_is_one_line(folder):
    (folder / "net.py").write_text(NET)
    for line, said in WRONG.items():
        assert said in refusal(isomorph(*line.split(), folder=folder)), line
