"""What the command line says: names of options, progress, control characters, machines without a network."""

import ast
import re
import shlex
import socket
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from cyclopts import CycloptsError
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import isomorph as iso
from isomorph.checkpoints.model import record_data
from isomorph.cli import main
from isomorph.cli.messages import explain_parse_error, name_options
from isomorph.cli.run import app
from isomorph.cli.train import parse_overrides
from isomorph.lab.data.sources import Source, spaced_images
from isomorph.lab.training.recipe.read import apply_overrides
from isomorph.lab.training.recipe.recipe import validate
from isomorph.models import download
from messages import MESSAGES, NOWHERE, without_network
from refusals import refused


@pytest.mark.parametrize(
    ("command", "message", "expected"),
    [
        (
            "quantize",
            "give size=224, or size=(224, 160) for height and width",
            "give --size 224, or --size 224x160 for height and width",
        ),
        ("evaluate", "set data.root (or ISOMORPH_DATA) to", "set --root (or ISOMORPH_DATA) to"),
        (
            "train",
            "give weights=FILE, or pretrained=False",
            "give --model.weights FILE, or --model.pretrained false",
        ),
        (
            "train",
            "the file; model.safetensors is damaged",
            "the file; model.safetensors is damaged",
        ),
        (
            "train",
            "give size=224, or img_size=32",
            "give --data.size 224, or --model.kwargs.img_size 32",
        ),
        (
            "analyze",
            "give size=224, leave `size` out, or give img_size=(96, 128)",
            "give --size 224, leave --size out, or give --model-kwargs img_size=96,128",
        ),
        ("evaluate", "give checkpoint_path=FILE (partial=True)", "give --weights FILE (--partial)"),
        (
            "verify",
            "thorough=True tries them; ema=False takes",
            "--thorough tries them; --no-ema takes",
        ),
        ("fuse", "thorough=True tries them", "isomorph verify --thorough tries them"),
        ("analyze", "where=['a*'] matches", "--layers a* matches"),
        ("fuse", "(across=False); only_forward=True", "(--no-across); only_forward=True"),
        ("fuse", "base=NAME or base=Net(3) of", "--arch NAME or --arch package.module:function of"),
        ("train", "model.kwargs.NAME=VALUE", "--model.kwargs.NAME VALUE"),
        ("quantize", "iso.load(path, size=3), size=(4, 8)", "iso.load(path, size=3), --size 4x8"),
        ("recast", "where=['a.*', 'b'] matches", "--where a.* b matches"),
        ("evaluate", "test_fraction=0.2 gives", "--split 0.2 gives"),
        ("train", "leave `test_fraction` out", "leave --data.split out"),
        ("fuse", "call `frobnicate`, other=3", "call `frobnicate`, other=3"),
        ("", "size=3", "size=3"),
    ],
)
def test_messages_name_options_as_they_are_typed(command, message, expected):
    assert name_options(message, command) == expected


OPTION = re.compile(r"(?<![\w-])--[a-z]")
# Texts that give a whole command, of isomorph or another program.
COMMAND = re.compile(r"\b(isomorph|hf|tar|torchrun|pip) ")


def texts_of(file):
    """Yield the strings in a file, whole where they are formatted, but docstrings."""
    tree = ast.parse(file.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        if isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
            parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
            yield node.lineno, "VALUE".join(parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.lineno, node.value


def test_the_library_names_arguments_and_the_command_line_options():
    """Errors raised in Python name no option; `name_options` puts options where they name arguments."""
    top = Path(iso.__file__).parent
    published = {top / "lab" / "training" / "dry_run" / "needs.py"}  # says how to repeat a run
    found = []
    for file in top.rglob("*.py"):
        path = file.relative_to(top)
        if path.parts[0] == "cli" or path.parts[:2] in {("lab", "recipes"), ("lab", "demo")}:
            continue
        if file not in published:
            texts = [(line, text) for line, text in texts_of(file) if OPTION.search(text)]
            found += [f"{path}:{line}: {text}" for line, text in texts if not COMMAND.search(text)]
    assert found == []


def write_state_dict(folder):
    torch.save(timm.create_model("cifar_resnet20").state_dict(), folder / "my.pth")
    return folder / "my.pth"


def write_own(folder):
    iso.save(nn.Sequential(nn.Linear(2, 2)), folder / "own.safetensors")
    return folder / "own.safetensors"


def write_named(folder):
    iso.save(timm.create_model("cifar_resnet20"), folder / "named.safetensors")
    return folder / "named.safetensors"


SAID = {  # of a file: what Python says, what the command says, and the arguments of both
    "no architecture": (write_state_dict, {}, "", "give base=NAME", "give --arch NAME"),
    "a module": (
        write_own,
        {},
        "",
        r"give base=Sequential\(\)",
        "give --arch package.module:function",
    ),
    "another architecture": (
        write_named,
        {"base": "resnet18"},
        "--arch resnet18",
        "leave base=resnet18 out",
        "leave --arch resnet18 out",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_python_is_told_of_arguments_and_the_command_of_options(case, tmp_path, capsys):
    write, arguments, options, in_python, in_command = SAID[case]
    path = write(tmp_path)
    refused(in_python, iso.load, path, **arguments)
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", str(path), "--data", "digits", *options.split()])
    assert in_command in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--image IMAGE --lyers x", "unknown option: --lyers; did you mean --layers?"),
        ("--image IMAGE --where x", "unknown option: --where; see `isomorph analyze --help`"),
        (
            "more --image IMAGE",
            "analyze does not take more; give another model as --against more; see `isomorph analyze --help`",
        ),
        ("--image IMAGE --out", "--out needs a value; see `isomorph analyze --help`"),
        (
            "--image IMAGE --size 97 65",
            "--size takes one value, not 97 and 65; write --size 97x65 for height and width; "
            "see `isomorph analyze --help`",
        ),
        (
            "--image IMAGE --num-classes 3 3 --json",
            "--num-classes takes one value, not 3 and 3; see `isomorph analyze --help`",
        ),
        (
            "--imge IMAGE",
            "unknown option: --imge; did you mean --image?",
        ),
        (
            "--json more less --image IMAGE",
            "analyze does not take more less; give another model as --against more less; "
            "see `isomorph analyze --help`",
        ),
    ],
)
def test_an_error_of_the_parser_says_what_to_do(given, expected):
    with pytest.raises(CycloptsError) as raised:
        app.parse_args(
            f"analyze resnet18 {given.replace('IMAGE', __file__)}",
            print_error=False,
            exit_on_error=False,
        )
    assert explain_parse_error(raised.value) == expected


@pytest.mark.parametrize("option", ["--data.size", "--optim.betas"])
def test_two_values_of_a_field_are_written_as_a_list(option):
    said = refused(
        rf"{option} takes one value, not 97 and 65; write {option} '\[97, 65\]' for a list",
        parse_overrides,
        ["--epochs", "3", option, "97", "65"],
    )
    advised = shlex.split(said.partition("write ")[2].removesuffix(" for a list"))
    name = option.removeprefix("--")
    group, _, field = name.partition(".")
    assert apply_overrides({}, parse_overrides(advised)) == {group: {field: [97, 65]}}


def test_names_and_folders_are_no_numbers(monkeypatch, tmp_path):
    for name in ("2024_01_31", "2024-01-31", "0123", "1e3", "1:30", "true"):
        changed = apply_overrides({}, [f"name={name}", f"out={name}", f"data.root={name}"])
        assert changed == {"name": name, "out": name, "data": {"root": name}}
        for field in ("token_labels.maps", "task.teacher", "task.test"):
            group, last = field.split(".")
            assert apply_overrides({}, [f"{field}={name}"]) == {group: {last: name}}
    assert apply_overrides({}, ["name=null", "epochs=1e2"]) == {"name": None, "epochs": 100}
    monkeypatch.chdir(tmp_path)
    Path("2024_01_31").mkdir()
    assert apply_overrides({}, ["data=2024_01_31"])["data"]["root"].name == "2024_01_31"


def test_data_given_by_name_in_a_recipe_can_be_changed():
    changed = apply_overrides({"data": "digits"}, ["data.batch_size=8"])
    assert changed == {"data": {"source": "digits", "batch_size": 8}}


def test_without_a_network_weights_are_asked_for_in_one_line(monkeypatch, tmp_path):
    assert not download.is_reachable(NOWHERE)
    said = refused(
        "cannot download the weights of resnet18", without_network, tmp_path, monkeypatch
    )
    assert "checkpoint_path=FILE" in said
    assert "pretrained=False" in said
    assert constants.HF_HUB_OFFLINE is False


def test_weights_in_the_cache_are_read_without_asking_a_server(monkeypatch, tmp_path):
    model = timm.create_model("test_resnet")
    folder = tmp_path / "models--timm--test_resnet.r160_in1k"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    save_file(
        model.state_dict(), folder / "snapshots" / "abc" / "model.safetensors", {"format": "pt"}
    )
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
    turns = spaced_images(Source(range(10_000), np.arange(10_000) % 10, map(str, range(10))), 1_000)
    assert set(np.bincount(turns.labels)) <= {99, 100, 101}
    assert (np.diff(turns.ids) > 0).all()


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


@pytest.mark.parametrize("contains", MESSAGES)
def test_every_message_that_the_docs_explain_is_said(contains, tmp_path, monkeypatch, capsys):
    error = None
    try:
        MESSAGES[contains][-1](tmp_path, monkeypatch)
    except iso.UserError as raised:
        error = raised
    assert contains in "".join((str(error), *capsys.readouterr()))
