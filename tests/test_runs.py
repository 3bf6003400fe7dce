"""What a run does in its folder: alone, on any damage, after a closed terminal; and what opens it afterwards."""

import json
import os
import re
import shutil
import signal

import pytest
import timm
import torch

import isomorph as iso
from isomorph.checkpoints.foreign import ModelOptions
from isomorph.lab.distributed import Runtime
from isomorph.lab.recipes import load_recipe
from isomorph.lab.training.history import saved_models
from isomorph.lab.training.open import open_model, open_trained
from isomorph.lab.training.recipe.recipe import validate
from isomorph.lab.training.run.guards import lock_folder, stop_requests
from isomorph.lab.training.run.log import ClosableStream, read_log
from isomorph.lab.training.run.named_state import AVERAGED_PREFIX, MODEL_PREFIX
from isomorph.lab.training.run.resume import weights_in
from isomorph.lab.training.run.snapshot import (
    digest_of,
    list_snapshots,
    newest_snapshot,
    read_snapshot,
)
from isomorph.lab.training.run.state import Run, check_files
from isomorph.surgery import notes
from refusals import refused
from test_own_images import images
from tiny_runs import same_snapshots, stopped_run

CPU = Runtime(torch.device("cpu"), False)
TINY = dict(
    model=dict(
        name="vit_tiny_patch16_224",
        kwargs=dict(img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=2),
    ),
    data=dict(source="digits", fraction=0.1, size=[8, 8], batch_size=32, test_images=60),
    augment=dict(hflip=0.5),
    optim=dict(lr=1e-3),
    epochs=2,
    log_every=1,
    monitor_every=2,
)
"""Four steps an epoch."""
NAME = "run"


def tiny(out, **more):
    return validate({**TINY, "out": str(out), **more})


def same_weights(a, b):
    same_snapshots(a, b)
    rows = [
        [(row["epoch"], row["loss"]) for row in read_log(folder / "log.jsonl")] for folder in (a, b)
    ]
    assert rows[0] == rows[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    iso.train(tiny(folder), show=False)
    return folder


@pytest.fixture(scope="module")
def halted(tmp_path_factory):
    """Stopped within the second epoch: snapshots of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("halted") / "run"
    stopped_run(folder, 6, TINY)
    return folder


@pytest.fixture
def run(halted, tmp_path):
    return shutil.copytree(halted, tmp_path / "run")


def test_the_folder_is_locked_before_anything_is_decided(tmp_path):
    def held():
        with (
            pytest.raises(iso.UserError, match="another process trains"),
            lock_folder(tmp_path / "x/run", CPU),
        ):
            pass

    with lock_folder(tmp_path / "x/run", CPU) as said:
        assert said == ""
        held()
        assert (tmp_path / "x/run").is_dir()
    assert not (tmp_path / "x").exists()


def state_of(run):
    return list_snapshots(run)[0] / "state.json"


def mistyped(run):
    """By someone who makes the digest fit."""
    state = json.loads(state_of(run).read_text())
    state["progress"]["step"] = "6"
    state_of(run).write_text(json.dumps(state | {"digest": digest_of(state)}))


def copied(run):
    shutil.copytree(list_snapshots(run)[0], run / "step-00000099")


DAMAGE = {
    "mistyped": (mistyped, "progress.step is .* and should be a valid integer"),
    "cut": (
        lambda run: state_of(run).write_bytes(state_of(run).read_bytes()[:-9]),
        r"step-00000006 is damaged: ",
    ),
    "a foreign file": (
        lambda run: state_of(run).with_name("notes.txt").touch(),
        "notes.txt is not part of it",
    ),
    "a copy": (copied, "step-00000099 is damaged: it is a copy of the one after step 6"),
}
"""What happens to the newest snapshot, and what is said of it."""


class TestDamage:
    @pytest.mark.parametrize("kind", DAMAGE)
    def test_a_resume_goes_back_to_the_snapshot_before(self, kind, run, whole, capsys):
        damage, expected = DAMAGE[kind]
        damage(run)
        step = 6 if (run / "step-00000099").exists() else 4
        resumed = Run(tiny(run))
        assert re.search(expected, resumed.resumed_from.damaged[0][1])
        assert resumed.progress.step == step
        tensors = resumed.tensors()[0]
        kept = read_snapshot(run / f"step-0000000{step}")
        assert tensors.keys() == kept.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, kept[name])
        if kind == "a foreign file":
            iso.train(tiny(run))
            said = " ".join(capsys.readouterr().out.split())
            assert re.search(expected, said), said
            assert f"using the one before it {NAME}: resuming after step {step} of 8" in said
            same_weights(run, whole)

    def test_a_log_that_lacks_epochs_is_said(self, run, capsys):
        (run / "log.jsonl").unlink()
        iso.train(tiny(run))
        assert "log.jsonl lacks 1 epoch before the snapshot" in " ".join(
            capsys.readouterr().out.split()
        )

    def test_every_byte_counts(self, run):
        """Any bit of state.json: the values are those that were written, or the snapshot is damaged."""
        path = state_of(run)
        found = newest_snapshot(run).values
        content = path.read_bytes()
        for place in range(0, len(content), max(1, len(content) // 150)):
            flipped = bytes([content[place] ^ 1 << place % 8])
            path.write_bytes(content[:place] + flipped + content[place + 1 :])
            now = newest_snapshot(run)
            assert now.damaged or now.values == found

    @pytest.mark.parametrize("name", ["log", "steps"])
    def test_damaged_lines_of_logs_are_dropped(self, name, run, whole):
        path = run / f"{name}.jsonl"
        rows = len(read_log(path))
        lines = [
            b'{"step": "x"}',
            b'{"epoch": null}',
            b"[1]",
            b'{"top1\xff": 1}',
            b"[" * 100_000,
            b"3",
            b'{"cut',
        ]
        path.write_bytes(b"\n".join([lines[0], path.read_bytes(), *lines[1:]]))
        assert len(read_log(path)) == rows
        iso.train(tiny(run), show=False)
        assert len(read_log(path)) == len(path.read_text().splitlines())
        same_weights(run, whole)


class TestFolders:
    def test_a_snapshot_that_its_run_drops_meanwhile_is_not_damage(self, run, monkeypatch):
        import isomorph.lab.training.run.snapshot as snapshot

        def dropped(path, read=snapshot.read_values):
            if path.name == "step-00000006":
                shutil.rmtree(path)
            return read(path)

        monkeypatch.setattr(snapshot, "read_values", dropped)
        found = newest_snapshot(run)
        assert found.path.name == "step-00000004"
        assert not found.damaged

    def test_a_run_is_opened_before_its_first_evaluation(self, tmp_path):
        """A snapshot says by itself how its model is rebuilt, with its weights or their averages."""
        stopped_run(tmp_path / "run", 2, {**TINY, "ema": 0.5})
        assert not (tmp_path / "run/best.safetensors").exists()
        tensors = read_snapshot(newest_snapshot(tmp_path / "run").path)
        for ema, prefix in ((True, AVERAGED_PREFIX), (False, MODEL_PREFIX)):
            state = open_model(str(tmp_path / "run"), options=ModelOptions(ema=ema)).state_dict()
            for name, tensor in state.items():
                assert torch.equal(tensor, tensors[f"{prefix}{name}"])


def test_a_run_with_a_constant_rate_goes_on_for_more_epochs(tmp_path):
    """And is then the run that had them from the start. With fewer epochs it is another run."""
    steady = dict(optim=dict(lr=1e-3, schedule="constant"), ema=0.5)
    for epochs in (1, 3):
        iso.train(tiny(tmp_path / "on", **steady | dict(epochs=epochs)), show=False)
    iso.train(tiny(tmp_path / "whole", **steady | dict(epochs=3)), show=False)
    same_weights(tmp_path / "on", tmp_path / "whole")
    refused(
        "epochs was 3, is now 2",
        iso.train,
        tiny(tmp_path / "on", **steady | dict(epochs=2)),
        show=False,
    )
    falling = dict(optim=dict(lr=1e-3, schedule="constant", min_weight_decay=0.01))
    iso.train(tiny(tmp_path / "falling", **falling, epochs=1), show=False)
    longer = tiny(tmp_path / "falling", **falling, epochs=3)
    refused("epochs was 1, is now 3", iso.train, longer, show=False)
    late = dict(lr=1e-3, warmup_iterations=8)
    refused(
        "warmup_iterations must be below the run's 8 steps",
        iso.train,
        tiny(tmp_path / "late", optim=late),
    )


def test_a_run_whose_classes_change_places_does_not_go_on(tmp_path):
    data = dict(source="imagefolder", root=images(tmp_path / "photos"), split=0.4, batch_size=4)
    run = dict(
        data=data,
        optim=dict(schedule="constant"),
        model=dict(name="cifar_resnet20"),
        monitor_every=None,
    )
    iso.train(tiny(tmp_path / "run", **run, epochs=1), show=False)
    (tmp_path / "photos/apple").rename(tmp_path / "photos/zapple")
    refused(
        "class 0 was apple, is now pear",
        iso.train,
        tiny(tmp_path / "run", **run, epochs=2),
        show=False,
    )


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    optim = dict(weight_decay=1e38, lr=100, schedule="constant")
    data = TINY["data"] | dict(batch_size=128)  # one step an epoch
    run = tiny(tmp_path / "run", optim=optim, data=data, evaluate_every=2, keep_every=1)
    refused(
        "the weights are not finite at epoch 1, step 1; there is no snapshot",
        iso.train,
        run,
        show=False,
    )
    assert not (tmp_path / "run/epoch-1.safetensors").exists()


SMALL = dict(img_size=16, patch_size=4, embed_dim=12, depth=1, num_heads=2)
MASKED = dict(
    model=dict(name="tdrl_vit_ti", kwargs=SMALL),
    data=dict(
        source="digits",
        fraction=0.1,
        size=[16, 16],
        batch_size=32,
        test_images=60,
        test_crop="whole",
    ),
    optim=dict(lr=1e-3),
    mask=dict(depth=1, width=16, heads=4),
    epochs=2,
    keep_every=1,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    iso.train(validate({**MASKED, "out": str(folder / "mae"), "ema": 0.5}), show=False)
    mask = dict(**MASKED["mask"], teacher=str(folder / "mae/autoencoder.safetensors"), block=1)
    iso.train(validate({**MASKED, "out": str(folder / "g2sd"), "mask": mask}), show=False)
    return folder


@pytest.mark.parametrize("name", ["mae", "g2sd"])
def test_the_folder_of_a_pre_training_is_its_encoder(name, runs):
    """Table 9 of TDRL fuses after pre-training."""
    model = open_model(str(runs / name))
    written = iso.load(runs / name / "model.safetensors")
    for n, tensor in model.state_dict().items():
        assert torch.equal(tensor, written.state_dict()[n])
    assert [epoch for epoch, _ in saved_models(runs / name)] == [1, 2]


class TestSignals:
    def test_under_nohup_it_stays_ignored(self):
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with stop_requests() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request.number
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, before)

    def test_a_stream_that_fails_is_dropped(self):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as stream:
            terminal = ClosableStream(stream)
            for _ in range(3):
                assert terminal.write("x" * 100_000) == 100_000
                terminal.flush()


def test_random_weights_are_said_aloud_and_a_resumed_run_is_not_asked(tmp_path):
    model = TINY["model"] | dict(start="weights")
    refused(
        r"model.start=random starts from random weights", Run, tiny(tmp_path / "run", model=model)
    )
    stopped_run(tmp_path / "run", 2, {**TINY, "model": TINY["model"] | dict(start="random")})
    assert Run(tiny(tmp_path / "run", model=model)).progress.step == 2
    iso.save(
        timm.create_model(TINY["model"]["name"], **TINY["model"]["kwargs"]),
        tmp_path / "w.safetensors",
    )
    assert Run(tiny(tmp_path / "new", model=model | dict(weights=str(tmp_path / "w.safetensors"))))


def test_an_unfinished_run_is_continued_from_weights_that_it_has(tmp_path):
    assert weights_in(tmp_path) is None
    (tmp_path / "best.safetensors").touch()
    assert weights_in(tmp_path) == tmp_path / "best.safetensors"
    recipe = load_recipe("finetune", [f"model.weights={tmp_path}"])
    refused("is a folder; give a checkpoint in it, like .*best.safetensors", check_files, recipe)
    recipe = load_recipe("finetune", [f"model.weights={tmp_path / 'model.safetensors'}"])
    refused("its run is not finished, and .*best.safetensors is there", check_files, recipe)
    (tmp_path / "model.safetensors").touch()
    assert weights_in(tmp_path) == tmp_path / "model.safetensors"


def test_a_run_of_iterations_says_when_it_is_finished(tmp_path):
    iso.train(tiny(tmp_path, optim=dict(lr=1e-3), iterations=6), show=False)
    assert "of the finished run, after 2 of 2 epochs, 6 steps" in str(notes(open_trained(tmp_path)))


def test_a_model_from_within_an_epoch_has_its_place(tmp_path):
    stopped_run(tmp_path / "run", 1, TINY)
    ((epoch, _),) = saved_models(tmp_path / "run")
    assert 0 < epoch < 1
