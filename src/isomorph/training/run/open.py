"""Build a run from its recipe, in stages: check, open the data, build the model, check again, assemble, restore.

Nothing is written before all of them have passed.
"""

from typing import Any, NamedTuple

import torch
from timm.scheduler.scheduler import Scheduler
from timm.utils import unwrap_model
from torch import nn
from torch.optim import Optimizer

from isomorph.checkpoints.rebuild import describe_model, record_data
from isomorph.checkpoints.snapshot import IntactSnapshot
from isomorph.checkpoints.snapshot_values import RunProgress
from isomorph.data.sampler import BatchOrder, BatchParts
from isomorph.distributed import Runtime, open_runtime, seed_everything
from isomorph.training.build import Data, plan_batches
from isomorph.training.classification import recipe_task
from isomorph.training.optim import build_optimizer, build_scheduler
from isomorph.training.parallel import distribute, prepare_model
from isomorph.training.recipe.recipe import Recipe
from isomorph.training.run.guards import LossGuard
from isomorph.training.run.preflight import (
    check_attention,
    check_classes_and_surgery,
    check_files,
    check_start,
)
from isomorph.training.run.restore import find_snapshot, restore
from isomorph.training.run.state import LOSS_DTYPES, Run
from isomorph.training.run.tracking import check_tracker
from isomorph.training.task import Objective


class RunData(NamedTuple):
    """The data of a run: training and test images, the order of the training images, this process's share of them."""

    train: Data
    test: Data
    order: BatchOrder
    share: BatchParts


def open_run(recipe: Recipe, runtime: Runtime | None = None) -> Run:
    """Build a run from its recipe and restore the newest snapshot in its folder, if there is one.

    Raises: UserError when something is missing or does not fit, or the folder holds another run.
    """
    runtime = runtime or open_runtime(recipe.device, recipe.amp == "bf16")
    found = _find_start(recipe, runtime)
    recast = found.values["progress"]["recast"] if found else recipe.model.recast_epoch == 0
    data = _open_data(recipe, runtime)
    model, config = _initialise_model(recipe, data.train, recast)
    testing = recipe_task(recipe).test_loader(recipe, config, data.test, runtime)
    check_attention(recipe, model.to(runtime.device), config, recast)
    objective, optimizer, scheduler, header = assemble(recipe, model, runtime, data.order.steps)
    run = Run(
        recipe=recipe,
        runtime=runtime,
        objective=objective,
        optimizer=optimizer,
        scheduler=scheduler,
        order=data.order,
        share=data.share,
        train=data.train,
        config=config,
        test=testing,
        header=header,
        progress=RunProgress(recast=recast),
        guard=LossGuard(recipe.divergence),
        start=getattr(model, "isomorph_start", ""),
        total=torch.zeros((), device=runtime.device, dtype=LOSS_DTYPES.get(runtime.device.type, torch.float64)),
    )
    if found:
        restore(run, found)
    return run


def _find_start(recipe: Recipe, runtime: Runtime) -> IntactSnapshot | None:
    """Return the snapshot to resume from, or None for a new run. Raises: UserError if the run cannot start."""
    check_tracker(recipe)
    check_files(recipe)
    found = find_snapshot(recipe, runtime)
    if not found:
        check_start(recipe)
    return found


def _open_data(recipe: Recipe, runtime: Runtime) -> RunData:
    """Open the training and test images and set the order of the training images."""
    train, test = recipe_task(recipe).open_data(recipe)
    return RunData(train, test, *plan_batches(recipe, train, runtime))


def _initialise_model(recipe: Recipe, train: Data, recast: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model with its initial weights, checked against the data, and its data config."""
    task, classes = recipe_task(recipe), len(train.classes)
    seed_everything("birth", recipe.seed)  # seeds derive from this word: another word is another initialisation
    model = task.build_model(recipe, train, recast)
    check_classes_and_surgery(recipe, model, classes, recast)
    config = task.data_config(recipe, model)
    task.check_model(recipe, model, config)
    extra: dict[str, Any] = {} if recipe.data.streamed else {"split": getattr(train, "split", None)}
    extra |= {"task": recipe.task.model_dump(mode="json")} if recipe.task else {}
    record_data(model, {**config, "source": recipe.data.source, "label_names": list(train.classes), **extra})
    return model, config


def assemble(
    recipe: Recipe, model: nn.Module, runtime: Runtime, steps: int
) -> tuple[Objective, Optimizer, Scheduler, dict[str, str]]:
    """Build objective, optimiser and schedule around a model spread over the processes; and its checkpoint header."""
    header = describe_model(model)
    prepared = prepare_model(model, recipe.scale, runtime)
    objective = recipe_task(recipe).objective(recipe, prepared, runtime.device)
    if recipe.ema:
        objective.task.setup_ema(decay=recipe.ema)
    distribute(objective.task, recipe.scale, runtime)
    optimizer = build_optimizer(unwrap_model(objective.task.get_trainable_module()), recipe.optim)
    scheduler = build_scheduler(optimizer, recipe.optim, recipe.epochs, steps, recipe.iterations)
    return objective, optimizer, scheduler, header
