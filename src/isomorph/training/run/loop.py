"""The one training loop: steps, an evaluation after each epoch, snapshots in between, taken up after any end."""

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from isomorph.checkpoints.snapshot import rename_damaged
from isomorph.distributed import open_runtime
from isomorph.training.optim import group_table
from isomorph.training.recipe.recipe import Recipe
from isomorph.training.run.folder_lock import lock_folder
from isomorph.training.run.guards import (
    NOT_FINITE,
    StopRequest,
    raise_on_signals,
    stop_requests,
)
from isomorph.training.run.late_recast import recast_run
from isomorph.training.run.log import Journal
from isomorph.training.run.monitor import (
    StepMonitor,
    all_finite,
    divergence_error,
    raise_if_stopped,
    save_snapshot,
)
from isomorph.training.run.open import open_run
from isomorph.training.run.state import Run
from isomorph.training.run.step import train_step

MIN_SECONDS = 10.0
"""Seconds of an epoch that are too few to judge by."""

MAX_WAITING = 0.1
"""Share of the time that may be spent waiting for images before the run says so."""


@dataclass(frozen=True)
class Result:
    """What a run leaves: its model (averaged weights where there are any), last metrics, and folder."""

    model: nn.Module
    metrics: dict[str, float]
    folder: Path
    leads: bool = True
    """Whether this is the process that speaks for all."""


def train(recipe: Recipe, show: bool = True) -> Result:
    """Trains as the recipe says, in its folder; takes itself up from the newest whole snapshot there.

    Under torchrun, all processes train together. Leaves `model.safetensors` and `best.safetensors` (for `iso.load`),
    the two newest snapshots (`step-*`), `log.jsonl` by epoch, `steps.jsonl`, `recipe.json`, `environment.jsonl`.

    Raises: UserError when something is missing or does not fit, the folder holds another run, or the disk is full;
    Diverged when the loss is not finite or far too high; Stopped after SIGTERM, SIGHUP or Ctrl-C, when all is saved.
    """
    runtime = open_runtime(recipe.device, recipe.amp == "bf16")
    journal = Journal(recipe, runtime, show)
    with ExitStack() as held:
        with raise_on_signals():
            if said := held.enter_context(lock_folder(recipe.folder, runtime)):
                journal.say(f"{recipe.name}: {said}")
            run = open_run(recipe, runtime)  # writes nothing
        return _complete(run, journal)


def _complete(run: Run, journal: Journal) -> Result:
    """What is left of a run, all of it or nothing. Raises: as `train`."""
    recipe = run.recipe
    if run.progress.closed == recipe.epochs and run.has_written(recipe.folder / "model.safetensors"):
        journal.say(f"{recipe.name}: finished already, in {recipe.folder}")
        return Result(run.result(), run.progress.metrics, recipe.folder, run.runtime.leads)
    with stop_requests() as request, closing(journal):
        journal.open(run.progress.closed, run.progress.step)
        _print_start(run, journal)
        while run.progress.closed < recipe.epochs:
            run = recast_when_due(run, journal)
            name, steps = f"epoch {run.progress.closed + 1}/{recipe.epochs}", run.order.steps
            with journal.progress(name, run.progress.step % steps, steps) as advance:
                loss = train_epoch(run, advance, journal, request)
            finish_epoch(run, loss, journal)
            if run.progress.closed < recipe.epochs:
                raise_if_stopped(run, int(run.runtime.highest(request.number)[0]))
        run.save_autoencoder()
        run.save(recipe.folder / "model.safetensors")  # last: it says that the run has ended
    return Result(run.result(), run.progress.metrics, recipe.folder, run.runtime.leads)


def _print_start(run: Run, journal: Journal) -> None:
    """Says what is about to run, how every parameter will move, and which snapshots could not be read."""
    recipe, runtime, progress = run.recipe, run.runtime, run.progress
    for said in rename_damaged(run.found) if run.found and runtime.leads else ():
        journal.say(f"{recipe.name}: {said}; going back to the one before it")
    steps = run.order.steps
    begin = f"resuming after step {progress.step:,} of {recipe.epochs * steps:,}; " if progress.step else ""
    shared = f", {runtime.world} processes" if runtime.world > 1 else ""
    journal.say(
        f"{recipe.name}: {begin}{recipe.epochs} epochs of {steps:,} steps, {run.order.images:,} images, "
        f"on {runtime.device}{shared}"
    )
    if run.start and not progress.step:
        journal.say(f"{recipe.name}: {run.start}")
    if run.order.batch < recipe.data.batch_size:
        journal.say(f"{recipe.name}: {run.order.images:,} images make batches of {run.order.batch} only")
    for line in group_table(run.optimizer, recipe.optim):
        journal.say(line)


def recast_when_due(run: Run, journal: Journal) -> Run:
    """The run, recast where the recipe wants it recast after the epochs that are closed."""
    if run.progress.recast or run.progress.closed < run.recipe.model.recast_epoch:
        return run
    run, said = recast_run(run)
    journal.say(f"{run.recipe.name}: {said}")
    for line in group_table(run.optimizer, run.recipe.optim):
        journal.say(line)
    return run


def train_epoch(
    run: Run, advance: Any = lambda: None, journal: Journal | None = None, request: StopRequest | None = None
) -> float:
    """What is left of an epoch; returns the mean loss of the whole of it. Raises: Diverged, Stopped, UserError."""
    steps, progress, start = run.order.steps, run.progress, time.perf_counter()
    journal = journal or Journal(run.recipe, run.runtime, show=False)
    monitor = StepMonitor(run, journal, request or StopRequest())
    run.task.train()
    while progress.step < (progress.closed + 1) * steps:
        begin = time.perf_counter()
        waited, images = train_step(run)
        progress.step += 1
        progress.seconds += time.perf_counter() - begin
        monitor.after_step(waited, images)
        advance()
    seconds = time.perf_counter() - start
    if seconds > MIN_SECONDS:
        _warn_about_waiting(run, journal, monitor.waited / seconds)
    return run.runtime.mean(run.total) / steps


def _warn_about_waiting(run: Run, journal: Journal, share: float) -> None:
    """A line where the model waits for images, at the first epoch that this process sees."""
    if share > MAX_WAITING and not run.warned:
        run.warned = True
        advice = f"raise data.workers (now {run.recipe.data.workers})"
        journal.say(f"{run.recipe.name}: {share:.0%} of the time went to waiting for images; {advice}")


def finish_epoch(run: Run, loss: float, journal: Journal) -> None:
    """Evaluates, keeps the best, writes the log, takes a snapshot. Raises: Diverged, UserError."""
    recipe, progress, folder = run.recipe, run.progress, run.recipe.folder
    epoch, start = progress.closed + 1, time.perf_counter()
    due = epoch % recipe.evaluate_every == 0 or epoch == recipe.epochs
    found = {"loss": loss, **(run.measure() if due else {})}
    if not all_finite(found):
        raise divergence_error(run, NOT_FINITE, "the evaluation after it")
    if due:
        progress.metrics = found
        if run.objective.score(found) > progress.best:
            progress.best = run.objective.score(found)
            run.save(folder / "best.safetensors")
    if recipe.keep_every and epoch % recipe.keep_every == 0:
        run.save(folder / f"epoch-{epoch}.safetensors")
    seconds = progress.seconds + time.perf_counter() - start
    extra = {"unreadable": len(progress.unreadable)} if progress.unreadable else {}
    if extra:
        journal.list_unreadable(progress.unreadable)
    row = {"epoch": epoch, **found, "lr": run.optimizer.param_groups[0]["lr"], "seconds": seconds, **extra}
    journal.write("log.jsonl", row)
    journal.curve("epoch", epoch, row)
    progress.closed, progress.seconds = epoch, 0.0
    run.total.zero_()
    save_snapshot(run)
    said = "".join(f"{name} {found[name]:{form}}  " for name, form in PRINTED_METRICS.items() if name in found)
    journal.say(f"{recipe.name}: epoch {epoch}/{recipe.epochs}  loss {loss:.4f}  {said}{seconds:.1f} s")


PRINTED_METRICS = {"top1": ".2f", "reconstruction": ".4f", "alignment": ".4f"}
"""Measures that are said after each epoch."""
