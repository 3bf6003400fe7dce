"""A run that is told to stop after a given step, in the test's own process."""

import os
import signal
import time

import pytest

import isomorph as iso
from isomorph.training import Stopped
from isomorph.training.recipe.recipe import validate
from isomorph.training.run.monitor import StepMonitor


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
