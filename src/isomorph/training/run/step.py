"""One training step: forward and backward over the parts of a batch, then the optimiser step."""

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.distributed import seed_everything
from isomorph.training.parallel import no_gradient_sync
from isomorph.training.run.state import Run


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


def to_device(values: Any, device: torch.device) -> Any:
    """Return a tensor, or the tensors in lists, tuples and dictionaries, on a device; all else unchanged."""
    if hasattr(values, "to"):
        return values.to(device, non_blocking=True)
    if isinstance(values, dict):
        return {name: to_device(value, device) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(to_device(value, device) for value in values)
    return values
