"""Help, lists and errors in the command line come before torch is imported; Ctrl-C ends every moment in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import timm

import isomorph as iso
import isomorph_command
from command_line import LONGEST, settings
from isomorph import models
from isomorph.cli import main
from isomorph.cli.options import _names_if_unknown
from isomorph.cli.run import app
from isomorph.cli.tables import PATH
from isomorph.cli.train import check_names, check_values
from isomorph.process import handler_kept

PROGRAM = isomorph_command.__file__
HEAVY = {"torch", "torchvision", "timm", "numpy", "matplotlib", "sklearn", "datasets", "pydantic"}
COMMANDS = [name for name in app if not name.startswith("-")]
RECAST = ["recast", "resnet18", "--where", "layer4.*"]
AT_ONCE = {
    "version": (["--version"], 0),
    "recipes": (["recipes"], 0),
    "table": (["table"], 0),
    "models": (["models"], 0),
    "help": (["export", "--help"], 0),
    "command": (["recats"], 2),
    "value": (["evaluate", "resnet18", "--batch-size", "many"], 2),
    "field of a rule": ([*RECAST, "--out", "x.safetensors", "--localty", "3"], 2),
    "recipe": (["train", "digits_cn"], 2),
    "field of a recipe": (["train", "digits_cnn", "--optim.lrr", "3"], 2),
    "value of a recipe": (["train", "digits_cnn", "--optim.lr", "-1"], 2),
    "field in a file": (["train", "mine.yaml"], 2),
    "model": (["export", "resnet5O", "--out", "x.onnx"], 2),
    "checkpoint": (["fuse", "resnet5O", "--out", "x.safetensors"], 2),
}


def split(stderr: str) -> tuple[set[str], list[str]]:
    """The imported packages in the output of `python -X importtime`, and the lines that a user sees."""
    lines = stderr.splitlines()
    timed = [line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")]
    return {name.partition(".")[0] for name in timed}, [
        line for line in lines if not line.startswith("import time:")
    ]


def heed_interrupts():
    """Undo what the shell does to a command in the background: it starts with Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(*arguments, folder=None, **streams):
    options = dict(cwd=folder, env=settings(), text=True, preexec_fn=heed_interrupts)
    return subprocess.Popen(
        [sys.executable, "-X", "importtime", *map(str, arguments)], **options, **streams
    )


@pytest.mark.parametrize("case", AT_ONCE)
def test_it_answers_before_torch_is_imported(case, tmp_path):
    arguments, code = AT_ONCE[case]
    (tmp_path / "mine.yaml").write_text("model: {name: resnet18}\noptim: {lrr: 1}\n")
    child = start(
        PROGRAM, *arguments, folder=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    stdout, stderr = child.communicate(timeout=LONGEST)
    imported, printed = split(stderr)
    assert child.returncode == code, stderr
    assert "isomorph" in imported
    assert not HEAVY & imported
    assert stdout.strip() if code == 0 else len(printed) == 1, printed


HELP = """
import contextlib, io, sys
from isomorph_command import main
for name in sys.argv[1:]:
    sys.argv = ["isomorph", name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as page, contextlib.suppress(SystemExit):
        main()
    assert name in page.getvalue(), name
"""


def test_the_help_of_every_command_comes_before_torch_is_imported():
    child = start("-c", HELP, *COMMANDS, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, stderr = child.communicate(timeout=LONGEST)
    imported, printed = split(stderr)
    assert child.returncode == 0, printed
    assert not HEAVY & imported


@pytest.mark.parametrize("field", ["optim.lrr", "optm.lr", "epoch", "model.weight"])
def test_a_wrong_field_has_the_message_that_loading_the_recipe_has(field):
    with pytest.raises(iso.UserError) as loaded:
        iso.load_recipe("digits_cnn", [f"{field}=3"])
    with pytest.raises(iso.UserError) as named:
        check_names([field])
    assert str(loaded.value).endswith(f": {named.value}")


WRONG_VALUES = ["epochs=abc", "optim.lr=-1", "amp=fp8", "data.split=1.5", "model.pretrained=maybe"]


@pytest.mark.parametrize("assignment", [*WRONG_VALUES, "epochs=[3]", "ema={a: 1}"])
def test_a_wrong_value_has_the_message_that_loading_the_recipe_has(assignment):
    with pytest.raises(iso.UserError) as loaded:
        iso.load_recipe("digits_cnn", [assignment])
    with pytest.raises(iso.UserError) as checked:
        check_values([assignment])
    assert str(checked.value) == str(loaded.value)


def test_values_that_loading_converts_or_checks_itself_are_left_to_it():
    check_values(["optim.gate_lr=10x", "data.size=[32, 32]", "epochs=3", "ema=null", "out=2024"])


def test_fields_of_tasks_and_rules_are_left_to_loading():
    check_names(["task.classes", "model.recast.localty", "model.kwargs.img_size", "optim.lr"])


def test_the_names_of_models_are_known_without_torch():
    found = _names_if_unknown("resnet5O")
    assert set(timm.list_models()) <= {*found, *models.networks()}
    # one of them has been renamed
    for name in ("resnet50", "vit_base_patch16_224_in21k", *models.networks()):
        assert not _names_if_unknown(name)


@pytest.mark.slow
def test_importing_isomorph_imports_little_more_than_timm():
    code = "import isomorph, timm; assert timm.is_model('convit_tiny') and timm.is_model('cifar_resnet20')"
    child = start("-c", code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, stderr = child.communicate(timeout=LONGEST)
    imported, printed = split(stderr)
    assert child.returncode == 0, printed
    assert not imported & {
        "matplotlib",
        "sklearn",
        "datasets",
        "pydantic",
        "jinja2",
        "cyclopts",
        "rich",
    }


CHANGES = """
import sys, timm, torch, isomorph as iso
net = timm.create_model("cifar_resnet20").eval()
images = torch.randn(2, 3, 32, 32)
gated = iso.recast(net, iso.ConvToGPSA(init="exact"), where="layer3.2.conv2")
iso.verify(net, gated, images)
iso.save(gated, "gated.safetensors")
gated = iso.load("gated.safetensors")
iso.revert(gated)
iso.fuse(net)
grown = iso.insert(net, iso.layers.MapAttention, after="layer3.2", example=images)
iso.export(grown, "grown.pt2", size=32)
vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
iso.prune(iso.recast(vit, iso.AttentionToGPSA(), where="blocks.0.attn"))
iso.attention_maps(vit, images)
print(*sorted(sys.modules))
"""


@pytest.mark.slow
def test_changing_a_model_loads_nothing_of_the_lab(tmp_path):
    run = [sys.executable, "-c", CHANGES]
    child = subprocess.run(run, cwd=tmp_path, env=settings(), text=True, capture_output=True)
    assert child.returncode == 0, child.stderr
    loaded = set(child.stdout.split())
    assert "isomorph.surgery.recast" in loaded
    assert not [name for name in loaded if name.startswith("isomorph.lab")]
    assert not loaded & {"pyarrow", "datasets", "jinja2", "cyclopts", "matplotlib"}


@pytest.mark.slow
def test_the_tables_are_those_of_the_library():
    """After a change of models, rules or recipe fields: python -m isomorph.cli.write_tables."""
    from isomorph.cli.write_tables import library_tables

    assert json.loads(PATH.read_text()) == json.loads(json.dumps(library_tables()))


def test_ctrl_c_ends_a_command_in_one_line(tmp_path, monkeypatch, capsys):
    """Also where the interrupt arrives as another error."""

    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    def disguised(*_):
        with suppress(KeyboardInterrupt):
            interrupted()
        raise RuntimeError("a callback failed")

    monkeypatch.chdir(tmp_path)
    iso.save(timm.create_model("cifar_resnet20"), "cnn.safetensors")
    with handler_kept():
        for effect in (interrupted, disguised):
            heed_interrupts()  # the command before this one has left them ignored, as at the end of a process
            monkeypatch.setattr("isomorph.surgery.compare_outputs", effect)
            with pytest.raises(SystemExit) as ended:
                main(
                    [
                        "recast",
                        "cnn.safetensors",
                        "--where",
                        "layer3.0.conv1",
                        "--out",
                        "t.safetensors",
                    ]
                )
            assert ended.value.code == 130
            assert capsys.readouterr().err == "isomorph: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["cnn.safetensors"]
