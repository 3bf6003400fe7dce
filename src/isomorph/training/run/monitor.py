"""Checks and logs after every step: loss, time, signals, attention; and snapshots."""

import math
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.analysis import branch_similarity, logit_stats
from isomorph.checkpoints.snapshot import list_snapshots
from isomorph.errors import UserError
from isomorph.layers.pyramid.base import Pyramid
from isomorph.training.run.guards import LOSS_WINDOW, NOT_FINITE, Diverged, Stopped, StopRequest
from isomorph.training.run.log import Journal
from isomorph.training.run.state import Run

MONITORED_IMAGES = 32
"""Images of a batch on which attention is monitored."""


class Rotation:
    """Measures the angle by which a step turns the scale-free weights of each pyramid.

    Adam turns such a weight by about the learning rate in each step, whatever its gradient; the angle is its effective
    learning rate. Under fsdp the rows of this process are measured.
    """

    def __init__(self, model: nn.Module) -> None:
        pyramids = {name: module for name, module in model.named_modules() if isinstance(module, Pyramid)}
        self.weights: dict[str, list[Any]] = {
            name: [layer.weight for layer in p.scale_free_layers] for name, p in pyramids.items()
        }
        self.before: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def remember(self) -> None:
        """Store the directions of the weights before a step."""
        self.before = {name: [_directions(w).clone() for w in weights] for name, weights in self.weights.items()}

    @torch.no_grad()
    def angles(self) -> dict[str, float]:
        """Return the mean angle, in radians, between the stored rows and the present ones, and forget the stored ones.

        Layers without rows have none, and nothing has without a call of `remember` before.
        """
        found = {}
        for name, before in self.before.items():
            chords = [(_directions(w) - old).norm(dim=1) for w, old in zip(self.weights[name], before, strict=True)]
            rows = torch.cat(chords) if chords else torch.empty(0)
            if len(rows):
                found[name] = (2 * torch.asin((rows / 2).clamp(max=1))).mean()
        self.before = {}
        values = torch.stack(list(found.values())).tolist() if found else []  # one transfer from the device
        return dict(zip(found, values, strict=True))


def _directions(weight: Tensor) -> Tensor:
    """Return the rows of a weight at length 1. Shape: (out, *) -> (out, C)"""
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    return nn.functional.normalize(local.flatten(1).float(), dim=1)


class StepMonitor:
    """Checks, logs and snapshots after each step of an epoch.

    The loss is read every few steps only, since reading it waits for the device.
    """

    def __init__(self, run: Run, journal: Journal, request: StopRequest) -> None:
        self.run, self.journal, self.request = run, journal, request
        self.checked = self.written = (run.progress.step, run.total.item())  # step, sum of losses
        self.began = self.saved = time.perf_counter()
        self.waited = self.waited_before = 0.0
        self.rotation = Rotation(run.trained)
        self.prepare_rotation()

    def after_step(self, waited: float, images: Tensor) -> None:
        """Check, log and save what is due after a step. Raises: Diverged, Stopped, UserError."""
        run, recipe, step = self.run, self.run.recipe, self.run.progress.step
        self.waited += waited
        last = step % run.order.steps == 0 or step == run.iterations
        if recipe.monitor_every and (step - 1) % recipe.monitor_every == 0:
            self.monitor(images)
        self.prepare_rotation()
        if step % LOSS_WINDOW == 0:
            self.check_loss()
        elif self.reads_loss(step) or last:
            self.check_finite()
        if step % recipe.log_every == 0 or last:
            self.write_step()
        if run.runtime.world == 1 or self.reads_loss(step) or last:
            _check_unreadable(run)
            self.save_or_stop(last)

    def prepare_rotation(self) -> None:
        """Store the scale-free weights if the next step is monitored."""
        every = self.run.recipe.monitor_every
        if every and self.run.progress.step % every == 0:
            self.rotation.remember()

    def reads_loss(self, step: int) -> bool:
        """Return True if the loss is read after this step, and processes agree on whether to save or stop."""
        return step % LOSS_WINDOW == 0 or step % self.run.recipe.log_every == 0

    def loss_since(self, mark: tuple[int, float]) -> tuple[float, tuple[int, float]]:
        """Return the mean loss since a mark (step, sum of losses), over all processes, and the new mark."""
        step, total = self.run.progress.step, self.run.runtime.mean(self.run.total)
        return (total - mark[1]) / max(step - mark[0], 1), (step, total)

    def check_loss(self) -> None:
        """Raise Diverged when the mean loss of the latest ten steps is too high or not finite."""
        loss, self.checked = self.loss_since(self.checked)
        if problem := self.run.guard.problem(loss):
            raise divergence_error(self.run, problem)

    def check_finite(self) -> None:
        """Raise Diverged when the loss since the last check is not finite."""
        if not math.isfinite(self.loss_since(self.checked)[0]):
            raise divergence_error(self.run, NOT_FINITE)

    def write_step(self) -> None:
        """Write a line of steps.jsonl about the steps since the previous line."""
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
        self.journal.add_scalars("train", run.progress.step, row)

    def save_or_stop(self, last: bool) -> None:
        """Save a snapshot after a signal, or when it is due (except after the last step). Raises: Stopped."""
        run, minutes = self.run, (time.perf_counter() - self.saved) / 60
        due = minutes >= run.recipe.checkpoint_minutes and run.runtime.is_main and not last
        number, anywhere_due = run.runtime.maximum(self.request.number, due)
        if not number and not anywhere_due:
            return
        self.check_finite()
        save_snapshot(run)
        self.saved = time.perf_counter()
        raise_if_stopped(run, int(number))

    def monitor(self, images: Tensor) -> None:
        """Write a line of monitor.jsonl: attention of each layer, and turn and similar branches of each pyramid.

        Attention and branches are measured in eval mode. Largest logit and attention are means over images, of the head
        with the largest; the similarity is the mean over pairs of branches.
        """
        run = self.run
        model, images = run.objective.result(run.trained), images[:MONITORED_IMAGES].to(run.runtime.device)
        found = {**_attention(model, images), **_pyramids(model, images)}
        if not found and run.progress.recast:
            logit_stats(model, images)  # raises the error that says so
        if angles := self.rotation.angles():
            found["angle"] = angles
        if found:  # a CNN that is recast later has no attention yet
            self.journal.write("monitor.jsonl", {"epoch": run.progress.closed + 1, "step": run.progress.step, **found})


def _attention(model: nn.Module, images: Tensor) -> dict[str, dict[str, float]]:
    """Return largest logit, largest attention and mean entropy of each attention layer; nothing without any."""
    try:
        stats = logit_stats(model, images)
    except UserError:
        return {}
    return {
        "max_logit": {name: each.max_logit.max().item() for name, each in stats.items()},
        "max_attention": {name: each.max_attention.max().item() for name, each in stats.items()},
        "entropy": {name: each.entropy.mean().item() for name, each in stats.items()},
    }


def _pyramids(model: nn.Module, images: Tensor) -> dict[str, dict[str, float]]:
    """Return the mean similarity between the branches of each pyramid; nothing without any."""
    try:
        matrices = branch_similarity(model, images)
    except UserError:
        return {}
    means = {}
    for name, matrix in matrices.items():
        pairs = torch.ones(matrix.shape[-2:], device=matrix.device).triu(1).bool()
        if pairs.any():
            means[name] = matrix[..., pairs].mean().item()
    return {"branch_similarity": means}


def save_snapshot(run: Run) -> None:
    """Write a snapshot. Raises: Diverged when the weights are not finite, UserError when it cannot be written."""
    tensors = (tensor for tensor in run.trained.state_dict().values() if tensor.is_floating_point())
    not_finite = any(
        not torch.isfinite(tensor.to_local() if hasattr(tensor, "to_local") else tensor).all() for tensor in tensors
    )
    if run.runtime.maximum(not_finite)[0]:
        raise divergence_error(run, "the weights are not finite")
    run.share_unreadable()
    run.snapshot()


def divergence_error(run: Run, problem: str, place: str | None = None) -> Diverged:
    """Return the error for a run that diverged, by default at its latest step."""
    place = place or f"step {(run.progress.step - 1) % run.order.steps + 1}"
    saved = [path.name for path in list_snapshots(run.recipe.folder)[:1]]
    snapshot = f"the last snapshot is {run.recipe.folder / saved[0]}" if saved else "there is no snapshot yet"
    gates = any(group["name"].startswith("gates") for group in run.optimizer.param_groups)
    advice = f"lower optim.lr{' or optim.gate_lr' if gates else ''}, or set optim.clip_grad"
    return Diverged(f"{problem} at epoch {run.progress.closed + 1}, {place}; {snapshot}; {advice}")


def _check_unreadable(run: Run) -> None:
    """Raise UserError, in all processes, for more unreadable images than the recipe allows."""
    if not run.runtime.maximum(len(run.progress.unreadable))[0]:
        return
    run.share_unreadable()
    found, allowed = run.progress.unreadable, run.recipe.data.unreadable
    if len(found) > allowed:
        raise UserError(
            f"{len(found)} images cannot be read, but data.unreadable allows {allowed}; the latest: {found[-1]}"
        )


def raise_if_stopped(run: Run, number: int) -> None:
    """Raise Stopped for a signal, once the run is saved."""
    if number:
        where = f"after step {run.progress.step}; saved in {run.recipe.folder}, start it again to resume"
        raise Stopped(f"stopped by {signal.Signals(number).name} {where}", number)
