"""The training loop: steps, evaluation after each epoch, snapshots, and resumption."""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from isomorph.checkpoints.snapshot import rename_damaged
from isomorph.distributed import open_runtime, seed_everything, to_device
from isomorph.operations import count_calls, is_compiled
from isomorph.surgery.recast import edited_names
from isomorph.surgery.where import list_names
from isomorph.terminal_tables import count_of
from isomorph.training.classification import recipe_task
from isomorph.training.optim import group_table
from isomorph.training.parallel import no_gradient_sync
from isomorph.training.recipe.recipe import Recipe
from isomorph.training.run.guards import NOT_FINITE, StopRequest, lock_folder, raise_on_signals, stop_requests
from isomorph.training.run.late_recast import recast_run
from isomorph.training.run.log import Journal
from isomorph.training.run.monitor import StepMonitor, divergence_error, raise_if_stopped, save_snapshot
from isomorph.training.run.open import open_run
from isomorph.training.run.state import Run

MIN_SECONDS = 10.0
"""Epochs shorter than this many seconds are not checked for slow data loading."""

MAX_WAITING = 0.1
"""Fraction of an epoch spent waiting for images above which a run prints a warning."""


@dataclass(frozen=True)
class Result:
    """The result of a run.

    >>> data = {"source": "digits", "fraction": 0.02, "size": [8, 8]}
    >>> recipe = iso.Recipe(model={"name": "cifar_resnet20"}, data=data, epochs=1)
    >>> result = iso.train(recipe, show=False)
    >>> result.metrics["images"], str(result.folder)
    (450, 'runs/run')
    """

    model: nn.Module
    """The trained model, in eval mode; with averaged weights if the recipe has `ema`."""
    metrics: dict[str, float]
    """Metrics of the last evaluation, e.g. top1 in percent."""
    folder: Path
    """Folder of the run, with its checkpoints and logs."""
    is_main: bool = True
    """True in the leading process under torchrun, and in a run of one process."""


def train(recipe: Recipe, show: bool = True) -> Result:
    """Train a model as a recipe says, or resume from the newest complete snapshot in the folder of the run.

    Under torchrun, all processes train together. Writes `model.safetensors` and `best.safetensors` (for `iso.load`),
    the two newest snapshots (`step-*`), `log.jsonl` (per epoch), `steps.jsonl`, `recipe.json` and `environment.jsonl`
    to the folder. With `show`, the leading process prints messages and a progress bar.

    Raises: UserError when something is missing or does not fit, the folder has another run, or the disk is full;
    Diverged when the loss is not finite or far too high; Stopped after SIGTERM, SIGHUP or Ctrl-C, with the run saved.

    >>> data = {"source": "digits", "fraction": 0.02, "size": [8, 8]}
    >>> recipe = iso.Recipe(model={"name": "cifar_resnet20"}, data=data, epochs=1)
    >>> result = iso.train(recipe, show=False)
    >>> model = iso.load(result.folder / "model.safetensors")
    >>> iso.train(recipe, show=False).metrics == result.metrics  # the run is complete: nothing is trained again
    True
    """
    runtime = open_runtime(recipe.device, recipe.amp == "bf16")
    journal = Journal(recipe, runtime, show)
    with ExitStack() as stack:
        with raise_on_signals():
            if warning := stack.enter_context(lock_folder(recipe.folder, runtime)):
                journal.say(warning)
            run = open_run(recipe, runtime)  # writes nothing
        return _complete(run, journal)


def _complete(run: Run, journal: Journal) -> Result:
    """Train the remaining epochs of a run and save its model. Raises: as `train`."""
    recipe = run.recipe
    if run.progress.closed == run.epochs and run.has_written(recipe.folder / "model.safetensors"):
        journal.say(f"already complete in {recipe.folder}")
        return Result(run.result(), run.progress.metrics, recipe.folder, run.runtime.is_main)
    with stop_requests() as request, journal:
        journal.open(run.progress.closed, run.progress.step)
        _print_start(run, journal)
        while run.progress.closed < run.epochs:
            run = recast_when_due(run, journal)
            name, done = f"epoch {run.progress.closed + 1}/{run.epochs}", run.progress.step % run.order.steps
            with journal.progress(name, done, run.epoch_steps) as advance:
                loss = train_epoch(run, advance, journal, request)
            finish_epoch(run, loss, journal)
            if run.progress.closed < run.epochs:
                raise_if_stopped(run, int(run.runtime.maximum(request.number)[0]))
        run.save_autoencoder()
        run.save(recipe.folder / "model.safetensors")  # last: this file marks the run as complete
    return Result(run.result(), run.progress.metrics, recipe.folder, run.runtime.is_main)


def _print_start(run: Run, journal: Journal) -> None:
    """Print size, device and parameter groups of the run, and which snapshots could not be read."""
    recipe, runtime, progress = run.recipe, run.runtime, run.progress
    for message in rename_damaged(run.found) if run.found and runtime.is_main else ():
        journal.say(f"{message}; using the one before it")
    steps = run.order.steps
    begin = f"resuming after step {progress.step:,} of {run.iterations:,}; " if progress.step else ""
    cut = f", {run.iterations:,} in all" if run.iterations % steps else ""
    shared = f", {runtime.world} processes" if runtime.world > 1 else ""
    journal.say(
        f"{begin}{count_of(run.epochs, 'epoch')} of {count_of(steps, 'step')}{cut}, "
        f"{count_of(run.order.images, 'image')}, on {runtime.device}{shared}"
    )
    if run.start and not progress.step:
        journal.say(run.start)
    if recipe.shortened:
        journal.say(recipe.shortened)
    if recipe.data.test_images:
        journal.say(f"evaluating on {recipe.data.test_images:,} test images only (data.test_images)")
    if run.order.batch < recipe.data.batch_size:
        journal.say(f"batches of {run.order.batch}, as there are only {run.order.images:,} images")
    journal.show(*group_table(run.optimizer, recipe.optim))


def recast_when_due(run: Run, journal: Journal) -> Run:
    """Return the run, recast if it has reached the recipe's recast_epoch."""
    if run.progress.recast or run.progress.closed < run.recipe.model.recast_epoch:
        return run
    run, message = recast_run(run)
    journal.say(message)
    journal.show(*group_table(run.optimizer, run.recipe.optim))
    return run


def train_epoch(
    run: Run, advance: Any = lambda: None, journal: Journal | None = None, request: StopRequest | None = None
) -> float:
    """Train the rest of an epoch; return the mean loss of the whole epoch. Raises: Diverged, Stopped, UserError."""
    steps, progress, start = run.epoch_steps, run.progress, time.perf_counter()
    journal = journal or Journal(run.recipe, run.runtime, show=False)
    monitor = StepMonitor(run, journal, request or StopRequest())
    run.task.train()
    while progress.step < progress.closed * run.order.steps + steps:
        begin = time.perf_counter()
        with _replaced_called(run, journal):
            waited, images = train_step(run)
        progress.step += 1
        progress.seconds += time.perf_counter() - begin
        monitor.after_step(waited, images)
        advance()
    seconds = time.perf_counter() - start
    if seconds > MIN_SECONDS and monitor.waited / seconds > MAX_WAITING and not run.warned:
        run.warned = True
        advice = f"raise data.workers (now {run.recipe.data.workers})"
        journal.say(f"{monitor.waited / seconds:.0%} of the time was spent waiting for images; {advice}")
    return run.runtime.mean(run.total) / steps


@contextmanager
def _replaced_called(run: Run, journal: Journal) -> Iterator[None]:
    """Context of a step: after the first step of the recast network, say which recast layers it did not call."""
    begins = run.progress.step == run.recipe.model.recast_epoch * run.order.steps
    names = edited_names(run.trained) if begins and run.progress.recast and not is_compiled(run.trained) else []
    with count_calls(run.trained, names) as calls:
        yield
    if idle := [name for name in names if not calls[name]]:
        journal.say(f"recast, but not called in the first step: {list_names(idle)}; does a parent read the weights?")


def train_step(run: Run) -> tuple[float, Any]:
    """Train one step on this process's parts of a batch; return the seconds spent loading, and the last inputs.

    Random draws (mixing, dropout) are seeded by seed, step and part, so they do not depend on the number of processes.
    """
    recipe, step, parts = run.recipe, run.progress.step, run.share.own
    since = step - recipe.model.recast_epoch * run.order.steps
    anneal = recipe.anneal.schedule(run.order.steps) if recipe.anneal and run.progress.recast else None
    if anneal:
        anneal.apply(run.trained, since)
    run.scheduler.step_update(step)
    run.optimizer.zero_grad()
    waited = 0.0
    for part in parts:
        start = time.perf_counter()
        inputs, targets, problems = run.next_part()
        waited += time.perf_counter() - start
        run.note_unreadable(problems)
        seed_everything("step", recipe.seed, step, part)
        with no_gradient_sync(run.task) if part != parts[-1] else nullcontext():
            run.total += backward(run, inputs, targets)
    if recipe.optim.clip_grad:
        nn.utils.clip_grad_norm_(run.task.get_clip_parameters(), recipe.optim.clip_grad)
    run.optimizer.step()
    run.task.update_ema(step)
    if anneal:
        for model in filter(None, (run.trained, run.averaged)):
            anneal.set_slopes(model, since + 1)
    return waited, inputs


def backward(run: Run, inputs: Any, targets: Any) -> Tensor:
    """Add the gradients of one part of a batch; return its contribution to the mean loss of the step."""
    inputs, targets = (to_device(each, run.runtime.device) for each in (inputs, targets))
    if run.mix:
        inputs, targets = run.mix(inputs, targets)
    with run.runtime.autocast():
        loss = run.task(inputs, targets)["loss"] / len(run.share.own)
    loss.backward()
    return loss.detach()


def finish_epoch(run: Run, loss: float, journal: Journal) -> None:
    """Evaluate, save the best model, write the log and a snapshot. Raises: Diverged, UserError."""
    recipe, progress, folder = run.recipe, run.progress, run.recipe.folder
    epoch, start = progress.closed + 1, time.perf_counter()
    due = epoch % recipe.evaluate_every == 0 or epoch == run.epochs
    metrics = {"loss": loss, **(run.measure() if due else {})}
    if not all(map(math.isfinite, metrics.values())):
        raise divergence_error(run, NOT_FINITE, "the evaluation after it")
    if due:
        progress.metrics = metrics
        if run.objective.score(metrics) > progress.best:
            progress.best = run.objective.score(metrics)
            run.save(folder / "best.safetensors")
    if recipe.keeps(epoch):
        run.save(folder / f"epoch-{epoch}.safetensors")
    seconds = progress.seconds + time.perf_counter() - start
    extra = {"unreadable": len(progress.unreadable)} if progress.unreadable else {}
    if extra:
        journal.report_unreadable(progress.unreadable)
    row = {"epoch": epoch, **metrics, "lr": run.optimizer.param_groups[0]["lr"], "seconds": seconds, **extra}
    journal.write("log.jsonl", row)
    journal.add_scalars("epoch", epoch, row)
    progress.closed, progress.seconds = epoch, 0.0
    run.total.zero_()
    save_snapshot(run)
    text = "".join(
        f"{name} {metrics[name]:{form}}  " for name, form in recipe_task(recipe).printed.items() if name in metrics
    )
    journal.say(f"epoch {epoch}/{run.epochs}  loss {loss:.4f}  {text}{seconds:.1f} s")
