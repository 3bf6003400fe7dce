"""Every command on a checkpoint of another program and a folder of images; what a stranger gets wrong is one line."""

import json

import pytest
import timm
import torch

import isomorph as iso
from command_line import isomorph, refusal
from test_own_checkpoints import broken_files, cnn, timm_script
from test_own_images import images, network, wrong_folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of three classes, one of timm's script with averaged weights, a ViT built for 48, and photos."""
    top = tmp_path_factory.mktemp("own")
    model = cnn("cifar_resnet20")
    torch.save({"state_dict": {f"module.{n}": t for n, t in model.state_dict().items()}}, top / "my.pth")
    torch.save(timm_script(model, cnn("cifar_resnet20"), model="cifar_resnet20", img_size=32), top / "best.pth.tar")
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=48, depth=1)
    torch.save(vit.state_dict(), top / "vit.pth")
    images(top / "photos", each=4)
    return top


def answer(folder, *arguments):
    """What a command prints as JSON, and its notes."""
    run = isomorph(*arguments, "--json", folder=folder)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1]), run.stderr


def left_out(folder):
    """The number of photos that a split of a quarter leaves out."""
    return len(iso.data.open_source(folder / "photos", "test", test_fraction=0.25))


ARCH = ("--arch", "cifar_resnet20")


def test_recast_verify_evaluate(folder):
    made, _ = answer(folder, "recast", "my.pth", *ARCH, "--where", "layer3.2.conv?", "--out", "t.safetensors")
    assert made["recast"] == ["layer3.2.conv1", "layer3.2.conv2"]
    assert answer(folder, "verify", "my.pth", "t.safetensors", *ARCH, "--data", "photos")[0]["passed"]
    sized, _ = answer(folder, "verify", "my.pth", "t.safetensors", *ARCH, "--data", "photos", "--size", "24", "16")
    assert [row["shape"] for row in sized["inputs"]] == ["2x3x24x16"] * 2
    own, recast = (
        answer(folder, "evaluate", *words, "--data", "photos", "--no-cost")[0]
        for words in (("my.pth", *ARCH), ("t.safetensors",))
    )
    assert own["images"] == recast["images"] == 12
    assert own["top1"] == recast["top1"]
    held_out, _ = answer(folder, "evaluate", "t.safetensors", "--data", "photos", "--split", "0.25", "--no-cost")
    assert held_out["images"] == left_out(folder)


def test_the_script_of_timm_and_the_choice_of_weights(folder):
    _, said = answer(folder, "evaluate", "best.pth.tar", "--data", "photos", "--no-cost")
    assert "isomorph: best.pth.tar: averaged weights (EMA, state_dict_ema); --no-ema" in said
    _, said = answer(folder, "evaluate", "best.pth.tar", "--no-ema", "--data", "photos", "--no-cost")
    assert "last weights (state_dict)" in said


def test_the_other_commands(folder):
    vit = ("vit.pth", "--arch", "vit_tiny_patch16_224")
    rows, _ = answer(folder, "bench", *vit, "--seconds", "0", "--batch-size", "1", "--no-peak")
    assert rows[0]["height"] == rows[0]["width"] == 48
    result, _ = answer(folder, "robustness", *vit, "--data", "photos", "--corruption", "fog", "--severity", "1")
    assert (result["size"], result["images"]) == ([48, 48], 12)
    answer(folder, "analyze", *vit, "--image", "photos/pear/0.png", "--data", "photos", "--max-images", "8")
    wide = ("--rule", "LinearToPyramid", "--where", "blocks.*.mlp.fc?", "--out", "wide.safetensors")
    answer(folder, "recast", *vit, *wide)
    answer(folder, "fuse", "wide.safetensors", "--out", "thin.safetensors")
    assert "has nothing to fuse" in refusal(isomorph("fuse", *vit, folder=folder))


def test_train_on_the_folder(folder):
    options = ("--data", "photos", "--split", "0.25", "--epochs", "1", "--optim.warmup_epochs", "0")
    for name, more in (("a", ()), ("b", ("--model.name", "cifar_resnet20"))):
        run = isomorph(
            "train", "finetune", "--model.weights", "my.pth", *more, *options, "--out", f"runs/{name}", folder=folder
        )
        if name == "b":
            assert run.returncode == 0, run.stderr
        else:
            assert "give --model.name cifar_resnet20" in refusal(run)
    run = isomorph("train", "finetune", "--model.weights", "best.pth.tar", *options, "--out", "runs/c", folder=folder)
    assert run.returncode == 0, run.stderr
    said = refusal(isomorph("evaluate", "runs/c", "--data", "photos", folder=folder))
    assert "--split 0.25 to test on the images left out" in said
    assert answer(folder, "evaluate", "runs/c", "--data", "photos", "--split", "0.25", "--no-cost")[0][
        "images"
    ] == left_out(folder)


def test_options_of_a_checkpoint_leave_models_by_name_alone(folder):
    options = ("--arch", "cifar_resnet20", "--num-classes", "3")
    rows, _ = answer(
        folder, "bench", "my.pth", *options, "--against", "resnet18", "--seconds", "0", "--batch-size", "1", "--no-peak"
    )
    assert [row["model"] for row in rows] == ["my.pth", "resnet18"]
    alone = isomorph("bench", "resnet18", "--against", "resnet34", "--arch", "resnet18", folder=folder)
    assert "--arch is for checkpoints" in refusal(alone)


def test_options_of_a_checkpoint_are_about_those_of_other_programs(folder):
    arch = ("--arch", "cifar_resnet20")
    iso.save(cnn("cifar_resnet20", in_chans=1), folder / "grey.safetensors")
    assert "leave --arch resnet18 out" in refusal(
        isomorph("verify", *["grey.safetensors"] * 2, "--arch", "resnet18", folder=folder)
    )
    assert "1-channel" in refusal(isomorph("verify", "my.pth", "grey.safetensors", *arch, folder=folder))


def test_what_a_stranger_gets_wrong_is_one_line(folder, tmp_path):
    bad = {
        ("my.pth",): "give --arch cifar_resnet20",
        ("my.pth", "--arch", "resnet18"): "give --arch cifar_resnet20",
        ("my.pth", "--arch", "resnet_18"): "there is no model 'resnet_18'",
        ("my.pth", *ARCH, "--num-classes", "4"): "the checkpoint has 3",
        ("my.pth", *ARCH, "--model-kwargs", "img_size"): "must be NAME=VALUE",
        ("my.pth", *ARCH, "--model-kwargs", "img_size=96"): "timm cannot create cifar_resnet20",
        ("resnet18", *ARCH): "--arch is for checkpoints",
        ("mine.pth", *ARCH): "no checkpoint mine.pth",
    }
    for words, said in bad.items():
        assert said in refusal(isomorph("evaluate", *words, "--data", "photos", folder=folder)), words
    for name, said in broken_files(tmp_path).items():
        assert said in refusal(isomorph("evaluate", name, *ARCH, "--data", "digits", folder=tmp_path)), name


def test_wrong_folders(folder, tmp_path):
    iso.save(network(), tmp_path / "m.safetensors")
    for name in wrong_folders(tmp_path):
        line = refusal(isomorph("evaluate", "m.safetensors", "--data", name, folder=tmp_path))
        assert name in line
