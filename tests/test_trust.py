"""What a user trusts weeks of compute with: whatever ends a run, it goes on as if nothing had happened."""

import json
import os
import random
import resource
import shutil
import signal
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

import isomorph as iso
from command_line import LONGEST, SERVER, start
from isomorph.lab.training import Diverged, Stopped
from isomorph.lab.training.open import open_model
from isomorph.lab.training.recipe.recipe import validate
from isomorph.lab.training.run import loop
from isomorph.lab.training.run.checkpoints import save_snapshot
from isomorph.lab.training.run.guards import stop_requests
from isomorph.lab.training.run.log import read_log
from isomorph.lab.training.run.loop import train_epoch
from isomorph.lab.training.run.snapshot import (
    list_snapshots,
    newest_snapshot,
    read_snapshot,
    restore_replaced,
)
from isomorph.lab.training.run.state import Run
from refusals import refused
from tiny_runs import stopped_run

TINY = dict(epochs=3, ema=0.9, drop_path=0.0, log_every=1) | dict(
    model=dict(
        name="cifar_resnet20",
        kwargs=dict(depth=8),
        recast=dict(where="layer3.0.conv2", locality=5, gate=6),
    ),
    data=dict(source="digits", fraction=0.1, size=[8, 8], batch_size=32, test_images=60),
    augment=dict(crop_padding=2, hflip=0.5, erasing=0.3, mixup=0.8),
    optim=dict(lr=1e-3, gate_lr=0.1, warmup_epochs=0.5),
)
"""Four steps an epoch, with everything that draws."""


def tiny(out, **more):
    return validate({**TINY, "out": str(out), **more})


def start_training(out, largest_file=resource.RLIM_INFINITY, **more):
    """A real process that trains; what it prints is in a file next to its folder."""
    process = SERVER.Process(target=train, args=({**TINY, "out": str(out), **more}, largest_file))
    process.start()
    return process


def train(values, largest_file):
    """In the process."""
    with open(f"{values['out']}.stderr", "w") as said:
        os.dup2(said.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    iso.train(validate(values), show=False)


def same_run(a, b):
    """Weights, the last snapshot (averages, optimiser) and the logs, but for times."""
    ours = iso.load(a / "model.safetensors").state_dict()
    theirs = iso.load(b / "model.safetensors").state_dict()
    for name in ours:
        assert torch.equal(ours[name], theirs[name])
    ours = read_snapshot(newest_snapshot(a).path)
    theirs = read_snapshot(newest_snapshot(b).path)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name])
    for name, keys in (
        ("log.jsonl", ("epoch", "loss", "top1", "nll", "lr")),
        ("steps.jsonl", ("step", "lr", "loss")),
    ):
        rows = [
            [[row[key] for key in keys] for row in read_log(folder / name)] for folder in (a, b)
        ]
        assert rows[0] == rows[1]
    assert not [path for folder in (a, b) for path in folder.glob(".*")]


def stop_after(folder, step, **more):
    """A run that gets a signal after a step."""
    stopped_run(folder, step, {**TINY, **more})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    iso.train(tiny(folder), show=False)
    return folder


@pytest.mark.parametrize(("step", "workers"), [(2, 0), (6, 2), (8, 0), (12, 0)])
def test_stopped_and_taken_up_equals_uninterrupted(step, workers, whole, tmp_path):
    """Bit by bit: from the middle of an epoch, with other workers, after its last step, before its evaluation."""
    stop_after(tmp_path, step, data={**TINY["data"], "workers": workers})
    assert newest_snapshot(tmp_path).values["progress"]["step"] == step
    iso.train(tiny(tmp_path), show=False)
    same_run(whole, tmp_path)


@pytest.mark.parametrize("ended", [KeyboardInterrupt, Stopped])
def test_a_run_that_ends_around_an_evaluation(ended, whole, tmp_path, monkeypatch):
    """It dies before it, or gets a signal during it, which stops the run after it."""
    measure = Run.measure

    def signalled(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return measure(self)

    def dies(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        *(
            (loop, "finish_epoch", dies)
            if ended is KeyboardInterrupt
            else (Run, "measure", signalled)
        )
    )
    with pytest.raises(ended):
        iso.train(tiny(tmp_path, checkpoint_minutes=0), show=False)
    progress = newest_snapshot(tmp_path).values["progress"]
    assert (progress["step"], progress["closed"]) == (
        (3, 0) if ended is KeyboardInterrupt else (4, 1)
    )
    monkeypatch.undo()
    iso.train(tiny(tmp_path), show=False)
    same_run(whole, tmp_path)


def test_a_signal_may_come_twice():
    """Schedulers send SIGTERM to the processes, and again through torchrun; a second Ctrl-C is meant."""
    # a shell's background job ignores it
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGTERM)
    with stop_requests() as request:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert request.number == signal.SIGTERM
    with stop_requests() as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before
    signal.signal(signal.SIGINT, ctrl_c)


@pytest.mark.slow
def test_killed_at_random_moments(whole, tmp_path):
    """kill -9 of real processes, at any moment: the weights are those of the run that was left alone."""
    draw = random.Random(0)
    kills = 0
    for _ in range(4):
        process = start_training(tmp_path / "run", checkpoint_minutes=0)
        while process.is_alive() and not list(tmp_path.glob("run/*step-*")):
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 1.0))
        kills += process.is_alive()
        process.kill()
        process.join()
    assert kills
    iso.train(tiny(tmp_path / "run"), show=False)
    same_run(whole, tmp_path / "run")


@pytest.mark.slow
def test_sigterm_saves_and_says_so(tmp_path):
    """A real process under a scheduler that wants its machine back."""
    recipe = tmp_path / "mine.json.yaml"
    recipe.write_text(json.dumps({**TINY, "epochs": 200, "out": str(tmp_path / "run")}))
    out = tmp_path / "out"
    err = tmp_path / "err"
    out.touch(), err.touch()
    process = start(["train", str(recipe)], tmp_path, str(out), str(err))
    while process.is_alive() and len(read_log(tmp_path / "run/steps.jsonl")) < 11:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    process.join(LONGEST)
    said = err.read_text()
    assert process.exitcode == 128 + signal.SIGTERM
    assert "isomorph: stopped by SIGTERM after step" in said.splitlines()[-1]
    step = newest_snapshot(tmp_path / "run").values["progress"]["step"]
    assert step >= 11
    assert len(read_log(tmp_path / "run/steps.jsonl")) == step


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_newest_snapshot_costs_one_interval(damage, whole, tmp_path, capsys):
    stop_after(tmp_path, 6)
    last, _ = list_snapshots(tmp_path)
    shard = next(last.glob("*.safetensors"))
    whole_shard = shard.read_bytes()
    {
        "truncated": lambda: shard.write_bytes(whole_shard[:-1000]),
        "flipped": lambda: shard.write_bytes(
            whole_shard[:-100] + bytes([whole_shard[-100] ^ 1]) + whole_shard[-99:]
        ),
    }[damage]()
    iso.train(tiny(tmp_path))
    said = " ".join(capsys.readouterr().out.split())
    assert "is damaged" in said
    assert "resuming after step 4 of 12" in said
    assert [path.name for path in tmp_path.glob("damaged-*")] == ["damaged-step-00000006"]
    same_run(whole, tmp_path)


def test_a_snapshot_that_is_written_again_is_whole_until_the_new_one_is(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no space left")

    run = Run(tiny(tmp_path))
    path = save_snapshot(run)
    monkeypatch.setattr(dcp, "save", fail)
    refused("no space left; snapshots before it, if any, are intact", save_snapshot, run)
    assert newest_snapshot(tmp_path).path == path
    monkeypatch.undo()
    # killed when the new one is complete and has no name yet
    monkeypatch.setattr("os.replace", fail)
    refused("no space left", save_snapshot, run)
    assert newest_snapshot(tmp_path).path == path
    path.rename(tmp_path / f".{path.name}.old")  # and killed before the old one has its name again
    restore_replaced(tmp_path)
    assert newest_snapshot(tmp_path).path == path


@pytest.mark.slow
def test_a_full_disk_stops_with_the_older_snapshot_whole(whole, tmp_path):
    """A real process that may write no file above 1 MB from some moment on, as on a full disk."""
    stop_after(tmp_path / "run", 5)
    process = start_training(tmp_path / "run", largest_file=1_000_000)
    process.join(LONGEST)
    assert process.exitcode == 1
    assert "UserError: cannot write" in (tmp_path / "run.stderr").read_text()
    assert newest_snapshot(tmp_path / "run").values["progress"]["step"] == 5
    assert not list(tmp_path.glob("run/.*"))
    iso.train(tiny(tmp_path / "run"), show=False)
    same_run(whole, tmp_path / "run")


class TestDivergence:
    def test_nan_stops_and_keeps_the_snapshot(self, tmp_path):
        stop_after(tmp_path, 2)
        kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("step-*/*")}
        run = Run(tiny(tmp_path))
        with torch.no_grad():
            run.loss_module.trainable_module.conv1.weight.fill_(float("nan"))
        with pytest.raises(
            Diverged, match=r"not finite at epoch 1, step 3; the last snapshot is .*step-00000002"
        ):
            train_epoch(run)
        assert kept == {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("step-*/*")}

    def test_weights_that_are_not_finite_are_never_kept(self, tmp_path):
        """What a run keeps is whole at every moment, also where the loss is not looked at."""
        with pytest.raises(Diverged, match="not finite at epoch 1"):
            iso.train(
                tiny(
                    tmp_path, optim=dict(lr=1e30, gate_lr=0.1), checkpoint_minutes=0, log_every=50
                ),
                show=False,
            )
        for path in list_snapshots(tmp_path):
            for tensor in read_snapshot(path).values():
                if tensor.is_floating_point():
                    assert tensor.isfinite().all()
        assert not (tmp_path / "best.safetensors").exists()


def test_what_does_not_change_the_computation_may_change(whole, tmp_path):
    stop_after(tmp_path, 5)
    other = dict(
        scale=dict(activation_checkpointing=False),
        checkpoint_minutes=3,
        data={**TINY["data"], "workers": 1},
    )
    iso.train(tiny(tmp_path, **other), show=False)
    same_run(whole, tmp_path)


def test_a_finished_run_stays_and_its_damaged_model_is_written_anew(tmp_path):
    iso.train(tiny(tmp_path, epochs=1), show=False)
    path = tmp_path / "model.safetensors"
    written = path.read_bytes()
    changed = path.stat().st_mtime_ns
    weights = iso.load(path).state_dict()
    for name, tensor in open_model(str(tmp_path)).state_dict().items():
        assert torch.equal(tensor, weights[name])
    iso.train(tiny(tmp_path, epochs=1), show=False)
    assert path.stat().st_mtime_ns == changed
    path.write_bytes(written[:-10])
    iso.train(tiny(tmp_path, epochs=1), show=False)
    again = iso.load(path).state_dict()
    for name in weights:
        assert torch.equal(again[name], weights[name])
    changed = path.stat().st_mtime_ns
    for snapshot in tmp_path.glob("step-*"):
        shutil.rmtree(snapshot)
    refused("has a run without a snapshot", iso.train, tiny(tmp_path, epochs=1), show=False)
    assert path.stat().st_mtime_ns == changed
    for name, tensor in open_model(str(tmp_path)).state_dict().items():
        assert torch.equal(tensor, weights[name])
