"""What a recipe recasts: in the middle of a run, and from weights of the model before its recast or after it."""

import copy
import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import isomorph as iso
from isomorph.lab.training.build import build_model
from isomorph.lab.training.recipe.model_fields import ModelPart, RecastPart
from isomorph.lab.training.run.log import Journal, read_log
from isomorph.lab.training.run.loop import recast_when_due, train_epoch
from isomorph.lab.training.run.named_state import split_optimizer
from isomorph.lab.training.run.state import Run
from isomorph.surgery import RULES
from law_rows import noisy
from refusals import refused
from tiny_runs import TINY, same_snapshots, tiny

WHERE = "layer3.2.conv2"

FEW = dict(source="digits", fraction=0.055, size=[8, 8], batch_size=32, test_images=60)
"""Two steps an epoch."""
SGD = dict(name="sgd", lr=0.05, gate_lr=0.1, warmup_epochs=1)


def recipe(out, epoch, model=None, **more):
    model = TINY["model"] | dict(recast_epoch=epoch) | (model or {})
    return tiny(
        out, **dict(model=model, data=FEW, optim=SGD, epochs=3, ema=0.9, log_every=1) | more
    )


@dataclass(frozen=True)
class Identity(iso.surgery.Rule):
    """A rule that rebuilds a convolution as itself."""

    atol: ClassVar[float] = 0.0
    kind: ClassVar[tuple[type, ...]] = (nn.Conv2d,)

    def reason(self, site):
        return None

    def build(self, site):
        return copy.deepcopy(site.module)


@pytest.mark.parametrize("optim", ["sgd", "adafactor"])
def test_an_identity_recast_equals_the_uninterrupted_run(optim, tmp_path, monkeypatch):
    """Weights, averages, optimiser state and schedule: the same bits, whatever the optimiser keeps."""
    monkeypatch.setitem(RULES, "Identity", Identity)
    monkeypatch.setattr(RecastPart, "build_rule", lambda self: Identity())
    moving = dict(name=optim, lr=0.01, warmup_epochs=1)
    for name, epoch in (("never", 0), ("late", 1)):
        iso.train(recipe(tmp_path / name, epoch, optim=moving, epochs=2), show=False)
    same_snapshots(tmp_path / "never", tmp_path / "late")
    losses = [
        [row["loss"] for row in read_log(tmp_path / name / "steps.jsonl")]
        for name in ("never", "late")
    ]
    assert losses[0] == losses[1]


def run_to(run, epochs):
    """The run, so many epochs on, without evaluations."""
    while run.progress.closed < epochs:
        train_epoch(run)
        run.progress.closed += 1
        run.total.zero_()
    return run


def test_kept_parameters_keep_their_state_and_new_ones_start_fresh(tmp_path):
    run = run_to(Run(recipe(tmp_path, 1)), 1)
    weights = {name: p.detach().clone() for name, p in run.trained.named_parameters()}
    averages = copy.deepcopy(run.averaged)
    before, _ = split_optimizer(run.trained, run.optimizer)
    x = torch.randn(2, 3, 16, 16)
    mean = averages.eval()(x)
    rate = run.optimizer.param_groups[0]["lr"]
    recast_when_due(run, Journal(run.recipe, run.runtime, show=False))
    after, _ = split_optimizer(run.trained, run.optimizer)
    assert after == {
        name: tensor for name, tensor in after.items() if torch.equal(tensor, before[name])
    }
    kept = {name for name, _ in run.trained.named_parameters()} & weights.keys()
    assert len(after) == len(kept) > 50
    for name in kept:
        assert torch.equal(weights[name], dict(run.trained.named_parameters())[name])
    assert isinstance(run.trained.get_submodule(WHERE), iso.layers.GPSA2d)
    # the averages' own function goes on
    torch.testing.assert_close(run.averaged.eval()(x), mean, rtol=0, atol=2e-2)
    assert run.optimizer.param_groups[0]["lr"] == rate
    assert [group["name"] for group in run.optimizer.param_groups] == [
        "decayed",
        "undecayed",
        "gates",
        "positions",
    ]
    train_epoch(run)
    assert run.optimizer.param_groups[2]["lr"] == pytest.approx(
        2 * run.optimizer.param_groups[0]["lr"]
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    iso.train(recipe(folder, 1), show=False)
    return folder


@pytest.mark.parametrize("epoch", [1, 2])
def test_interrupted_around_the_recast(epoch, whole, tmp_path):
    """Stopped before or after it, a run finds its way; the recast is made once."""
    import isomorph.lab.training.run.loop as loop

    def dying(run, *rest, close=loop.finish_epoch):
        close(run, *rest)
        if run.progress.closed == epoch:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "finish_epoch", dying)
        with pytest.raises(KeyboardInterrupt):
            iso.train(recipe(tmp_path / "part", 1), show=False)
    iso.train(recipe(tmp_path / "part", 1), show=False)
    same_snapshots(whole, tmp_path / "part")
    assert iso.edits(iso.load(tmp_path / "part/model.safetensors"))[0].names == (WHERE,)


VIT = dict(
    name="vit_tiny_patch16_224",
    kwargs=dict(img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=3),
)
CNN = dict(name="cifar_resnet20")
PARTS = {
    "ConvToGPSA": CNN | dict(recast=dict(where="layer3.2.conv?")),
    "unstride and recast": CNN | dict(unstride="layer3", recast=dict(where="layer3.2.conv?")),
    "AttentionToGPSA": VIT | dict(recast=dict(where="blocks.*.attn", rule="AttentionToGPSA")),
    "LinearToPyramid": VIT | dict(recast=dict(where=["*.qkv", "*.fc?"], rule="LinearToPyramid")),
    "head": VIT | dict(recast=dict(where="head", rule="LinearToPyramid")),
    "pyramids by birth": dict(VIT, name="tdrl_vit_ti"),
}


def trained(part, classes):
    """A model of the recipe as a run leaves it: no tensor is where it was at the start."""
    return noisy(build_model(ModelPart(**part), classes))


@pytest.mark.parametrize("name", PARTS)
def test_weights_of_both_forms_are_taken(name, tmp_path):
    part = PARTS[name]
    x = torch.randn(2, 3, 32, 32)
    model = trained(part, 5).eval()
    iso.save(model, tmp_path / "after.safetensors")
    base = {key: value for key, value in part.items() if key in ("name", "kwargs")}
    iso.save(trained(base, 5).eval(), tmp_path / "before.safetensors")
    again = build_model(ModelPart(**part, weights=tmp_path / "after.safetensors"), 5).eval()
    assert iso.edits(again) == iso.edits(model)
    assert torch.equal(again(x), model(x))
    recast = "recast" in part
    assert ("(of the recast model)" in again.isomorph_record.start) == recast
    assert [n for n, p in again.named_parameters() if not p.requires_grad] == [
        n for n, p in model.named_parameters() if not p.requires_grad
    ]
    fresh = build_model(ModelPart(**part, weights=tmp_path / "before.safetensors"), 5).eval()
    assert iso.edits(fresh) == iso.edits(model)
    assert ("(of the model before its recast)" in fresh.isomorph_record.start) == recast
    other = build_model(ModelPart(**part, weights=tmp_path / "after.safetensors"), 3).eval()
    assert other(x).shape == (2, 3)
    assert "; new: " in other.isomorph_record.start
    heads = (
        {"linear.weight", "linear.bias"}
        if part["name"].startswith("cifar")
        else {"head.weight", "head.bias"}
    )
    if name != "head":
        assert set(other.isomorph_record.start.partition("; new: ")[2].split(", ")) == heads


def test_what_cannot_be_annealed_after_the_recast_is_said_before_the_run(tmp_path):
    pyramids = dict(recast=dict(where=WHERE, rule="LinearToPyramid"))
    refused("to anneal", Run, recipe(tmp_path, 1, pyramids, anneal=dict(epochs=1)))
    convit = dict(
        name="convit_ti", recast=None, kwargs=dict(patch_size=4, depth=2, local_up_to_layer=1)
    )
    refused("give the anneal a start", Run, recipe(tmp_path, 0, convit, anneal=dict(epochs=1)))


def test_a_layer_that_a_later_recast_adds_has_no_gates_before(tmp_path):
    one = {"gates": [0.5], "spans": [1.0], "centres": [[0.0, None]]}
    rows = [{"epoch": 0, "gating": {"a": one}}, {"epoch": 1, "gating": {"a": one, "b": one}}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "log.jsonl").write_text(text)
    history = iso.training.gating_history(tmp_path)
    assert history.gates["b"].shape == (2, 1)
    assert history.gates["b"].isnan().flatten().tolist() == [True, False]
    assert history.centres["a"].isnan().sum() == 2
    logs = iso.report.read_run_logs([tmp_path])
    iso.report.compare_sections(logs, {logs[0].name: history})


def test_an_annealed_run_logs_the_network_that_it_starts_from(tmp_path):
    model = dict(name="cifar_resnet20", recast=dict(where=WHERE, init="paper"))
    iso.train(tiny(tmp_path, model=model, anneal=dict(epochs=1, start=[5, 6])), show=False)
    row = read_log(tmp_path / "log.jsonl")[0]
    assert row["gating"][WHERE]["gates"] == [0.998] * 9
    assert row["gating"][WHERE]["spans"] == [0.2] * 9


def test_an_anneal_ends_within_the_run(tmp_path):
    refused("model.recast_epoch 2", recipe, tmp_path, 2, anneal=dict(epochs=2))
    recipe(tmp_path, 1, anneal=dict(epochs=2))
