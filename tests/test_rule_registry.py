"""A rule of another package: one class and one entry point, known in Python, in recipes and on the command line."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from torch import nn

import isomorph as iso
from isomorph.surgery.rule import RULES, rule_options
from isomorph.training.recipe.recipe import document_fields, validate
from refusals import refused

TOY = '''
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from isomorph.surgery import Rule


class Doubled(nn.Module):
    """x -> (2 weight) x / 2"""

    def __init__(self, linear):
        super().__init__()
        self.linear = nn.Linear(linear.in_features, linear.out_features)
        self.linear.weight.data = linear.weight.data * 2
        self.linear.bias.data = linear.bias.data * 2

    def forward(self, x):
        return self.linear(x) / 2


@dataclass(frozen=True)
class LinearToDoubled(Rule):
    """A linear layer becomes one with twice the weights and half the output."""

    strength: int = 1
    """How doubled the layer is."""

    atol: ClassVar[float] = 1e-5
    kind: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    def reason(self, module):
        return None if type(module) is nn.Linear else "it is not an nn.Linear"

    def build(self, module):
        return Doubled(module)
'''


@pytest.fixture
def installed(tmp_path):
    """A folder with an installed package `toy` that offers a rule and one that cannot be loaded, in an environment."""
    (tmp_path / "toy.py").write_text(TOY)
    info = tmp_path / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[isomorph.rules]\ntoy = toy:LinearToDoubled\ngone = toy_nowhere:Gone\n")
    sources = str(Path(iso.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([sources, str(tmp_path)]), "COLUMNS": "100"}


def run(environment, folder, *arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


COMMANDS = """
import sys
import isomorph as iso
from isomorph.cli import main

recast = "recast cifar_resnet20 --no-pretrained --rule LinearToDoubled --where linear --strength 2"
recast += " --out doubled.safetensors"
for command in ("recast --help", recast, "train toy.yaml"):
    try:
        main(command.split())
    except SystemExit as ended:
        assert not ended.code, ended.code
for path in ("doubled.safetensors", "run/model.safetensors"):
    model = iso.load(path)
    print("loaded", type(model.linear).__name__, iso.edits(model)[-1].rule.strength)
"""


@pytest.mark.slow
def test_an_installed_rule_is_known_everywhere(installed, tmp_path):
    """A new process finds it through its entry point, in Python, in recipes and on the command line.

    Of one that cannot be loaded it says so.
    """
    work = tmp_path / "work"
    work.mkdir()
    (work / "toy.yaml").write_text(
        "model: {name: cifar_resnet20, recast: {rule: LinearToDoubled, where: linear, strength: 2}}\n"
        "data: {source: digits, fraction: 0.02, size: [8, 8], batch_size: 8}\n"
        "epochs: 1\nout: run\noptim: {warmup_epochs: 0}\n"
    )
    done = run(installed, work, "-W", "default", "-c", COMMANDS)
    assert done.returncode == 0, done.stderr
    assert "--strength" in done.stdout
    assert done.stdout.count("loaded Doubled 2") == 2
    assert "cannot load the rule toy_nowhere:Gone of toy" in done.stderr


@dataclass(frozen=True)
class Kept(iso.surgery.Rule):
    """A module stays as it is."""

    init: Literal["copy"] = "copy"
    """How it stays."""
    depth: int | None = None

    atol: ClassVar[float] = 0.0

    def reason(self, module: nn.Module) -> str | None:
        return None

    def build(self, module: nn.Module) -> nn.Module:
        return module


class TestRegistration:
    @pytest.fixture(autouse=True)
    def registered(self, monkeypatch):
        monkeypatch.setitem(RULES, "Kept", Kept)

    def test_fields_become_options(self):
        options = rule_options()
        assert options["depth"].rules == ("Kept",)
        assert options["init"].type == Literal["exact", "paper", "same-function", "copy"] | None
        assert "Kept: How it stays." in options["init"].help
        assert "--model.recast.depth" in document_fields()

    def test_recipes_take_it(self):
        part = validate({"model": {"name": "cifar_resnet20", "recast": {"rule": "Kept", "where": "fc", "depth": 3}}})
        assert part.model.recast.build_rule() == Kept(depth=3)
        for fields, said in (
            ({"rule": "Kept", "dept": 3}, r"model.recast.dept is not a field \(did you mean depth\?\)"),
            ({"rule": "Kept", "depth": 3.5}, r"model\.recast\.depth: input should be a valid integer"),
            ({"rule": "Kept", "ratio": 3}, "Kept has no ratio"),
            ({"rule": "Kep"}, "Kep is not a rule; did you mean Kept"),
        ):
            refused(said, validate, {"model": {"name": "cifar_resnet20", "recast": {"where": "fc", **fields}}})


def test_what_is_not_a_rule_is_rejected():
    @dataclass
    class Mutable:
        atol = 0.0

    @dataclass(frozen=True)
    class Empty:
        pass

    @dataclass(frozen=True)
    class ConvToGPSA(Kept):
        pass

    for wrong, said in ((Mutable, "frozen dataclass"), (Empty, "derive it from"), (ConvToGPSA, "already")):
        refused(said, iso.surgery.register_rule, wrong)


def test_every_field_of_every_rule_has_help():
    for option in rule_options().values():
        assert option.help.strip(": "), option
        assert not option.help.endswith(": "), f"{option.name} has no help in one of {option.rules}"
