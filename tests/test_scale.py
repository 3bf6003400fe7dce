"""Several processes train as one does: same images, same losses, and snapshots that either can take up."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partialmethod

import pytest
import torch
from torch import nn

import isomorph as iso
from command_line import LONGEST, SERVER, isomorph, places
from isomorph.lab.training.recipe.recipe import validate
from isomorph.lab.training.run.log import read_log
from isomorph.lab.training.run.snapshot import newest_snapshot, read_snapshot

KWARGS = dict(embed_dim=32, num_heads=4, depth=2, local_up_to_layer=1, patch_size=4, img_size=16)
VALUES = dict(epochs=2, ema=0.9, drop_path=0.1, log_every=1) | dict(
    model=dict(name="convit_ti", kwargs=KWARGS),
    data=dict(source="digits", fraction=0.1, size=[8, 8], batch_size=32),
    augment=dict(crop_padding=2, hflip=0.5, mixup=0.8, cutmix=1.0, erasing=0.2),
    optim=dict(lr=2e-3, gate_lr=0.1, warmup_epochs=0.5, clip_grad=1.0),
)
"""Four steps an epoch of a network that sees each image by itself (no BatchNorm)."""

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def write_recipe(out, **more):
    recipe = out.with_suffix(".yaml")
    recipe.write_text(json.dumps({**VALUES, "name": out.name, "out": str(out), **more}))
    return str(recipe)


def launch(out, **more):
    """A run of two processes that have what torchrun tells them."""
    return isomorph("train", write_recipe(out, **more), processes=2)


def alone(out, **more):
    return iso.train(validate({**VALUES, "name": out.name, "out": str(out), **more}), show=False)


def losses(folder):
    return torch.tensor(
        [row["loss"] for row in read_log(folder / "steps.jsonl")], dtype=torch.float64
    )


def close_runs(a, b, atol=1e-5):
    """Loss curves, measures, and every tensor of the last snapshots."""
    torch.testing.assert_close(losses(a), losses(b), rtol=0, atol=atol)
    ours = read_log(a / "log.jsonl")[-1]
    theirs = read_log(b / "log.jsonl")[-1]
    assert ours["nll"] == pytest.approx(theirs["nll"], abs=1e-4)
    assert ours["top1"] == pytest.approx(theirs["top1"], abs=0.5)
    ours = read_snapshot(newest_snapshot(a).path)
    theirs = read_snapshot(newest_snapshot(b).path)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=5e-4, msg=name)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One process that takes every batch in two parts."""
    folder = tmp_path_factory.mktemp("one") / "run"
    alone(folder, scale=dict(accumulate=2))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_equal_one(parallel, one, tmp_path):
    found = launch(tmp_path / "two", scale=dict(parallel=parallel))
    assert found.returncode == 0, found.stderr
    assert "2 processes" in found.stdout
    assert found.stdout.count("epoch 1/2") == 1
    close_runs(one, tmp_path / "two")
    shards = list(newest_snapshot(tmp_path / "two").path.glob("*.safetensors"))
    assert len(shards) == (2 if parallel == "fsdp" else 1)
    x = torch.randn(2, 3, 16, 16)
    ours = iso.load(one / "model.safetensors")(x)
    theirs = iso.load(tmp_path / "two" / "model.safetensors")(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_averages_of_batch_norms_in_a_sharded_run(tmp_path):
    """Sharded parameters next to statistics that are not sharded."""
    small = dict(model=dict(name="cifar_resnet20"), epochs=1, drop_path=0.0)
    found = launch(tmp_path / "run", **small, scale=dict(parallel="fsdp"))
    assert found.returncode == 0, found.stderr
    assert "ema.bn1.running_mean" in read_snapshot(newest_snapshot(tmp_path / "run").path)


@pytest.mark.slow
def test_a_sharded_run_goes_on_in_one_process_and_the_other_way_round(one, tmp_path):
    """Stopped after an epoch by a limit that only it has, and taken up on another number of processes."""
    first = tmp_path / "moved"
    stop_after_an_epoch(first, processes=2, scale=dict(parallel="fsdp"))
    assert newest_snapshot(first).values["progress"]["closed"] == 1
    assert len(list(newest_snapshot(first).path.glob("*.safetensors"))) == 2
    alone(first, scale=dict(accumulate=2))
    close_runs(one, first)
    second = tmp_path / "back"
    stop_after_an_epoch(second, processes=1, scale=dict(accumulate=2))
    assert newest_snapshot(second).values["progress"]["closed"] == 1
    found = launch(second, scale=dict(parallel="fsdp"))
    assert found.returncode == 0, found.stderr
    assert "resuming after step 4" in found.stdout
    close_runs(one, second)


def stop_after_an_epoch(out, processes, **more):
    """A run whose processes end as soon as an epoch is closed."""
    values = {**VALUES, "name": out.name, "out": str(out), **more}
    children = [
        SERVER.Process(target=close_and_stop, args=(values, place)) for place in places(processes)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(LONGEST)
    assert [child.exitcode for child in children] == [0] * processes


def close_and_stop(values, place):
    import isomorph.lab.training.run.loop as loop

    def close(run, *rest, close=loop.finish_epoch):
        close(run, *rest)
        os._exit(0)

    os.environ.update(place)
    loop.finish_epoch = close
    iso.train(validate(values), show=False)


@pytest.mark.slow
def test_test_images_that_cannot_be_shared_out_evenly(tmp_path):
    """Images in batches of 18: one process has a batch more, in which a sharded model needs the other."""
    few = dict(data={**VALUES["data"], "classes": 5, "batch_size": 36}, epochs=1)
    alone(tmp_path / "one", **few, scale=dict(accumulate=2))
    found = launch(tmp_path / "two", **few, scale=dict(parallel="fsdp"))
    assert found.returncode == 0, found.stderr
    ours = read_log(tmp_path / "one" / "log.jsonl")[-1]
    theirs = read_log(tmp_path / "two" / "log.jsonl")[-1]
    assert ours["images"] == theirs["images"]
    assert ours["images"] % 2 == 1
    assert ours["nll"] == pytest.approx(theirs["nll"], abs=1e-5)


@pytest.mark.slow
def test_a_signal_stops_all_processes_after_one_step(tmp_path):
    """The real torchrun starts them and passes SIGTERM on; they agree where to stop, and save."""
    out = tmp_path / "run"
    command = [*TORCHRUN, "-m", "isomorph", "train", write_recipe(out, epochs=500)]
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
    )
    while process.poll() is None and len(read_log(out / "steps.jsonl")) < 3:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LONGEST)
    step = newest_snapshot(out).values["progress"]["step"]
    assert step >= 3
    assert len(read_log(out / "steps.jsonl")) == step


STILL = dict(augment=dict(crop_padding=2), drop_path=0.0)


@pytest.mark.parametrize(
    ("values", "scale", "atol"),
    [
        (
            STILL,
            dict(accumulate=2),
            1e-5,
        ),  # without draws of its own for each part, a batch in parts is the batch
        ({}, dict(activation_checkpointing=True), 1e-6),
        ({}, dict(compile=True), 1e-4),
    ],
)
def test_memory_and_time_saved_change_nothing(values, scale, atol, tmp_path, monkeypatch):
    """Compiled without inductor, which takes a minute."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    small = dict(data={**VALUES["data"], "fraction": 0.055}, epochs=1, **values)
    alone(tmp_path / "plain", **small)
    alone(tmp_path / "other", **small, scale=scale)
    torch.testing.assert_close(
        losses(tmp_path / "plain"), losses(tmp_path / "other"), rtol=0, atol=atol
    )
    assert iso.load(tmp_path / "other/model.safetensors")
