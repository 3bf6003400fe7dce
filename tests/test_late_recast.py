"""A recast in the middle of a run: what stays goes on, what is new starts fresh, and nothing else changes."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import isomorph as iso
from isomorph.checkpoints.optimizer_state import split_optimizer
from isomorph.checkpoints.snapshot import newest_snapshot, read_snapshot
from isomorph.surgery import RULES
from isomorph.training.recipe.model_fields import RecastPart
from isomorph.training.recipe.recipe import validate
from isomorph.training.run.log import Journal, read_log
from isomorph.training.run.loop import recast_when_due, train_epoch
from isomorph.training.run.open import open_run

WHERE = "layer3.2.conv2"


FEW = dict(source="digits", fraction=0.055, size=[8, 8], batch_size=32, test_images=60)
"""Two steps an epoch."""


def recipe(out, epoch, model=None, **more):
    values = dict(
        model=dict(name="cifar_resnet20", recast=dict(where=WHERE, locality=5, gate=6), recast_epoch=epoch)
        | (model or {}),
        data=dict(source="digits", fraction=0.1, size=[8, 8], batch_size=32, test_images=60),
        augment=dict(crop_padding=2, hflip=0),
        optim=dict(name="sgd", lr=0.05, gate_lr=0.1, warmup_epochs=1),
        epochs=3,
        ema=0.9,
        log_every=1,
        out=str(out),
    )
    return validate(values | more)


@dataclass(frozen=True)
class Identity(iso.surgery.Rule):
    """A rule that rebuilds a convolution as itself."""

    atol: ClassVar[float] = 0.0
    kind: ClassVar[tuple[type, ...]] = (nn.Conv2d,)

    def reason(self, module):
        return None

    def build(self, module):
        return copy.deepcopy(module)


@pytest.mark.parametrize("optim", ["sgd", "adamw", "adafactor"])
def test_an_identity_recast_equals_the_uninterrupted_run(optim, tmp_path, monkeypatch):
    """Weights, averages, optimiser state and schedule: the same bits, whatever the optimiser keeps."""
    monkeypatch.setitem(RULES, "Identity", Identity)
    monkeypatch.setattr(RecastPart, "build_rule", lambda self: Identity())
    moving = dict(name=optim, lr=0.01, warmup_epochs=1)
    for name, epoch in (("never", 0), ("late", 1)):
        iso.train(recipe(tmp_path / name, epoch, optim=moving, epochs=2, data=FEW), show=False)
    plain, late = (read_snapshot(newest_snapshot(tmp_path / name).path) for name in ("never", "late"))
    assert plain.keys() == late.keys()
    assert all(torch.equal(plain[name], late[name]) for name in plain)
    losses = [[row["loss"] for row in read_log(tmp_path / name / "steps.jsonl")] for name in ("never", "late")]
    assert losses[0] == losses[1]


def run_to(run, epochs):
    """The run, so many epochs on, without evaluations."""
    while run.progress.closed < epochs:
        train_epoch(run)
        run.progress.closed += 1
        run.total.zero_()
    return run


def test_kept_parameters_keep_their_state_and_new_ones_start_fresh(tmp_path):
    run = run_to(open_run(recipe(tmp_path, 1)), 1)
    weights = {name: p.detach().clone() for name, p in run.trained.named_parameters()}
    averages = copy.deepcopy(run.averaged)
    before, _ = split_optimizer(run.trained, run.optimizer)
    x = torch.randn(2, 3, 16, 16)
    mean = averages.eval()(x)
    rate = run.optimizer.param_groups[0]["lr"]
    run = recast_when_due(run, Journal(run.recipe, run.runtime, show=False))
    after, _ = split_optimizer(run.trained, run.optimizer)
    assert after == {name: tensor for name, tensor in after.items() if torch.equal(tensor, before[name])}
    kept = {name for name, _ in run.trained.named_parameters()} & weights.keys()
    assert len(after) == len(kept) > 50
    assert all(torch.equal(weights[name], dict(run.trained.named_parameters())[name]) for name in kept)
    assert isinstance(run.trained.get_submodule(WHERE), iso.layers.GPSA2d)
    torch.testing.assert_close(run.averaged.eval()(x), mean, rtol=0, atol=2e-2)  # the averages' own function goes on
    assert run.optimizer.param_groups[0]["lr"] == rate
    assert [group["name"] for group in run.optimizer.param_groups] == ["decayed", "undecayed", "gates", "positions"]
    train_epoch(run)
    assert run.optimizer.param_groups[2]["lr"] == pytest.approx(2 * run.optimizer.param_groups[0]["lr"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    iso.train(recipe(folder, 1, data=FEW), show=False)
    return folder


@pytest.mark.parametrize("epoch", [1, 2])
def test_interrupted_around_the_recast(epoch, whole, tmp_path):
    """Stopped before or after it, a run finds its way; the recast is made once."""
    import isomorph.training.run.loop as loop

    def dying(run, *rest, close=loop.finish_epoch):
        close(run, *rest)
        if run.progress.closed == epoch:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "finish_epoch", dying)
        with pytest.raises(KeyboardInterrupt):
            iso.train(recipe(tmp_path / "part", 1, data=FEW), show=False)
    iso.train(recipe(tmp_path / "part", 1, data=FEW), show=False)
    a, b = (read_snapshot(newest_snapshot(folder).path) for folder in (whole, tmp_path / "part"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert iso.edits(iso.load(tmp_path / "part/model.safetensors"))[0].names == (WHERE,)


def test_unstride_freeze_and_anneal_come_with_it(tmp_path):
    model = dict(name="cifar_resnet20", unstride="layer3", recast_epoch=1, recast=dict(where=WHERE), freeze=["*.gate"])
    values = recipe(tmp_path, 1, model, anneal=dict(epochs=1), ema=None)
    run = run_to(open_run(values), 1)
    assert not any(name.endswith("gate") for name, _ in run.trained.named_parameters())
    result = iso.train(values, show=False).model
    layer = result.get_submodule(WHERE)
    assert not layer.gate.requires_grad
    assert layer.locality.max() < 1.5


def test_at_the_last_epoch_it_is_never_made_and_the_model_is_the_cnn(tmp_path):
    result = iso.train(recipe(tmp_path, 2, epochs=2, data=FEW), show=False)
    assert not iso.edits(result.model)
    assert isinstance(result.model.get_submodule(WHERE), nn.Conv2d)


def test_what_would_fail_later_is_said_before_the_first_step(tmp_path):
    with pytest.raises(iso.UserError, match="matches no module"):
        iso.train(recipe(tmp_path / "run", 2, dict(recast=dict(where="layer9.*"))), show=False)
    with pytest.raises(iso.UserError, match="no attention layer"):
        iso.train(recipe(tmp_path / "run", 1, dict(recast=None, unstride="layer3"), monitor_every=1), show=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("epoch", [0, 1])
def test_attention_is_monitored_from_the_epoch_it_is_there(epoch, tmp_path):
    iso.train(recipe(tmp_path, epoch, epochs=2, monitor_every=1, data=FEW), show=False)
    rows = read_log(tmp_path / "monitor.jsonl")
    assert [row["step"] for row in rows] == ([1, 2, 3, 4] if epoch == 0 else [3, 4])
    assert all(list(row["max_logit"]) == list(row["entropy"]) == [WHERE] for row in rows)
    assert all(row["entropy"][WHERE] > 0 for row in rows)
