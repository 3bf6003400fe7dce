"""Models on the Hugging Face hub: written for it, pushed, loaded by isomorph and by timm; and all that can be wrong."""

import json
import re
import socket
import time

import numpy as np
import pytest
import timm
import torch
import yaml
from huggingface_hub import constants

import isomorph as iso
from hub_server import TOKEN, Hub
from isomorph.checkpoints.model import record_data
from isomorph.cli import main
from isomorph.deployment.model_card import model_card
from isomorph.models import download
from isomorph.models.input_sizes import evaluation_config, random_inputs
from refusals import refused
from small_models import CONVIT

# of the hub's own client
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def server():
    hub = Hub()
    yield hub
    hub.close()


def point_to(url, tmp_path, monkeypatch):
    """The hub's client talks to this address, with a cache of its own and no token."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    server.repositories.clear()
    server.requests.clear()
    point_to(server.url, tmp_path, monkeypatch)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return server


@pytest.fixture(scope="module")
def models():
    """By name: the model, and if timm can build it."""
    cnn = timm.create_model("cifar_resnet20", num_classes=4)
    vit = timm.create_model(
        "vit_tiny_patch16_224", depth=1, embed_dim=48, num_heads=3, img_size=64, num_classes=5
    )
    pyramids = iso.recast(vit, iso.LinearToPyramid(), where="blocks.*.mlp.fc?").eval()
    return {
        "plain": (vit, True),
        "public": (cnn, True),  # an architecture whose public weights may be in $ISOMORPH_DATA
        "ours": (timm.create_model("convit_ti", **CONVIT), True),
        "recast": (iso.recast(cnn, iso.ConvToGPSA(), where="layer3.0.conv1"), False),
        "unstride": (
            iso.unstride(cnn, "layer3"),
            False,
        ),  # the tensors of the base, and another function
        "pyramids": (pyramids, False),
        "fused": (iso.fuse(pyramids), True),
        "half": (timm.create_model("convit_ti", **CONVIT).bfloat16(), True),
        "drop_path": (timm.create_model("resnet10t", num_classes=2, drop_path_rate=0.1), True),
    }


NAMES = ("plain", "public", "ours", "recast", "unstride", "pyramids", "fused", "half", "drop_path")


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_the_model_in_isomorph_and_in_timm(name, models, tmp_path):
    """timm loads what it can build; it ends with an error for what it cannot, also with other classes (not strict)."""
    model = models[name][0].eval()
    in_timm = models[name][1]
    iso.save_for_hub(model, tmp_path / "shared", f"me/{name}", results={"top1": np.float64(90)})
    images = random_inputs(2, model).to(next(model.parameters()).dtype)
    loaded = iso.load(tmp_path / "shared" / "model.safetensors")
    with torch.no_grad():
        expected = model(images)
        assert torch.equal(loaded(images), expected)
        if in_timm:
            theirs = timm.create_model(f"local-dir:{tmp_path / 'shared'}", pretrained=True).eval()
            torch.testing.assert_close(theirs.to(images.dtype)(images), expected)
    card = (tmp_path / "shared/README.md").read_text()
    assert ("timm.create_model(" in card) == in_timm
    assert f'iso.load("hf-hub:me/{name}")' in card
    assert yaml.safe_load(card.split("---")[1])["library_name"] == (
        "timm" if in_timm else "isomorph"
    )
    for options in ({}, {"num_classes": 2}) if not in_timm else ():
        with pytest.raises(
            RuntimeError, match=r"Unknown model .*load it with isomorph\.load\('hf-hub:me/"
        ):
            timm.create_model(f"local-dir:{tmp_path / 'shared'}", pretrained=True, **options)


def test_the_images_are_those_of_the_model_not_of_the_public_weights(tmp_path):
    # its public weights have a crop of their own for tests
    model = timm.create_model("resnet18", num_classes=2)
    images = dict(
        input_size=(3, 64, 64),
        mean=(0.3,) * 3,
        std=(0.7,) * 3,
        interpolation="bilinear",
        crop_pct=0.8,
    )
    record_data(
        model, {**images, "crop_mode": "center", "label_names": ["a", "b"], "split": (0.2, 50)}
    )
    iso.save_for_hub(model, tmp_path, "me/small")
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    for key, value in evaluation_config(theirs).items():
        assert (
            value == evaluation_config(model)[key] or tuple(value) == evaluation_config(model)[key]
        ), key
    assert theirs.pretrained_cfg["label_names"] == ["a", "b"]
    iso.save_for_hub(
        timm.create_model("cifar_resnet20", num_classes=3), tmp_path / "three", "me/three"
    )
    assert (
        "label_names"
        not in json.loads((tmp_path / "three/config.json").read_text())["pretrained_cfg"]
    )
    assert not {"license", "tag"} & set(
        json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    )


class TestPush:
    def test_and_load(self, hub, models):
        model = models["recast"][0].eval()
        assert iso.push(model, "me/cnn", private=True) == f"{hub.url}/me/cnn"
        assert hub.repositories["me/cnn"]["private"]
        (commit,) = hub.repositories["me/cnn"]["branches"]["main"]
        assert sorted(commit["files"]) == ["README.md", "config.json", "model.safetensors"]
        own = json.loads(commit["files"]["config.json"])["isomorph"]
        assert own["base"]["name"] == "cifar_resnet20"
        assert [edit["rule"] for edit in own["edits"]] == ["ConvToGPSA"]
        images = random_inputs(1, model)
        assert torch.equal(iso.load("hf-hub:me/cnn")(images), model(images))

    def test_another_model_and_an_edited_card(self, hub, models):
        first = models["ours"][0].eval()
        second = models["plain"][0].eval()
        iso.push(first, "me/vit")
        hub.files("me/vit")["README.md"] = b"mine"
        assert iso.load("hf-hub:me/vit").num_classes == 10
        with pytest.warns(UserWarning, match="me/vit keeps its README.md"):
            iso.push(second, "me/vit")
        assert hub.files("me/vit")["README.md"] == b"mine"
        assert iso.load("hf-hub:me/vit").num_classes == 5  # not what was downloaded before
        assert iso.load("hf-hub:me/vit@main").num_classes == 5
        assert timm.create_model("hf-hub:me/vit", pretrained=True).num_classes == 5

    def test_private_is_refused_where_others_already_read_it(self, hub, models):
        iso.push(models["plain"][0], "me/vit")
        (commit,) = hub.repositories["me/vit"]["branches"]["main"]
        said = "me/vit exists and is public; make it private in its settings, or leave out"
        refused(said, iso.push, models["ours"][0], "me/vit", private=True)
        assert hub.repositories["me/vit"] == {"private": False, "branches": {"main": [commit]}}


class TestLoad:
    def test_a_model_of_timm(self, hub, tmp_path):
        """Architecture and images from timm's config.json; the weights are read from safetensors alone."""
        model = timm.create_model(
            "vit_tiny_patch16_224", depth=1, embed_dim=48, num_heads=3, img_size=64, num_classes=5
        )
        timm.models.save_for_hf(model, tmp_path / "theirs", safe_serialization=True)
        files = {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
        hub.add("they/vit", **files)
        loaded = iso.load("hf-hub:they/vit")
        images = random_inputs(1, model)
        assert torch.equal(loaded(images), model.eval()(images))

    def test_a_revision(self, hub, models, tmp_path):
        """Of a branch by either way to name it; main stays what it is."""
        for name, folder in (("ours", "first"), ("plain", "second")):
            iso.save_for_hub(models[name][0], tmp_path / folder, "me/vit")
        first, second = (
            {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
            for folder in ("first", "second")
        )
        hub.add("me/vit", **first)
        commit = hub.commit("me/vit", "v2", second, "another")
        assert iso.load("hf-hub:me/vit").num_classes == 10
        for loaded in (
            iso.load("hf-hub:me/vit", revision="v2"),
            iso.load("hf-hub:me/vit@v2"),
            iso.load("hf-hub:me/vit", revision=commit),
        ):
            images = random_inputs(1, loaded)
            assert torch.equal(loaded.eval()(images), models["plain"][0].eval()(images))
        assert iso.load("hf-hub:me/vit", revision="main").num_classes == 10
        own = tmp_path / "first" / "model.safetensors"
        refused("revision 'v2' is for models on the hub", iso.load, own, revision="v2")

    def test_without_a_network(self, hub, models, tmp_path, monkeypatch):
        """From the cache if it is there, else one line at once, whatever does not answer."""
        iso.push(models["ours"][0], "me/vit")
        iso.load("hf-hub:me/vit")
        monkeypatch.setattr(download, "PATIENCE", 0.4)
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            point_to(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, monkeypatch)
            start = time.monotonic()
            assert iso.load("hf-hub:me/vit").num_classes == 10
            refused(
                r"cannot reach http://127.*run `hf download me/other --local-dir",
                iso.load,
                "hf-hub:me/other",
            )
            refused(
                r"hf-hub:me/vit@v3 has.*download me/vit --revision v3 --local-dir",
                iso.load,
                "hf-hub:me/vit@v3",
            )
            assert time.monotonic() - start < 3
            monkeypatch.setenv("HF_TOKEN", TOKEN)
            refused(
                r"cannot reach http://127.*--out FOLDER", iso.push, models["ours"][0], "me/other"
            )


def run(capsys, *arguments):
    """`isomorph ARGUMENTS` in this process: what it prints, and how it ends."""
    code = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    model = {
        "name": "convit_ti",
        "kwargs": {key: CONVIT[key] for key in CONVIT if key != "num_classes"},
    }
    data = {
        "source": "digits",
        "fraction": 0.02,
        "size": [32, 32],
        "batch_size": 13,
        "test_images": 50,
    }
    iso.train(
        iso.Recipe(name="tiny", model=model, data=data, epochs=1, out=str(folder)), show=False
    )
    return folder


def test_commands(hub, trained, capsys, tmp_path):
    """A run is pushed; its name on the hub is a model for every command."""
    code, out, err = run(capsys, "push", trained, "me/tiny")
    assert (code, out) == (
        0,
        f"pushed to {hub.url}/me/tiny; load it with iso.load('hf-hub:me/tiny')\n",
    ), err
    card = hub.files("me/tiny")["README.md"].decode()
    recipe = hub.files("me/tiny")["recipe.yaml"].decode()
    top1 = json.loads((trained / "log.jsonl").read_text().splitlines()[-1])["top1"]
    assert "epoch: 1\n" in card
    assert str(trained.parent) not in card + recipe
    assert yaml.safe_load(recipe)["model"]["name"] == "convit_ti"
    head = yaml.safe_load(card.split("---")[1])
    assert head["model-index"][0]["results"][0]["metrics"][0]["value"] == round(top1, 2)
    iso.save_for_hub(model := iso.load(trained / "model.safetensors"), tmp_path, run=trained)
    refused("has a recipe.yaml, and no run is given", iso.save_for_hub, model, tmp_path)
    with pytest.warns(UserWarning, match="keeps its README"):
        iso.push(model, "me/tiny")  # no run: the recipe is not this model's
    assert "recipe.yaml" not in hub.files("me/tiny")
    refused("is not a name for the hub", iso.push, model, "me/x.git")
    refused(
        "results must be finite numbers by name; top1 is not",
        iso.push,
        model,
        "me/x",
        results={"top1": "9"},
    )
    measured = run(capsys, "evaluate", "hf-hub:me/tiny", "--no-cost", "--json", "--max-images", 40)
    own = run(capsys, "evaluate", trained, "--no-cost", "--json", "--max-images", 40)
    assert json.loads(measured[1]) | {"model": ""} == json.loads(own[1]) | {"model": ""}
    assert json.loads(measured[1])["data"] == "digits"
    fused = run(capsys, "verify", "hf-hub:me/tiny", trained / "model.safetensors")
    assert fused[0] == 0, fused


def test_a_card_takes_no_markup_from_names():
    """Of metrics and recipes."""
    evil = "a|b`` <img src=x>[x](y)\n```\n# c\x1b[2J"
    recipe = {"name": evil, "source": evil, "model": {"name": evil}}
    card = model_card(
        timm.create_model("cifar_resnet20"), "me/x", recipe, {"top1": 1.0, evil: 90.0}, False
    )
    body = re.sub(r"(?ms)^(`{3,})\w+$.*?^\1$", "", card)  # less blocks of code
    assert not re.search(r"<img|\[x\]|^# c", body, re.MULTILINE)
    assert "\x1b" not in card
    assert re.findall(r"(?m)^## (.*)", body) == ["Use", "Results", "Training"]
