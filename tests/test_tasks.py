"""A task of one's own plugs into the training loop: data, loss, metrics; runs resume and files know their task."""

import json
from importlib.metadata import EntryPoint

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.task import TrainingTask

import isomorph as iso
from isomorph.cli import main
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.loaders import eval_loader, eval_transform, train_loader, transformed
from isomorph.lab.training.recipe import tasks
from isomorph.lab.training.recipe.fields import Part, Positive
from isomorph.lab.training.recipe.recipe import validate
from isomorph.lab.training.recipe.tasks import ENTRY_POINTS, TASKS
from isomorph.lab.training.task import Objective, Task, recorded_task, task_of
from isomorph.models.input_sizes import evaluation_config


class ParityOptions(Part):
    """Fields of the task."""

    scale: Positive = 1.0
    """Factor on the loss."""


class Relabelled(iso.training.Classification):
    """Classification with nothing of its own."""


class ParityLoss(TrainingTask):
    def __init__(self, model, scale, device):
        super().__init__(device=device, verbose=False)
        self.trainable_module = model
        self.scale = scale

    def forward(self, inputs, targets):
        odd = (targets["label"] % 2).float()
        return {
            "loss": self.scale
            * F.binary_cross_entropy_with_logits(self.trainable_module(inputs)[:, 0], odd)
        }


class Parity(Task):
    """Is a digit odd? The targets of a batch are a dictionary."""

    fields = ParityOptions
    sources = ("digits",)
    printed = {"right": ".1f"}

    def open_data(self, recipe):
        return tuple(open_source("digits", split).subset(range(40)) for split in ("train", "test"))

    def train_loader(self, recipe, config, train, sampler):
        loader = train_loader(transformed(train, eval_transform(config)), sampler)
        collate = loader.collate_fn

        def to_dict(examples):
            images, labels, messages = collate(examples)
            return images, {"label": labels}, messages

        loader.collate_fn = to_dict
        return loader

    def test_loader(self, recipe, config, test, runtime):
        return eval_loader(test, config)

    def objective(self, recipe, model, device):
        loss = ParityLoss(model.to(device), self.options.scale, device)
        return Objective(
            loss,
            lambda model, loader, runtime: right(model, loader),
            lambda metrics: metrics["right"],
        )

    def evaluate(self, model, options, runtime):
        test = open_source(options.data or "digits", "test").subset(range(40))
        return [right(model, eval_loader(test, evaluation_config(model)))]


@torch.no_grad()
def right(model, loader):
    pairs = [((model.eval()(images)[:, 0] > 0) == (labels % 2 == 1)) for images, labels in loader]
    return {"right": torch.cat(pairs).float().mean().item() * 100}


@pytest.fixture(autouse=True)
def parity(monkeypatch):
    monkeypatch.setitem(TASKS, "parity", f"{__name__}:Parity")


TINY = dict(name="parity", model={"name": "cifar_resnet20"}, task={"name": "parity"}, epochs=2)
TINY |= dict(data={"source": "digits", "size": [8, 8], "batch_size": 8})


def tiny(out, **changes):
    return iso.Recipe.model_validate({**TINY, "out": out, **changes})


class TestRun:
    def test_it_trains_and_its_file_knows_the_task(self, tmp_path, capsys):
        result = iso.train(tiny(tmp_path, task={"name": "parity", "scale": 2.0}))
        assert "right" in capsys.readouterr().out
        model = iso.load(tmp_path / "model.safetensors")
        task = task_of(model)
        assert isinstance(task, Parity)
        assert task.options.scale == 2.0
        assert iso.evaluate(model)["right"] == result.metrics["right"]

    def test_a_task_derived_from_classification_is_evaluated_as_a_classifier(
        self, monkeypatch, tmp_path, capsys
    ):
        """Unless it says otherwise; what it predicts is its own."""
        monkeypatch.setitem(TASKS, "relabelled", Relabelled)
        model = timm.create_model("cifar_resnet20")
        model.pretrained_cfg = {**model.pretrained_cfg, "task": {"name": "relabelled"}}
        iso.save(model, tmp_path / "model.safetensors")
        arguments = [
            "evaluate",
            str(tmp_path / "model.safetensors"),
            "--data",
            "digits",
            "--max-images",
            "10",
        ]
        with pytest.raises(SystemExit, match="0"):
            main([*arguments, "--no-cost", "--json"])
        assert json.loads(capsys.readouterr().out)["images"] == 10
        few = open_source("digits", "test").subset(range(10))
        assert iso.evaluate(model, few)["images"] == 10
        assert type(recorded_task(model)) is Relabelled
        assert task_of(model) is None
        monkeypatch.setattr(Relabelled, "evaluate", lambda self, *given: [{"own": 1.0}])
        assert iso.evaluate(model) == {"own": 1.0}


class TestRecipe:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"task": {"name": "parrot"}}, r"task: 'parrot' is not a task; did you mean parity"),
            (
                {"data": {"source": "cifar10"}},
                "data.source cifar10 is not for parity; choose one of digits",
            ),
            ({"augment": {"hflip": 0.1}}, "augment does not apply to parity; leave it out"),
        ],
    )
    def test_what_is_wrong_is_said(self, changes, message):
        with pytest.raises(iso.UserError, match=message):
            validate({**TINY, **changes})

    def test_a_task_of_an_installed_package(self, monkeypatch):
        monkeypatch.delitem(TASKS, "parity")
        entry = EntryPoint("parity", f"{__name__}:Parity", ENTRY_POINTS)
        monkeypatch.setattr(tasks, "entry_points", lambda group: [entry] * (group == ENTRY_POINTS))
        assert validate(TINY).model_dump(mode="json")["task"] == {"name": "parity", "scale": 1.0}
        monkeypatch.delitem(TASKS, "parity")
        with pytest.raises(
            iso.UserError, match=r"task.scal is not a field \(did you mean scale\?\)"
        ):
            validate({**TINY, "task": {"name": "parity", "scal": 2}})
