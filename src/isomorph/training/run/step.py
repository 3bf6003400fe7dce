"""One training step: forward and backward over the parts of a batch, then the optimiser step."""

import time
from contextlib import nullcontext

from torch import Tensor, nn

from isomorph.data.loaders import Labels
from isomorph.distributed import seed_everything
from isomorph.training.parallel import no_gradient_sync
from isomorph.training.run.state import Run


def train_step(run: Run) -> tuple[float, Tensor]:
    """Train one step on this process's parts of a batch; return the seconds spent loading, and the last images.

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
        images, labels, problems = run.next_part()
        waited += time.perf_counter() - start
        run.note_unreadable(problems)
        seed_everything("step", recipe.seed, step, part)
        with no_gradient_sync(run.task) if part != parts[-1] else nullcontext():
            run.total += backward(run, images, labels)
    if recipe.optim.clip_grad:
        nn.utils.clip_grad_norm_(run.task.get_clip_parameters(), recipe.optim.clip_grad)
    run.optimizer.step()
    run.task.update_ema(step)
    if anneal:
        for model in filter(None, (run.trained, run.averaged)):
            anneal.set_slopes(model, since + 1)
    return waited, images


def backward(run: Run, images: Tensor, labels: Labels) -> Tensor:
    """Add the gradients of one part of a batch; return its contribution to the mean loss of the step."""
    device = run.runtime.device
    images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    if run.mixup:
        images, labels = run.mixup(images, labels)
    with run.runtime.autocast():
        loss = run.task(images, labels)["loss"] / len(run.share.own)
    loss.backward()
    return loss.detach()
