"""Curves of a run in TensorBoard and in Weights & Biases, the latter with a module that records the calls to it."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

import isomorph as iso
from isomorph.training.recipe.recipe import validate
from isomorph.training.run.log import check_tracker, open_tracker

TINY = dict(
    model=dict(name="cifar_resnet20"),
    data=dict(source="digits", fraction=0.03, size=[8, 8], batch_size=16, test_images=20),
    epochs=2,
    log_every=1,
    track="wandb",
)


class Wandb(ModuleType):
    """Notes every call to it or to its run."""

    class Error(Exception):
        pass

    def __init__(self):
        super().__init__("wandb")
        self.calls, self.fails, self.__spec__ = [], False, ModuleSpec("wandb", None, origin="here")

    def init(self, **given):
        if self.fails:
            raise self.Error("api_key not configured (no-tty). call wandb.login")
        self.calls.append(("init", (), given))
        return Run(given["id"] or "abc123", self.calls)


class Run:
    def __init__(self, number, calls):
        self.id, self.calls = number, calls

    def __getattr__(self, name):
        return lambda *given, **more: self.calls.append((name, given, more))


@pytest.fixture
def wandb(monkeypatch):
    """The stand-in for wandb."""
    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    return sys.modules["wandb"]


def test_wandb_gets_the_recipe_and_every_number_once(tmp_path, wandb):
    result = iso.train(validate({**TINY, "out": str(tmp_path / "run")}), show=False)
    (_, _, init), *rest = wandb.calls
    assert (init["project"], init["name"], init["id"], init["resume"]) == ("isomorph", "run", None, "allow")
    assert init["config"]["data"]["fraction"] == 0.03
    assert rest[0] == ("define_metric", ("train/*",), {"step_metric": "train/step"})
    assert rest[1] == ("define_metric", ("epoch/*",), {"step_metric": "epoch/epoch"})
    logged = [args[0] for name, args, _ in rest if name == "log"]
    assert [row["train/step"] for row in logged if "train/step" in row] == [1, 2, 3, 4]
    assert [row["epoch/epoch"] for row in logged if "epoch/epoch" in row] == [1, 2]
    assert logged[-1]["epoch/top1"] == result.metrics["top1"]
    assert rest[-1] == ("finish", (), {"exit_code": 0})


def test_a_resumed_run_continues_its_wandb_run(tmp_path, wandb):
    recipe = validate({**TINY, "out": str(tmp_path)})
    for _ in range(2):
        tracker = open_tracker(recipe, 0)
        tracker.close(failed=True)
    assert (tmp_path / "wandb-id.txt").read_text() == "abc123\n"
    assert [given["id"] for name, _, given in wandb.calls if name == "init"] == [None, "abc123"]
    assert wandb.calls[-1] == ("finish", (), {"exit_code": 1})


def test_wandb_without_a_login_says_what_to_do(tmp_path, wandb):
    wandb.fails = True
    with pytest.raises(iso.UserError, match=r"wandb cannot start: api_key .*; run wandb login, or set WANDB_MODE"):
        open_tracker(validate({**TINY, "out": str(tmp_path)}), 0)


def test_a_missing_package_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("isomorph.training.run.log.find_spec", lambda name: None)
    with pytest.raises(iso.UserError, match=r"track: wandb is not installed; run pip install wandb, or leave track"):
        iso.train(validate({**TINY, "out": str(tmp_path / "run")}), show=False)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_curves_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    with pytest.raises(iso.UserError, match="track: wandb is not installed"):
        check_tracker(validate({**TINY, "out": str(tmp_path)}))
