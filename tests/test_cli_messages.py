"""What the command line says: names of options, progress, control characters, machines without a network."""

import socket
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file

import isomorph as iso
from isomorph import distributed
from isomorph.checkpoints.model import record_data
from isomorph.cli import main
from isomorph.cli.messages import explain_shape_error, name_options
from isomorph.cli.open_models import library_options
from isomorph.cli.options import CheckpointOptions
from isomorph.cli.output import progress_bar, spinner, track_steps
from isomorph.cli.run import _error_message
from isomorph.data.sources import Source, spaced_images
from isomorph.models import download, require_registered
from isomorph.training.recipe.read import apply_overrides
from isomorph.training.recipe.recipe import validate
from refusals import refused

NOWHERE = "http://127.0.0.1:9"
"""An address that no server listens on."""


@pytest.mark.parametrize(
    ("command", "message", "expected"),
    [
        ("evaluate", "set data.root (or ISOMORPH_DATA) to", "set --root (or ISOMORPH_DATA) to"),
        ("train", "set data.root (or ISOMORPH_DATA) to", "set --data.root (or ISOMORPH_DATA) to"),
        ("bench", "not available; try device=cpu", "not available; try --device cpu"),
        ("recast", "'a' in where matches no module", "'a' in --where matches no module"),
        ("train", "give --weights FILE, or --no-pretrained", "give --model.weights FILE, or --model.pretrained false"),
        ("verify", "give checkpoint_path=FILE, or pretrained=False for", "give --weights FILE, or --no-pretrained for"),
        ("train", "the file; model.safetensors is damaged", "the file; model.safetensors is damaged"),
        ("train", "give --optim.lr, or mydata.root.txt", "give --optim.lr, or mydata.root.txt"),
        ("evaluate", "cannot open a/model.weights.pth", "cannot open a/model.weights.pth"),
    ],
)
def test_messages_name_options_as_they_are_typed(command, message, expected):
    assert name_options(message, command) == expected


def test_images_that_do_not_fit_get_advice():
    for error, advice in {
        "Input height (100) doesn't match model (224).": "built for 224; give --size 224",
        "Input width (100) should be divisible by patch size (16).": "a multiple of its patch size 16",
        "expected input[1, 3, 8, 8] to have 1 channels, but got 3 channels instead": "takes 1-channel images",
    }.items():
        assert advice in (explain_shape_error(error) or "")


@pytest.mark.parametrize(
    "inputs", [torch.zeros(3, 32, 32), torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.zeros(1, 3, 40, 32)]
)
def test_inputs_that_a_model_cannot_read_are_named(inputs):
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    said = refused(r"does not run on an input of shape [\dx ]+ in (float32|uint8)", iso.verify, vit, vit, inputs)
    assert ("batch of normalised images" in said) == (inputs.shape[-2] == 32)


def test_used_up_memory_is_not_taken_for_inputs_that_a_model_cannot_read():
    class Full(torch.nn.Identity):
        def forward(self, x):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(RuntimeError, match="allocate memory") as caught:
        iso.verify(Full(), Full(), torch.zeros(1, 3, 32, 32))
    assert not isinstance(caught.value, iso.UserError)


def test_the_type_of_an_unexpected_error_is_printed():
    assert _error_message(iso.UserError("give --out")) == "give --out"
    assert _error_message(ValueError("no value")) == "ValueError: no value"


def test_model_kwargs_are_read_as_in_recipes():
    typed = {"96": 96, "1e-3": 1e-3, "[96,128]": [96, 128], "true": True, "None": None, "avg": "avg"}
    for text, value in typed.items():
        given = library_options(CheckpointOptions(model_kwargs=[f"x={text}"])).model_kwargs
        assert given == {"x": value} == apply_overrides({}, [f"model.kwargs.x={text}"])["model"]["kwargs"]


def test_names_and_folders_are_no_numbers():
    for name in ("2024_01_31", "2024-01-31", "0123", "1e3", "1:30", "true"):
        changed = apply_overrides({}, [f"name={name}", f"out={name}", f"data.root={name}"])
        assert changed == {"name": name, "out": name, "data": {"root": name}}
    assert apply_overrides({}, ["name=null", "epochs=1e2"]) == {"name": None, "epochs": 100}


def test_near_names_of_models_are_suggested():
    near = {"resnet1": "resnet18, resnet101, resnet10t", "rsnet18": "resnet18", "patch16_siglip_5": "vit_.*siglip_5"}
    for given, names in near.items():
        refused(f"there is no model '{given}'; did you mean {names}", require_registered, given)


def test_a_report_is_a_table_at_a_prompt():
    model = timm.create_model("cifar_resnet20")
    report = iso.verify(model, model, torch.zeros(1, 3, 32, 32))
    assert repr(report).startswith("equal within 1e-05: max |diff| / max |out| 0 (float32)")
    assert repr(report) == str(report)
    several = iso.surgery.compare_outputs(model, model, torch.zeros(1, 3, 8, 8), seeds=[1, 4], what="images of photos")
    inputs = [line.partition(":")[0] for line in str(several).splitlines()[1:4]]
    images, *random = [f"  input 1x3x8x8, {what}" for what in ("images of photos", "random, seed 1", "random, seed 4")]
    assert inputs == [images, *random]


def test_without_a_network_weights_are_asked_for_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert not download.is_reachable(NOWHERE)
    said = refused("cannot download the weights of resnet18", iso.models.create, "resnet18", pretrained=True)
    assert "checkpoint_path=FILE" in said
    assert "pretrained=False" in said
    assert constants.HF_HUB_OFFLINE is False


def test_weights_in_the_cache_are_read_without_asking_a_server(monkeypatch, tmp_path):
    model, folder = timm.create_model("test_resnet"), tmp_path / "models--timm--test_resnet.r160_in1k"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    save_file(model.state_dict(), folder / "snapshots" / "abc" / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(download, "is_reachable", lambda url: pytest.fail(f"asked {url}"))
    assert torch.equal(iso.models.create("test_resnet", pretrained=True).fc.weight, model.fc.weight)
    assert constants.HF_HUB_OFFLINE is False


def test_a_download_by_url_ends_without_a_time_limit_for_all_sockets(tmp_path):
    def build():
        assert socket.getdefaulttimeout() is None
        return torch.hub.load_state_dict_from_url(f"{NOWHERE}/x.pth", str(tmp_path))

    opened = torch.hub.urlopen
    with pytest.raises(ConnectionError, match="does not answer") as caught:
        download.build_pretrained(build, None)
    assert download.is_connection_error(caught.value)
    assert torch.hub.urlopen is opened


def test_images_are_evenly_spaced_over_the_classes():
    digits = iso.data.open_source("digits", "test")
    assert len(spaced_images(digits, 7)) == 7
    assert len(spaced_images(digits, 10**6)) == len(digits) == len(spaced_images(digits, None))
    refused("the number of images, 0, must be at least 1", spaced_images, digits, 0)
    turns = spaced_images(Source([], np.arange(10_000) % 10, map(str, range(10))), 1_000)
    assert set(np.bincount(turns.labels)) <= {99, 100, 101}
    assert (np.diff(turns.ids) > 0).all()


def test_progress_without_a_terminal_is_a_line_a_minute(monkeypatch, capsys):
    """The clock is replaced. Finished measurements do not shorten the estimate of the time left."""
    now = [0.0]
    monkeypatch.setattr("isomorph.cli.output.time.monotonic", lambda: now[0])

    def steps(update, first, last, seconds):
        for done in range(first, last):
            now[0] += seconds
            update(done, 40, f"cell {done}")
        return capsys.readouterr().err.splitlines()

    with progress_bar("cells") as update:
        lines = steps(update, 0, 40, 10)
        assert len(lines) == 6
        assert lines[0] == "cell 5: 5 of 40, 0:07:00 left"  # 60 s for five cells
    with progress_bar("cells") as update:
        assert steps(update, 30, 32, 59) == ["cell 31: 31 of 40, 0:17:42 left"]
    with progress_bar("cells", show=False) as update:
        assert steps(update, 0, 2, 600) == []
    with spinner("quantize") as show_step:
        now[0] += 61
        show_step("calibrating")
    for _ in track_steps(range(3), "on test images", 3):
        now[0] += 60
    lines = ["on test images: 1 of 3, 0:02:00 left", "on test images: 2 of 3, 0:01:00 left"]
    assert capsys.readouterr().err.splitlines() == ["quantize: calibrating", *lines]


HOSTILE = "cat\x1b[2J\x9b1A\u202e\udcff\r"


def test_control_characters_of_files_do_not_reach_the_terminal(tmp_path, capsys):
    """Names of classes, of files and of models, in tables, messages, notes and progress."""
    model = timm.create_model("cifar_resnet20", num_classes=2)
    record_data(model, {"label_names": [HOSTILE[:-2], "dog\n"]})
    iso.save(model, tmp_path / "m.safetensors")
    Image.new("RGB", (32, 32)).save(tmp_path / "x.png")
    said = []
    for arguments in (
        ["predict", str(tmp_path / "m.safetensors"), "--image", str(tmp_path / "x.png")],
        ["evaluate", f"{HOSTILE}.safetensors"],
        ["evaluate", str(tmp_path / "m.safetensors"), "--data", f"{tmp_path}/{HOSTILE}"],
        ["train", "digits_cnn", f"--{HOSTILE}", "1"],
        [HOSTILE],
    ):
        with suppress(SystemExit):
            main(arguments)
        said.append("".join(capsys.readouterr()))
    assert all("cat\\x1b[2J" in text for text in said), said
    assert not {c for text in said for c in text if not (c.isprintable() or c == "\n")}
    assert len(said[0].splitlines()) == 3


def test_the_name_of_a_recipe_stays_below_runs():
    values = {"model": {"name": "cifar_resnet20"}, "data": {"source": "digits"}}
    said = "name: must be a plain name: its folder is runs/NAME; give another folder as out"
    for name in ("../x", "/tmp/x", "a/../../x", "..", "", "a//b", r"..\x", "C:x", "x\0y", "x\ny"):
        refused(said, validate, {**values, "name": name})
    assert validate({**values, "name": "sweep/a b-1.5"}).folder == Path("runs/sweep/a b-1.5")


TORCHRUN = {
    "WORLD_SIZE=x": "WORLD_SIZE=x LOCAL_RANK=0 is not what torchrun sets; start all processes with torchrun",
    "WORLD_SIZE=2 RANK=2": "RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 is not what torchrun sets",
    "RANK=1": "RANK=1 WORLD_SIZE=1 ",
    "LOCAL_RANK=-1": "LOCAL_RANK=-1 is not what",
    "WORLD_SIZE=2": "process 0 of 2 found no others: .*environment variable",
}


@pytest.mark.parametrize("variables", TORCHRUN)
def test_processes_that_torchrun_did_not_start_are_one_line(variables, monkeypatch):
    for assignment in variables.split():
        monkeypatch.setenv(*assignment.split("="))
    refused(TORCHRUN[variables], distributed.open_runtime, "cpu")
