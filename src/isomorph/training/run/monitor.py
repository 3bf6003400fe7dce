"""What a run looks at between its steps: loss, clock, signals; what it writes down, and when it saves or stops."""

import math
import signal
import time

import torch
from torch import Tensor

from isomorph.analysis import logit_stats
from isomorph.checkpoints.snapshot import list_snapshots
from isomorph.errors import UserError
from isomorph.training.run.guards import (
    LOSS_WINDOW,
    NOT_FINITE,
    Diverged,
    Stopped,
    StopRequest,
)
from isomorph.training.run.log import Journal
from isomorph.training.run.state import Run

MONITORED_IMAGES = 32
"""Images of a batch that the attention monitor looks at."""


class StepMonitor:
    """Follows an epoch step by step. The loss is read every few steps only: each reading waits for the device."""

    def __init__(self, run: Run, journal: Journal, raise_if_stopped: StopRequest) -> None:
        self.run, self.journal, self.stop = run, journal, raise_if_stopped
        self.seen, self.written = (run.progress.step, run.total.item()), (run.progress.step, run.total.item())
        self.began = self.saved = time.perf_counter()
        self.waited = self.waited_before = 0.0

    def after_step(self, waited: float, images: Tensor) -> None:
        """What is due after a step. Raises: Diverged, Stopped, UserError."""
        run, recipe, step = self.run, self.run.recipe, self.run.progress.step
        self.waited += waited
        last = step % run.order.steps == 0
        if recipe.monitor_every and (step - 1) % recipe.monitor_every == 0:
            self.monitor(images)
        if step % LOSS_WINDOW == 0:
            self.check_loss()
        elif self.reads(step) or last:
            self.refuse_infinite()
        if step % recipe.log_every == 0 or last:
            self.write_step()
        if run.runtime.world == 1 or self.reads(step) or last:
            _check_unreadable(run)
            self.save_or_stop(last)

    def reads(self, step: int) -> bool:
        """Whether the loss is read after this step, and processes agree on what to do."""
        return step % LOSS_WINDOW == 0 or step % self.run.recipe.log_every == 0

    def loss_since(self, mark: tuple[int, float]) -> tuple[float, tuple[int, float]]:
        """The mean loss of the steps since a mark, over all processes, and the mark of now."""
        step, total = self.run.progress.step, self.run.runtime.mean(self.run.total)
        return (total - mark[1]) / max(step - mark[0], 1), (step, total)

    def check_loss(self) -> None:
        """Raises: Diverged when the loss of the latest ten steps is out of bounds."""
        loss, self.seen = self.loss_since(self.seen)
        if problem := self.run.guard.problem(loss):
            raise divergence_error(self.run, problem)

    def refuse_infinite(self) -> None:
        """Raises: Diverged when the loss of the steps since then is not finite."""
        if not math.isfinite(self.loss_since(self.seen)[0]):
            raise divergence_error(self.run, NOT_FINITE)

    def write_step(self) -> None:
        """A line of steps.jsonl: what the steps since the last one were like."""
        run, now = self.run, time.perf_counter()
        steps = run.progress.step - self.written[0]
        loss, self.written = self.loss_since(self.written)
        if not steps:
            return
        row = {
            "epoch": run.progress.closed + 1,
            "step": run.progress.step,
            "loss": loss,
            "lr": run.optimizer.param_groups[0]["lr"],
            "images_per_second": steps * run.order.batch / (now - self.began),
            "waiting": (self.waited - self.waited_before) / (now - self.began),
        }
        self.began, self.waited_before = now, self.waited
        self.journal.write("steps.jsonl", row)
        self.journal.curve("train", run.progress.step, row)

    def save_or_stop(self, last: bool) -> None:
        """A snapshot when a signal asks for one, or (but after the last step) time does. Raises: Stopped."""
        run, minutes = self.run, (time.perf_counter() - self.saved) / 60
        due = minutes >= run.recipe.checkpoint_minutes and run.runtime.leads and not last
        number, timely = run.runtime.highest(self.stop.number, due)
        if not number and not timely:
            return
        self.refuse_infinite()
        save_snapshot(run)
        self.saved = time.perf_counter()
        raise_if_stopped(run, int(number))

    def monitor(self, images: Tensor) -> None:
        """Appends what attention is like on a few images, in eval mode, by layer.

        The worst head's largest logit and largest attention, both means over images, and the mean entropy.
        """
        run = self.run
        try:
            found = logit_stats(run.objective.result(run.trained), images[:MONITORED_IMAGES].to(run.runtime.device))
        except UserError:
            if run.progress.recast:
                raise
            return  # a CNN that is recast later has no attention yet
        row = {
            "epoch": run.progress.closed + 1,
            "step": run.progress.step,
            "max_logit": {name: stats.max_logit.max().item() for name, stats in found.items()},
            "max_attention": {name: stats.max_attention.max().item() for name, stats in found.items()},
            "entropy": {name: stats.entropy.mean().item() for name, stats in found.items()},
        }
        self.journal.write("monitor.jsonl", row)


def save_snapshot(run: Run) -> None:
    """Writes a snapshot. Raises: Diverged when the weights are not finite, UserError when it cannot be written."""
    tensors = (tensor for tensor in run.trained.state_dict().values() if tensor.is_floating_point())
    broken = any(
        not torch.isfinite(tensor.to_local() if hasattr(tensor, "to_local") else tensor).all() for tensor in tensors
    )
    if run.runtime.highest(broken)[0]:
        raise divergence_error(run, "the weights are not finite")
    run.share_unreadable()
    run.snapshot()


def divergence_error(run: Run, problem: str, place: str | None = None) -> Diverged:
    """The error that stops a run whose loss or weights are out of bounds, by default after its latest step."""
    place = place or f"step {(run.progress.step - 1) % run.order.steps + 1}"
    kept = [path.name for path in list_snapshots(run.recipe.folder)[:1]]
    saved = f"the snapshot {kept[0]} is kept in {run.recipe.folder}" if kept else "there is no snapshot yet"
    advice = "lower optim.lr or optim.gate_lr, or set optim.clip_grad"
    return Diverged(f"{problem} at epoch {run.progress.closed + 1}, {place}; {saved}; {advice}")


def _check_unreadable(run: Run) -> None:
    """Raises: UserError, in all processes, when they found more images that cannot be read than the recipe allows."""
    if not run.runtime.highest(len(run.progress.unreadable))[0]:
        return
    run.share_unreadable()
    found, allowed = run.progress.unreadable, run.recipe.data.unreadable
    if len(found) > allowed:
        raise UserError(
            f"{len(found)} images cannot be read, data.unreadable allows {allowed}; the latest: {found[-1]}"
        )


def raise_if_stopped(run: Run, number: int) -> None:
    """Raises: Stopped when a signal asks for it; the run is saved."""
    if number:
        where = f"after step {run.progress.step}; saved in {run.recipe.folder}: start it again to go on"
        raise Stopped(f"stopped by {signal.Signals(number).name} {where}", number)


def all_finite(metrics: dict[str, float]) -> bool:
    return all(math.isfinite(value) for value in metrics.values())
