"""Recast the model in the middle of a run (T-CNN section 5).

Parameters whose name, shape and values are unchanged keep their optimiser state. Averaged weights are recast too, with
the same random draws for new parameters, so that their function is kept as well.

Source: T-CNN section 5, Table 3: "we keep the same optimizer and learning rate after the reparametrization"
"""

import copy

import torch
from torch import Tensor, nn

from isomorph.checkpoints.optimizer_state import GROUP_PREFIX, load_optimizer, owner_name, split_optimizer
from isomorph.distributed import seed_everything
from isomorph.surgery import notes
from isomorph.training.build import apply_surgery
from isomorph.training.run.open import assemble
from isomorph.training.run.state import Run


def recast_run(run: Run) -> tuple[Run, str]:
    """Return the run with its model recast, and a message; optimiser state and averages carry over."""
    recipe, before = run.recipe, run.trained
    tensors, values = split_optimizer(before, run.optimizer)
    model, averaged = _recast_copy(before, run), None if run.averaged is None else _recast_copy(run.averaged, run)
    unchanged = unchanged_parameters(before, model)
    objective, optimizer, scheduler, header = assemble(recipe, model, run.runtime, run.order.steps)
    run.objective, run.optimizer, run.scheduler, run.header = objective, optimizer, scheduler, header
    if averaged is not None:
        run.averaged.load_state_dict(averaged.state_dict())  # type: ignore[union-attr]
    owned = {
        name: tensor
        for name, tensor in tensors.items()
        if owner_name(name) in unchanged or owner_name(name).startswith(GROUP_PREFIX)
    }
    values["state"] = {name: value for name, value in values["state"].items() if name in unchanged}
    load_optimizer(run.trained, optimizer, owned, values)
    run.progress.recast = True
    new = sum(1 for name, _ in run.trained.named_parameters() if name not in unchanged)
    message = (
        f"recast after epoch {run.progress.closed}: {len(unchanged)} parameter tensors are unchanged, {new} are new"
    )
    return run, "; ".join((message, *notes(run.trained)))


def _recast_copy(model: nn.Module, run: Run) -> nn.Module:
    """Return a recast copy of the model; every call draws the same values for new parameters."""
    seed_everything("recast", run.recipe.seed)
    training = model.training
    return apply_surgery(copy.deepcopy(model), run.recipe.model).train(training)


def unchanged_parameters(before: nn.Module, after: nn.Module) -> set[str]:
    """Return the names of the parameters whose shape and values did not change."""
    old: dict[str, Tensor] = dict(before.named_parameters())
    return {
        name
        for name, parameter in after.named_parameters()
        if name in old and old[name].shape == parameter.shape and torch.equal(old[name], parameter)
    }
