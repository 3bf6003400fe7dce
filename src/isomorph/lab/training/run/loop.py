"""The training loop: steps with their checks and logs, evaluation after each epoch, snapshots, and resumption."""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isomorph.analysis import (
    attention_spans,
    branch_similarity,
    centres,
    gammas,
    gates,
    logit_stats,
)
from isomorph.errors import NotFinite, Stopped, UserError
from isomorph.json_values import JsonObject
from isomorph.lab.distributed import open_runtime, seed_everything, to_device
from isomorph.lab.training.optim import describe_groups, set_weight_decay
from isomorph.lab.training.parallel import no_gradient_sync, unsharded
from isomorph.lab.training.recipe.recipe import Recipe
from isomorph.lab.training.run.checkpoints import (
    final_model,
    has_saved_model,
    save_autoencoder,
    save_model,
    save_snapshot,
)
from isomorph.lab.training.run.guards import (
    Diverged,
    StopRequest,
    lock_folder,
    stop_requests,
)
from isomorph.lab.training.run.log import Journal, read_log
from isomorph.lab.training.run.snapshot import list_snapshots, rename_damaged
from isomorph.lab.training.run.state import Run
from isomorph.operations import count_calls, is_compiled
from isomorph.surgery import edits
from isomorph.surgery.modules import list_names
from isomorph.surgery.recast import edited_names
from isomorph.terminal_tables import Metrics, Row, Rows, chance_difference, count_of

# Steps between checks that the loss is finite, since reading it waits for the device.
CHECK_EVERY = 10

# Images of a batch on which attention is monitored.
MONITORED_IMAGES = 32


@dataclass(frozen=True)
class Result:
    """The result of a run.

    >>> data = {"source": "digits", "fraction": 0.02, "size": [8, 8]}
    >>> recipe = iso.Recipe(model={"name": "cifar_resnet20"}, data=data, epochs=1)
    >>> result = iso.train(recipe, show=False)
    >>> result.metrics["images"], str(result.folder)
    (450, 'runs/run')
    """

    model: nn.Module = field(repr=False)
    """The trained model, in eval mode; with averaged weights if the recipe has `ema`."""
    metrics: Metrics
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
    Diverged when the loss is not finite; Stopped after SIGTERM, SIGHUP or Ctrl-C, with the run saved.

    >>> data = {"source": "digits", "fraction": 0.02, "size": [8, 8]}
    >>> recipe = iso.Recipe(model={"name": "cifar_resnet20"}, data=data, epochs=1)
    >>> result = iso.train(recipe, show=False)
    >>> model = iso.load(result.folder / "model.safetensors")
    >>> iso.train(recipe, show=False).metrics == result.metrics  # the run is complete: nothing is trained again
    True
    """
    runtime = open_runtime(recipe.device, recipe.amp == "bf16")
    journal = Journal(recipe, runtime, show)
    with lock_folder(recipe.folder, runtime) as warning:
        if warning:
            journal.say(warning)
        run = Run(recipe, runtime)  # writes nothing
        if run.progress.closed == run.epochs and has_saved_model(
            run, recipe.folder / "model.safetensors"
        ):
            journal.say(f"already complete in {recipe.folder}")
        else:
            with stop_requests() as request, journal:
                _train_remaining_epochs(run, journal, request)
        return Result(final_model(run), run.progress.metrics, recipe.folder, runtime.is_main)


def _train_remaining_epochs(run: Run, journal: Journal, request: StopRequest) -> None:
    progress = run.progress
    journal.open(progress.closed, progress.step)
    _print_start(run, journal)
    if progress.step == 0:
        _log_start(run, journal)
    while progress.closed < run.epochs:
        recast_when_due(run, journal)
        name = f"epoch {progress.closed + 1}/{run.epochs}"
        done = progress.step % run.order.steps
        with journal.progress(name, done, run.epoch_steps) as advance:
            loss = train_epoch(run, advance, journal, request)
        finish_epoch(run, loss, journal)
        if progress.closed < run.epochs:
            _raise_if_stopped(run, int(run.runtime.maximum(request.number)[0]))
    _say_if_worse(run, journal)
    save_autoencoder(run)
    # last: this file marks the run as complete
    save_model(run, run.recipe.folder / "model.safetensors")


def _log_start(run: Run, journal: Journal) -> None:
    """Evaluate the model before training, where its start says something: it has gates, or trained weights."""
    anneal = run.recipe.anneal
    if anneal and run.progress.recast:
        for model in run.models:  # as the first step does
            anneal.schedule(run.order.steps).apply(model, 0)
    row = gating_row(run)
    if not row and not run.has_weights:
        return
    metrics = run.objective.measure(run.averaged or run.trained, run.test, run.runtime)
    rate = run.optimizer.param_groups[0]["lr"]
    journal.write("log.jsonl", {"epoch": 0, "loss": None, **metrics, "lr": rate, **row})
    journal.say(f"before training  {printed(run, metrics)}")


def _say_if_worse(run: Run, journal: Journal) -> None:
    """Say if the score is lower than before training, by more than chance if the number of images is known."""
    rows = read_log(run.recipe.folder / "log.jsonl")
    old = next((row for row in rows if row.get("epoch") == 0), None)
    if old is None:
        return
    percent = old.get("top1", old.get("accuracy"))
    count = old.get("images") or old.get("examples")
    noise = 0.0
    if percent is not None and count:
        noise = chance_difference(percent, count)
    if run.objective.score(old) <= run.objective.score(run.progress.metrics) + noise:
        return
    advice = "train longer, or lower optim.lr"
    if run.task.classifies:
        advice = (
            "train longer, lower optim.lr, or change the images less (augment.hflip, .scale, "
            ".crop_padding)"
        )
    journal.say(f"worse than before training ({printed(run, old).strip()}); {advice}")


def _print_start(run: Run, journal: Journal) -> None:
    recipe = run.recipe
    runtime = run.runtime
    progress = run.progress
    order = run.order
    if run.resumed_from and runtime.is_main:
        for message in rename_damaged(run.resumed_from):
            journal.say(f"{message}; using the one before it")

    plan = f"{count_of(run.epochs, 'epoch')} of {count_of(order.steps, 'step')}"
    if progress.step:
        plan = f"resuming after step {progress.step:,} of {run.iterations:,}; {plan}"
    if run.iterations % order.steps:
        plan += f", {run.iterations:,} in all"
    data = count_of(order.images, "image")
    if run.task.classifies:
        data += " of {} x {}".format(*run.config["input_size"][-2:])
    device = str(runtime.device)
    if runtime.world > 1:
        device += f", {runtime.world} processes"
    journal.say(f"{plan}, {data} in batches of {order.batch}, on {device}")

    start = "" if progress.step else run.start
    for text in (start, recipe.shortened, slow_average(recipe.ema, run.iterations)):
        if text:
            journal.say(text)
    if recipe.anneal and recipe.model.weights and not progress.step:
        journal.say(
            "anneal sets gates and localities from anneal.start, whatever the loaded weights have; give anneal=null to "
            "keep theirs"
        )
    if recipe.augment.crop_padding == "auto":
        padding = recipe.augment.padding_at(*run.config["input_size"][-2:])
        if padding:
            journal.say(
                f"small images: random crops of images padded by {padding} px, not resized "
                "crops (augment.crop_padding)"
            )
    journal.show(*describe_groups(run.trained, run.optimizer, recipe.optim))


def recast_when_due(run: Run, journal: Journal) -> None:
    if not run.progress.recast and run.progress.closed >= run.recipe.model.recast_epoch:
        journal.say(run.recast())
        journal.show(*describe_groups(run.trained, run.optimizer, run.recipe.optim))


def printed(run: Run, metrics: Row) -> str:
    """Return the metrics that the task prints, as text."""
    text = ""
    for name, form in run.task.printed.items():
        if name in metrics:
            text += f"{name} {metrics[name]:{form}}  "
    return text


def train_epoch(
    run: Run,
    advance: Callable[[], None] = lambda: None,
    journal: Journal | None = None,
    request: StopRequest | None = None,
) -> float:
    """Train the rest of an epoch; return the mean loss of the whole epoch. Raises: Diverged, Stopped, UserError."""
    steps = run.epoch_steps
    progress = run.progress
    journal = journal or Journal(run.recipe, run.runtime, show=False)
    monitor = StepMonitor(run, journal, request or StopRequest())
    run.loss_module.train()
    while progress.step < progress.closed * run.order.steps + steps:
        begin = time.perf_counter()
        with _idle_layers_reported(run, journal):
            waited, images = train_step(run)
        progress.step += 1
        progress.seconds += time.perf_counter() - begin
        monitor.after_step(waited, images)
        advance()
    return run.mean_total(0) / steps


@contextmanager
def _idle_layers_reported(run: Run, journal: Journal) -> Iterator[None]:
    """Context of a step: after the first step of the recast network, say which recast layers it did not call."""
    begins = run.progress.step == run.recipe.model.recast_epoch * run.order.steps
    names = []
    if begins and run.progress.recast and not is_compiled(run.trained):
        names = edited_names(run.trained, edits(run.trained))
    with count_calls(run.trained, names) as calls:
        yield
    idle = [name for name in names if not calls[name]]
    if idle:
        journal.say(
            f"recast, but not called in the first step: {list_names(idle)}; does a parent read the weights?"
        )


def train_step(run: Run) -> tuple[float, Any]:
    """Train one step on this process's parts of a batch; return the seconds spent loading, and the last inputs.

    Random draws are seeded by seed, step and part, so they do not depend on the number of processes.
    """
    recipe = run.recipe
    step = run.progress.step
    parts = run.share.own
    since = step - recipe.model.recast_epoch * run.order.steps
    anneal = None
    if recipe.anneal and run.progress.recast:
        anneal = recipe.anneal.schedule(run.order.steps)
    if anneal and not since:  # later steps begin where the one before has set it
        anneal.apply(run.trained, since)
    run.scheduler.step_update(step)
    set_weight_decay(run.optimizer, recipe.optim, step / run.iterations)
    run.optimizer.zero_grad()
    waited = 0.0
    for part in parts:
        start = time.perf_counter()
        inputs, targets, problems = run.next_part()
        waited += time.perf_counter() - start
        run.note_unreadable(problems)
        seed_everything("step", recipe.seed, step, part)
        if part == parts[-1]:
            _train_part(run, inputs, targets)
        else:
            with no_gradient_sync(run.loss_module):
                _train_part(run, inputs, targets)
    if recipe.optim.clip_grad:
        nn.utils.clip_grad_norm_(run.loss_module.get_clip_parameters(), recipe.optim.clip_grad)
    run.optimizer.step()
    # timm numbers steps from 1, and averages from the second on
    run.loss_module.update_ema(step + 1)
    if anneal:
        for model in run.models:
            anneal.apply(model, since + 1)
    return waited, inputs


def _train_part(run: Run, inputs: Any, targets: Any) -> None:
    """Add the gradients of one part of a batch, and its contribution to the mean loss and accuracy of the step."""
    parts = len(run.share.own)
    loaded = inputs
    inputs = _at_its_size(run, to_device(inputs, run.runtime.device))
    targets = to_device(targets, run.runtime.device)
    if run.mix:
        if inputs is loaded:
            # timm mixes in place, and the monitor reads the images unmixed
            inputs = inputs.clone()
        inputs, targets = run.mix(inputs, targets)
    with run.runtime.autocast():
        result = run.loss_module(inputs, targets)
        loss = result["loss"] / parts
    loss.backward()
    run.total[0] += loss.detach()
    if run.objective.accuracy:
        truth = result.get("target", targets)
        run.total[1] += run.objective.accuracy(result["output"], truth) / parts


def _at_its_size(run: Run, inputs: Any) -> Any:
    """Return the images at the size of their epoch, which is smaller at first in some recipes."""
    side = run.recipe.augment.side_at(run.progress.step / run.order.steps)
    if side is None:
        return inputs
    return F.interpolate(inputs, (side, side), mode="bilinear", antialias=True)


def finish_epoch(run: Run, loss: float, journal: Journal) -> None:
    """Evaluate, save the best model, write the log and a snapshot. Raises: Diverged, UserError."""
    recipe = run.recipe
    progress = run.progress
    folder = run.recipe.folder
    check_weights(run)
    epoch = progress.closed + 1
    start = time.perf_counter()
    due = epoch % recipe.evaluate_every == 0 or epoch == run.epochs
    metrics = _epoch_metrics(run, loss, due)
    if due:
        progress.metrics = metrics
        if run.objective.score(metrics) > progress.best:
            progress.best = run.objective.score(metrics)
            save_model(run, folder / "best.safetensors")
    if recipe.keeps(epoch):
        save_model(run, folder / f"epoch-{epoch}.safetensors")

    row = {"epoch": epoch, **metrics, "lr": run.optimizer.param_groups[0]["lr"], **gating_row(run)}
    if progress.unreadable:
        row["unreadable"] = len(progress.unreadable)
        journal.say(
            f"{len(progress.unreadable)} unreadable images so far, the latest: {progress.unreadable[-1]}"
        )
    row["seconds"] = progress.seconds + time.perf_counter() - start
    journal.write("log.jsonl", row)
    progress.closed = epoch
    progress.seconds = 0.0
    run.total.zero_()
    progress.logged_total = 0.0
    save_snapshot(run)

    text = printed(run, metrics) + _gating_text(run, row)
    journal.say(f"epoch {epoch}/{run.epochs}  loss {loss:.4f}  {text}{row['seconds']:.1f} s")
    if epoch == run.epochs and row.get("gating"):
        message = unmoved_gates(run.trained, read_log(folder / "log.jsonl"))
        if message:
            journal.say(message)


def _epoch_metrics(run: Run, loss: float, evaluate: bool) -> Metrics:
    """Return loss and training accuracy of an epoch, and what an evaluation measures. Raises: Diverged."""
    metrics = {"loss": loss}
    if run.objective.accuracy:
        metrics["train_top1"] = 100 * run.mean_total(1) / run.epoch_steps
    if evaluate:
        try:
            metrics |= run.measure()
        except NotFinite:
            problem = "the network's outputs are not finite"
            raise divergence_error(run, problem, "the evaluation after it") from None
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise divergence_error(run, f"the {name} is not finite", "the evaluation after it")
    return metrics


def _gating_text(run: Run, row: Row) -> str:
    """Return the range of the gates, the largest gamma and the progress of annealing, if there are any."""
    recipe = run.recipe
    text = ""
    heads = [gate for layer in row.get("gating", {}).values() for gate in layer.get("gates", ())]
    if heads:
        text += f"gates {min(heads):.2f} to {max(heads):.2f}  "
    if "gamma" in row:
        text += f"gamma up to {max(row['gamma'].values()):.2g}  "
    if recipe.anneal and run.progress.recast:
        annealed = (row["epoch"] - recipe.model.recast_epoch) / recipe.anneal.epochs
        text += f"annealed {min(1.0, annealed):.0%}  "
    return text


class StepMonitor:
    """Checks, logs and snapshots after each step of an epoch."""

    def __init__(self, run: Run, journal: Journal, request: StopRequest) -> None:
        self.run = run
        self.journal = journal
        self.request = request
        self.saved = self.agreed_at = time.perf_counter()
        self.agreed_step = run.progress.step
        self.slow = True  # a step takes more than a second, which is assumed until it is measured
        self._begin_row()

    def _begin_row(self) -> None:
        self.began = time.perf_counter()
        self.first = self.run.progress.step
        self.waited = 0.0

    def after_step(self, waited: float, images: Tensor) -> None:
        """Check, log and save what is due after a step. Raises: Diverged, Stopped, UserError."""
        run = self.run
        step = run.progress.step
        last = step % run.order.steps == 0 or step == run.iterations
        logs = step % run.recipe.log_every == 0 or last
        checks = logs or step % CHECK_EVERY == 0
        self.waited += waited
        self._monitor(images)
        if checks:
            total = _finite_total(run)
            if logs:
                self._write_row(total)
        # several processes agree on the steps that are checked, and on all of them while these are slow
        if run.runtime.world > 1 and not checks and not self.slow:
            return
        _check_unreadable(run)
        signal_number, saves = self._agree(last)
        if signal_number or saves:
            _finite_total(run)
            check_weights(run)
            save_snapshot(run)
            self.saved = time.perf_counter()
            _raise_if_stopped(run, signal_number)

    def _monitor(self, images: Tensor) -> None:
        run = self.run
        step = run.progress.step
        every = run.recipe.monitor_every
        if not every or (step - 1) % every:
            return
        row = monitor_row(run, images)
        if row:
            self.journal.write(
                "monitor.jsonl", {"epoch": run.progress.closed + 1, "step": step, **row}
            )

    def _agree(self, last: bool) -> tuple[int, bool]:
        """Return the signal that any process got, or 0, and whether a snapshot is due: the same in all processes."""
        run = self.run
        step = run.progress.step
        now = time.perf_counter()
        minutes = (now - self.saved) / 60
        due = minutes >= run.recipe.checkpoint_minutes and run.runtime.is_main and not last
        seconds_a_step = (now - self.agreed_at) / (step - self.agreed_step)
        number, anywhere_due, slowest = run.runtime.maximum(
            self.request.number, due, seconds_a_step
        )
        self.agreed_at = now
        self.agreed_step = step
        self.slow = slowest > 1
        return int(number), bool(anywhere_due)

    def _write_row(self, total: float) -> None:
        """Write a line of steps.jsonl about the steps since the previous line, given the sum of losses after them."""
        run = self.run
        seconds = time.perf_counter() - self.began
        progress = run.progress
        step = run.progress.step
        loss = (total - progress.logged_total) / (step - progress.logged)
        # since the run resumed, if that was later
        speed = (step - self.first) * run.order.batch / seconds
        row = {
            "epoch": progress.closed + 1,
            "step": step,
            "loss": loss,
            "lr": run.optimizer.param_groups[0]["lr"],
            "images_per_second": speed,
            "waiting": self.waited / seconds,
        }
        self.journal.write("steps.jsonl", row)
        progress.logged = step
        progress.logged_total = total
        self._begin_row()


def _finite_total(run: Run) -> float:
    total = run.mean_total(0)
    if not math.isfinite(total):
        raise divergence_error(run, "the loss is not finite")
    return total


def check_weights(run: Run) -> None:
    """Raise Diverged when weights, or their averages, are not finite."""
    finite = all(map(_has_finite_weights, run.models))
    if run.runtime.maximum(not finite)[0]:
        raise divergence_error(run, "the weights are not finite")


def _has_finite_weights(model: nn.Module) -> bool:
    for tensor in model.state_dict().values():
        if hasattr(tensor, "to_local"):  # this process's part of a sharded tensor
            tensor = tensor.to_local()
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return False
    return True


def divergence_error(run: Run, problem: str, place: str | None = None) -> Diverged:
    """Return the error for a run that diverged, by default at its latest step."""
    place = place or f"step {(run.progress.step - 1) % run.order.steps + 1}"
    snapshots = list_snapshots(run.recipe.folder)
    snapshot = "there is no snapshot yet"
    if snapshots:
        snapshot = f"the last snapshot is {run.recipe.folder / snapshots[0].name}"
    rates = "optim.lr"
    if any(group["name"].startswith("gates") for group in run.optimizer.param_groups):
        rates = "optim.lr or optim.gate_lr"
    return Diverged(
        f"{problem} at epoch {run.progress.closed + 1}, {place}; {snapshot}; lower {rates}, or "
        "set optim.clip_grad"
    )


def _check_unreadable(run: Run) -> None:
    if not run.runtime.maximum(len(run.progress.unreadable))[0]:
        return
    run.share_unreadable()
    messages = run.progress.unreadable
    allowed = run.recipe.data.unreadable
    if len(messages) > allowed:
        raise UserError(
            f"{len(messages)} unreadable images, but data.unreadable allows {allowed}; latest: "
            f"{messages[-1]}"
        )


def _raise_if_stopped(run: Run, number: int) -> None:
    if number:
        message = (
            f"stopped by {signal.Signals(number).name} after step {run.progress.step}; saved in "
            f"{run.recipe.folder}, start it again to resume"
        )
        raise Stopped(message, number)


# Largest share of the weights after the first step in an average at the end of a run.
_FIRST_WEIGHTS = 0.1


def slow_average(decay: float | None, steps: int) -> str:
    """Return that an average of weights is too slow for the steps of a run; empty if it is not, or there is none."""
    share = (decay or 0.0) ** (steps - 1)
    if share <= _FIRST_WEIGHTS or steps == 1:
        return ""
    fast = math.floor(1000 * _FIRST_WEIGHTS ** (1 / (steps - 1))) / 1000
    return (
        f"ema {decay:g} is too slow for {steps:,} steps: {share:.0%} of the averaged weights, which are evaluated and "
        f"saved, are those after the first step; give ema={fast:g} or less, or train longer"
    )


# Smallest change of a gate, a share of the attention, that counts: the log has three decimals.
GATE_MOVES = 2e-3


def unmoved_gates(model: nn.Module, rows: Rows) -> str:
    """Return that the trained gates of a model are where the rows of its log begin; empty if one moved."""
    trained = False
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] == "gate" and parameter.requires_grad:
            trained = True
    logged = [row["gating"] for row in rows if row.get("gating")]
    if not trained or len(logged) < 2:
        return ""
    first = logged[0]
    last = logged[-1]
    moves = [0.0]
    for layer in first.keys() & last.keys():
        pairs = zip(first[layer]["gates"], last[layer]["gates"], strict=True)
        moves += [abs(after - before) for before, after in pairs]
    if max(moves) > GATE_MOVES:
        return ""
    return (
        f"the gates did not move (by {max(moves):.3f} at most), so heads attend as at the start; initialise them with "
        'init="near", raise optim.gate_lr, or train longer'
    )


# Name in the log, measure, decimals.
_GATING_MEASURES = (("gates", gates, 3), ("spans", attention_spans, 2), ("centres", centres, 2))


def gating_row(run: Run) -> JsonObject:
    """Return {"gating": {layer: {gates, spans, centres}}}, by head, and {"gamma": {layer: largest}}, for log.jsonl.

    Source: ConViT Figs. 5 and 6; T-CNN Fig. 4
    """
    model = run.eval_model
    gating: dict[str, JsonObject] = {}
    row: Row = {}
    with unsharded(model):
        with suppress(UserError):  # no gated layer
            for name, measure, decimals in _GATING_MEASURES:
                for layer, values in measure(model).items():
                    gating.setdefault(layer, {})[name] = _rounded(values, decimals)
        if gating:
            row["gating"] = gating
        with suppress(UserError):  # no inserted block
            largest = {layer: gamma.abs().max().item() for layer, gamma in gammas(model).items()}
            row["gamma"] = {layer: round(value, 6) for layer, value in largest.items()}
    return row


def _rounded(values: Tensor, decimals: int) -> Any:
    if values.ndim > 1:
        return [_rounded(row, decimals) for row in values]
    return [round(x, decimals) if math.isfinite(x) else None for x in values.float().tolist()]


def monitor_row(run: Run, images: Tensor) -> dict[str, dict[str, float]]:
    """Return attention of each layer and the similarity of each pyramid's branches, in eval mode.

    Largest logit and attention are means over images, of the largest head. Raises: UserError for a model with neither.
    """
    model = run.objective.result(run.trained)
    images = images[:MONITORED_IMAGES].to(run.runtime.device)
    row = _branches(model, images)
    try:
        stats = logit_stats(model, images)
    except UserError:
        if row or not run.progress.recast:
            return row
        raise
    return row | {
        "max_logit": {name: layer.max_logit.max().item() for name, layer in stats.items()},
        "max_attention": {name: layer.max_attention.max().item() for name, layer in stats.items()},
        "entropy": {name: layer.entropy.mean().item() for name, layer in stats.items()},
    }


def _branches(model: nn.Module, images: Tensor) -> dict[str, dict[str, float]]:
    means = {}
    with suppress(UserError):
        for name, matrix in branch_similarity(model, images).items():
            pairs = torch.ones(matrix.shape[-2:], device=matrix.device).triu(1).bool()
            if pairs.any():
                means[name] = matrix[..., pairs].mean().item()
    if not means:
        return {}
    return {"branch_similarity": means}
