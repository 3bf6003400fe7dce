"""A tiny recipe, and runs that are told to stop after a given step, in the test's own process."""

import os
import signal
import time

import pytest
import torch

import isomorph as iso
from isomorph.lab.training import Stopped
from isomorph.lab.training.recipe.recipe import validate
from isomorph.lab.training.run.loop import StepMonitor
from isomorph.lab.training.run.snapshot import newest_snapshot, read_snapshot

TINY = dict(
    model=dict(name="cifar_resnet20", recast=dict(where="layer3.2.conv2", locality=5, gate=6)),
    data=dict(source="digits", fraction=0.055, size=[16, 16], batch_size=32, test_images=60),
    augment=dict(crop_padding=2, hflip=0),
    optim=dict(lr=1e-3, gate_lr=0.1, warmup_epochs=0.5),
    epochs=2,
)
"""Two steps an epoch."""
ENDED = dict(epochs=3, evaluate_every=2, keep_every=[2, 5], log_every=1, tensorboard=True)
"""What the run of the fixture `ended` has besides."""


def tiny(out, **changes):
    return validate({**TINY, "out": str(out), **changes})


def same_snapshots(a, b):
    """Weights, averages and optimisers of two runs are the same, bit for bit."""
    ours = read_snapshot(newest_snapshot(a).path)
    theirs = read_snapshot(newest_snapshot(b).path)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name])


def stopped_run(folder, step, values):
    """Trains to the step, gets SIGTERM, saves and stops."""

    def kick(self, waited, images, after_step=StepMonitor.after_step):
        if self.run.progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
            while not self.request.number:
                time.sleep(0.001)
        after_step(self, waited, images)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepMonitor, "after_step", kick)
        with pytest.raises(Stopped, match=f"stopped by SIGTERM after step {step}; saved in"):
            iso.train(validate({**values, "out": str(folder)}), show=False)
