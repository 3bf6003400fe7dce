"""The one training loop: epochs of steps, an evaluation and a checkpoint after each, resumed from the last one."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from timm.scheduler.scheduler import Scheduler
from timm.task import TrainingTask
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from isomorph.analysis import logit_stats
from isomorph.errors import UserError
from isomorph.evaluation import evaluate
from isomorph.surgery import gpsa_layers
from isomorph.training.build import build_loaders, build_model, data_config, open_model, open_sources
from isomorph.training.checkpoint import load_state, save, save_state, write_atomically
from isomorph.training.objectives import build_mixup, classification, distillation, refuse_teacher, token_labelling
from isomorph.training.optim import build_optimizer, build_scheduler
from isomorph.training.recipe import Recipe
from isomorph.training.runtime import Runtime, open_runtime, seed_everything

CHECK_EVERY = 10
"""Steps between two looks at the loss: each look waits for the device."""

MONITORED = 32
"""Images of a batch that the attention monitor looks at."""


class Diverged(UserError):
    """The loss is no longer finite; the last checkpoint is as it was."""


@dataclass(frozen=True)
class Result:
    """What a run leaves: its model (averaged weights where there are any), last metrics, and folder."""

    model: nn.Module
    metrics: dict[str, float]
    folder: Path


@dataclass
class Run:
    """The moving parts of a run."""

    recipe: Recipe
    runtime: Runtime
    task: TrainingTask
    optimizer: Optimizer
    scheduler: Scheduler
    train: DataLoader[Any]
    test: DataLoader[Any]

    @property
    def eval_model(self) -> nn.Module:
        """What is evaluated and kept: the averaged weights where there are any."""
        if self.task.has_ema():
            return self.task.get_trainable_module(ema=True).module
        return self.task.get_trainable_module()

    def state(self, epoch: int, metrics: dict[str, float], best: float) -> dict[str, Any]:
        """All that the rest of the run depends on, after `epoch` complete epochs."""
        return {
            "epoch": epoch,
            "metrics": metrics,
            "best": best,
            "recipe": json.loads(identity(self.recipe)),
            "task": {name: part for ema in (False, True) for name, part in self.task.get_checkpoint_state(ema).items()},
            "optimizer": self.optimizer.state_dict(),
        }


def identity(recipe: Recipe) -> str:
    """The recipe without what may change between a run and its resumption."""
    free = {"out": True, "device": True, "source": True, "expected": True, "data": {"workers", "root"}}
    return recipe.model_dump_json(exclude=free)  # type: ignore[arg-type]


def open_run(recipe: Recipe) -> Run:
    """Builds every part of a run from its recipe, before anything is written."""
    runtime = open_runtime(recipe.device, recipe.amp == "bf16")
    train, test = open_sources(recipe)
    seed_everything(recipe.seed)
    model = build_model(recipe.model, len(train.classes), recipe.drop_path).to(runtime.device)
    training, testing = build_loaders(recipe, model, train, test)
    if not len(training):
        raise UserError("the training data has no full batch; lower data.batch_size or raise data.fraction")
    if getattr(model, "num_classes", len(train.classes)) < len(train.classes):
        raise UserError(f"the data has {len(train.classes)} classes, model.num_classes is {model.num_classes}")
    if recipe.anneal:
        gpsa_layers(model)
    if recipe.monitor_every:
        logit_stats(model, torch.zeros(1, *data_config(recipe, model)["input_size"], device=runtime.device))
    task = build_task(recipe, model, runtime.device)
    if recipe.ema:
        task.setup_ema(decay=recipe.ema)
    optimizer = build_optimizer(model, recipe.optim)
    scheduler = build_scheduler(optimizer, recipe.optim, recipe.epochs, len(training))
    return Run(recipe, runtime, task, optimizer, scheduler, training, testing)


def build_task(recipe: Recipe, model: nn.Module, device: torch.device) -> TrainingTask:
    """What the run minimises."""
    if recipe.token_labels:
        return token_labelling(model, recipe.token_labels, recipe.augment, device)
    if recipe.distill is None:
        return classification(model, recipe.augment, recipe.loss, device)
    teacher = open_model(recipe.distill.teacher, recipe.distill.weights)
    refuse_teacher(teacher, model)
    return distillation(model, teacher, recipe.distill, recipe.augment, recipe.loss, device)


def train(recipe: Recipe, show: bool = True) -> Result:
    """Trains as the recipe says, in its folder; resumes by itself from the last complete checkpoint there.

    Leaves `model.safetensors` (for `iso.load`), `best.safetensors`, `last.pt` (to resume), `log.jsonl`, `recipe.json`.

    Raises: UserError when something is missing or does not fit, or the folder holds another run; Diverged when the
    loss is not finite, with the last checkpoint kept.
    """
    run = open_run(recipe)
    folder, console = recipe.folder, Console(quiet=not show)
    first, metrics, best = resume(run, folder)
    write_atomically(folder / "recipe.json", lambda file: file.write_text(recipe.model_dump_json(indent=2)))
    for name in ("log.jsonl", "monitor.jsonl"):
        trim_log(folder / name, first)
    begin = f"resuming after epoch {first} of {recipe.epochs}" if first else f"{recipe.epochs} epochs"
    images = len(run.train.dataset)  # type: ignore[arg-type]
    console.print(
        f"{recipe.name}: {begin}, {images:,} images, {len(run.train)} steps an epoch, on {run.runtime.device}"
    )
    for epoch in range(first, recipe.epochs):
        start = time.perf_counter()
        seed_everything(recipe.seed, epoch + 1)
        with progress(console, f"epoch {epoch + 1}/{recipe.epochs}", len(run.train)) as advance:
            loss = train_epoch(run, epoch, advance)
        due = (epoch + 1) % recipe.evaluate_every == 0 or epoch + 1 == recipe.epochs
        found = {"loss": loss, **(evaluate(run.eval_model, run.test) if due else {})}
        if not math.isfinite(found.get("nll", 0.0)):
            raise diverged(recipe, epoch, "the evaluation after it")
        metrics = found if due else metrics
        if due and found["top1"] > best:
            best = found["top1"]
            save(run.eval_model, folder / "best.safetensors")
        if recipe.keep_every and (epoch + 1) % recipe.keep_every == 0:
            save(run.eval_model, folder / f"epoch-{epoch + 1}.safetensors")
        save_state(run.state(epoch + 1, metrics, best), folder / "last.pt")
        seconds = time.perf_counter() - start
        rate = run.optimizer.param_groups[0]["lr"]
        log(folder / "log.jsonl", {"epoch": epoch + 1, **found, "lr": rate, "seconds": seconds})
        said = f"top1 {found['top1']:.2f}  " if due else ""
        console.print(f"{recipe.name}: epoch {epoch + 1}/{recipe.epochs}  loss {loss:.4f}  {said}{seconds:.1f} s")
    save(run.eval_model, folder / "model.safetensors")
    return Result(run.eval_model.eval(), metrics, folder)


def diverged(recipe: Recipe, epoch: int, place: str) -> Diverged:
    """The error that stops a run whose loss is not finite."""
    kept = f"the checkpoint of epoch {epoch} is kept in {recipe.folder}" if epoch else "there is no checkpoint yet"
    advice = "lower optim.lr or optim.gate_lr, or set optim.clip_grad"
    return Diverged(f"the loss is not finite at epoch {epoch + 1}, {place}; {kept}; {advice}")


def train_epoch(run: Run, epoch: int, advance: Any) -> float:
    """One pass over the training data; returns the mean loss. Raises: Diverged."""
    recipe, steps = run.recipe, len(run.train)
    anneal = recipe.anneal.schedule(steps) if recipe.anneal else None
    mixup = build_mixup(recipe.augment, getattr(run.eval_model, "num_classes", 1000))
    run.task.train()
    total = torch.zeros((), device=run.runtime.device)
    for i, (images, labels) in enumerate(run.train):
        step = epoch * steps + i
        if anneal:
            anneal.apply(run.task.trainable_module, step)
        images, labels = (
            images.to(run.runtime.device, non_blocking=True),
            labels.to(run.runtime.device, non_blocking=True),
        )
        if mixup:
            images, labels = mixup(images, labels)
        run.scheduler.step_update(step)
        with run.runtime.autocast():
            loss = run.task(images, labels)["loss"]
        run.optimizer.zero_grad()
        loss.backward()
        if recipe.optim.clip_grad:
            nn.utils.clip_grad_norm_(run.task.get_clip_parameters(), recipe.optim.clip_grad)
        run.optimizer.step()
        run.task.update_ema(step)
        if recipe.monitor_every and step % recipe.monitor_every == 0:
            monitor(run, images, epoch, step)
        total += loss.detach()
        if (i % CHECK_EVERY == 0 or i == steps - 1) and not math.isfinite(total.item()):
            raise diverged(recipe, epoch, f"step {i + 1}")
        advance()
    return total.item() / steps


def monitor(run: Run, images: torch.Tensor, epoch: int, step: int) -> None:
    """Appends what attention is like on a few images of the batch: by layer, the worst head's logit, mean entropy."""
    found = logit_stats(run.task.get_trainable_module(), images[:MONITORED])
    logits = {name: stats.max_logit.max().item() for name, stats in found.items()}
    entropies = {name: stats.entropy.mean().item() for name, stats in found.items()}
    row = {"epoch": epoch + 1, "step": step, "max_logit": logits, "entropy": entropies}
    log(run.recipe.folder / "monitor.jsonl", row)


def resume(run: Run, folder: Path) -> tuple[int, dict[str, float], float]:
    """Loads the last complete checkpoint of the folder, if any: epochs done, their metrics, the best top1.

    Raises: UserError when the folder holds a run of another recipe, or a damaged checkpoint.
    """
    path = folder / "last.pt"
    if not path.is_file():
        return 0, {}, -math.inf
    state = load_state(path)
    if not isinstance(state, dict) or not {"epoch", "metrics", "best", "recipe", "task", "optimizer"} <= state.keys():
        raise UserError(f"{path} is not the state of a run; give `out` another folder, or delete it")
    changed = changes(with_defaults(state["recipe"]), json.loads(identity(run.recipe)))
    if changed:
        raise UserError(f"{folder} holds another run ({'; '.join(changed)}); give `out` another folder, or delete it")
    run.task.load_checkpoint_state(state["task"]["state_dict"])
    if run.task.has_ema():
        run.task.load_checkpoint_state(state["task"]["state_dict_ema"], ema=True)
    run.optimizer.load_state_dict(state["optimizer"])
    return state["epoch"], state["metrics"], state["best"]


def with_defaults(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe as it was kept, with the fields that have come since; one that is none any more stays as it is."""
    try:
        return json.loads(identity(Recipe.model_validate(recipe)))
    except ValidationError:
        return recipe


def changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The fields that differ, each with its value there and here."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += changes(a, b, f"{prefix}{name}.")
        elif a != b:
            found.append(f"{prefix}{name} {a} there, {b} here")
    return found


def log(path: Path, row: dict[str, Any]) -> None:
    """Appends one line of JSON and flushes it."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def trim_log(path: Path, epochs: int) -> None:
    """Drops the lines of epochs that will be run again, and a line that a crash cut short."""
    if not path.is_file():
        return
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    kept = "".join(json.dumps(row) + "\n" for row in rows if row.get("epoch", 0) <= epochs)
    write_atomically(path, lambda file: file.write_text(kept))


@contextmanager
def progress(console: Console, title: str, total: int) -> Iterator[Any]:
    """A bar on a terminal, nothing elsewhere. Yields a function to call after each step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
