"""Build a run from its recipe, in stages: check, open the data, build the model, check again, assemble, restore.

Nothing is written before all of them have passed.
"""

import copy
import json
from typing import Any

import torch
from timm.scheduler.scheduler import Scheduler
from timm.utils import unwrap_model
from torch import nn
from torch.optim import Optimizer

from isomorph.analysis import logit_stats
from isomorph.checkpoints.model import describe_model, record_data
from isomorph.checkpoints.open import local_file
from isomorph.checkpoints.optimizer_state import OPTIMIZER_PREFIX, allocate_tensor, load_optimizer
from isomorph.checkpoints.snapshot import (
    DamagedSnapshot,
    IntactSnapshot,
    RunProgress,
    newest_snapshot,
    read_layout,
    read_tensors_into,
)
from isomorph.distributed import Runtime, open_runtime, seed_everything
from isomorph.errors import UserError
from isomorph.evaluation.cost import has_pyramids
from isomorph.surgery.anneal import annealed_layers
from isomorph.surgery.record import record
from isomorph.training.build import Data, apply_surgery, plan_batches
from isomorph.training.classification import recipe_task
from isomorph.training.optim import build_optimizer, build_scheduler
from isomorph.training.parallel import distribute, prepare_model
from isomorph.training.recipe.recipe import Recipe, changed_fields, identity_json
from isomorph.training.run.guards import LossGuard
from isomorph.training.run.log import check_tracker
from isomorph.training.run.state import LOSS_DTYPES, LOSS_SUM, Run
from isomorph.training.task import Objective


def open_run(recipe: Recipe, runtime: Runtime | None = None) -> Run:
    """Build a run from its recipe and restore the newest snapshot in its folder, if there is one.

    Raises: UserError when something is missing or does not fit, or the folder holds another run.
    """
    runtime = runtime or open_runtime(recipe.device, recipe.amp == "bf16")
    check_tracker(recipe)
    check_files(recipe)
    found = find_snapshot(recipe, runtime)
    if not found:
        check_start(recipe)
    recast = found.values["progress"]["recast"] if found else recipe.model.recast_epoch == 0
    train, test = recipe_task(recipe).open_data(recipe)
    order, share = plan_batches(recipe, train, runtime)
    model, config = _initialise_model(recipe, train, recast)
    testing = recipe_task(recipe).test_loader(recipe, config, test, runtime)
    check_attention(recipe, model.to(runtime.device), config, recast)
    objective, optimizer, scheduler, header = assemble(recipe, model, runtime, order.steps)
    run = Run(
        recipe=recipe,
        runtime=runtime,
        objective=objective,
        optimizer=optimizer,
        scheduler=scheduler,
        order=order,
        share=share,
        train=train,
        config=config,
        test=testing,
        header=header,
        progress=RunProgress(recast=recast),
        guard=LossGuard(recipe.divergence),
        start=record(model).start,
        total=torch.zeros((), device=runtime.device, dtype=LOSS_DTYPES.get(runtime.device.type, torch.float64)),
    )
    if found:
        restore(run, found)
    return run


def _initialise_model(recipe: Recipe, train: Data, recast: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model with its initial weights, checked against the data, and its data config."""
    task, classes = recipe_task(recipe), len(train.classes)
    seed_everything("birth", recipe.seed)  # seeds derive from this word: another word is another initialisation
    model = task.build_model(recipe, train, recast)
    if not recast:
        apply_surgery(copy.deepcopy(model), recipe.model)  # raises, before the run starts, if it would fail later
    if getattr(model, "num_classes", classes) < classes:
        raise UserError(
            f"the data has {classes} classes, but model.num_classes is {model.num_classes}; raise it or leave it out"
        )
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


def check_files(recipe: Recipe) -> None:
    """Raise UserError without a model, or for a file that does not exist; names the run that makes it, if known."""
    if recipe.model.name is None and recipe.model.weights is None:
        raise UserError(f"{recipe.name} has no model; give --model.weights FILE, or a timm model as --model.name NAME")
    given = {"model.weights": recipe.model.weights and local_file(recipe.model.weights)}
    given |= {"mask.teacher": recipe.mask.teacher} if recipe.mask else {}
    given |= {"distill.weights": recipe.distill.weights} if recipe.distill else {}
    for field, path in given.items():
        if path and not path.is_file():
            if path.is_dir():
                raise UserError(
                    f"{field}: {path} is a folder; give a checkpoint in it, like {path / 'model.safetensors'}"
                )
            hint = (
                f"; `isomorph train {path.parts[1]}` creates it" if path.parts[0] == "runs" and path.parts[1:] else ""
            )
            raise UserError(f"{field}: {path} does not exist{hint}")


def check_start(recipe: Recipe) -> None:
    """Raise UserError when a recipe that requires trained weights is given none."""
    model = recipe.model
    if model.start == "weights" and not (model.weights or model.pretrained):
        raise UserError(
            f"{recipe.name} requires trained weights; give --model.weights FILE or --model.pretrained true "
            "(--model.start random starts from random weights)"
        )


def check_attention(recipe: Recipe, model: nn.Module, config: dict[str, Any], recast: bool) -> None:
    """Raise UserError when there are no layers to anneal, or no attention to monitor, even after a late recast."""
    if recipe.anneal and recast:
        annealed_layers(model)
    if recipe.monitor_every:
        device, inputs = next(model.parameters()).device, recipe_task(recipe).attention_inputs(config)
        if inputs is None:
            raise UserError("monitor_every is for models of images; leave it out")
        monitored = model if recast else apply_surgery(copy.deepcopy(model), recipe.model)
        if not has_pyramids(monitored):  # their branches are monitored without attention too
            logit_stats(monitored, inputs.to(device))


def find_snapshot(recipe: Recipe, runtime: Runtime) -> IntactSnapshot | None:
    """Return the newest complete snapshot in the recipe's folder, the same in every process, or None.

    Raises: UserError when the folder has a run of another recipe, or no readable snapshot.
    """
    found: IntactSnapshot | None = None
    problem = ""
    if runtime.is_main:
        try:
            if recipe.folder.exists() and not recipe.folder.is_dir():
                raise UserError(f"{recipe.folder} is a file; give `out` a folder")
            found = newest_snapshot(recipe.folder)
            if found:
                _check_same_recipe(recipe, found)
            elif (recipe.folder / "model.safetensors").is_file():
                raise UserError(
                    f"{recipe.folder} has a run without a snapshot to resume from; give `out` another folder"
                )
        except DamagedSnapshot as error:
            problem = f"{error}; delete {recipe.folder} to start the run again"
        except UserError as error:
            problem = str(error)
    found, problem = runtime.gather((found, problem))[0]
    if problem:
        raise UserError(problem)
    return found


def _check_same_recipe(recipe: Recipe, found: IntactSnapshot) -> None:
    """Raise UserError when the snapshot is of another recipe. At a constant rate it may be of a shorter run."""
    old, new = dict(found.values["recipe"]), json.loads(identity_json(recipe))
    if recipe.optim.schedule == "constant" and recipe.iterations is None and old.get("epochs", 0) < recipe.epochs:
        old["epochs"] = recipe.epochs  # until then, both runs are the same
    changed = changed_fields(old, new)
    if changed:
        where = found.path.parent
        hint = f"give `out` another folder (model.weights={where / 'model.safetensors'} starts from this run's weights)"
        raise UserError(f"{where} has another run ({'; '.join(changed)}); {hint}")


def restore(run: Run, found: IntactSnapshot) -> None:
    """Restore the state of a run from a snapshot. Raises: UserError when it does not fit."""
    if differing := changed_fields(found.values["data"], run.counts):
        raise UserError(
            f"{found.path} is of a run on other data ({'; '.join(differing)} per epoch); use the images it started "
            "with, or give `out` another folder"
        )
    within = found.values["progress"]["step"] % run.order.steps
    if within and found.values["lanes"] != run.lanes:
        raise UserError(
            f"{found.path} is from within an epoch of a stream with {found.values['lanes']} lanes where this run has "
            f"{run.lanes}, and would skip images; use the same processes, scale.accumulate and data.workers, and the "
            "version of isomorph that wrote it"
        )
    tensors, _ = run.tensors()
    layout = read_layout(found.path)
    parameters = {name: parameter.detach() for name, parameter in run.trained.named_parameters()}
    for name, (shape, dtype) in layout.items():
        if name.startswith(OPTIMIZER_PREFIX):
            tensors[name] = allocate_tensor(name, shape, dtype, parameters)
    differing = sorted(tensors.keys() ^ layout.keys()) + [
        name for name in tensors.keys() & layout.keys() if tensors[name].shape != layout[name][0]
    ]
    if differing:
        raise UserError(f"{found.path} does not fit the model: {', '.join(differing[:3])}; give `out` another folder")
    read_tensors_into(found.path, tensors)
    run.total.copy_(tensors[LOSS_SUM])
    of_optimizer = {name: tensor for name, tensor in tensors.items() if name.startswith(OPTIMIZER_PREFIX)}
    load_optimizer(run.trained, run.optimizer, of_optimizer, found.values["optimizer"])
    run.progress = RunProgress(**found.values["progress"])
    run.guard.first = run.progress.first_loss
    run.found = found
