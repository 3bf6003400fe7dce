"""Resume a run from the newest complete snapshot in its folder."""

import json

from isomorph.checkpoints.optimizer_state import (
    OPTIMIZER_PREFIX,
    allocate_tensor,
    load_optimizer,
)
from isomorph.checkpoints.snapshot import (
    DamagedSnapshot,
    IntactSnapshot,
    newest_snapshot,
    read_layout,
    read_tensors_into,
)
from isomorph.checkpoints.snapshot_values import RunProgress
from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.training.recipe.recipe import (
    Recipe,
    add_defaults,
    changed_fields,
    identity_json,
)
from isomorph.training.run.state import LOSS_SUM, Run


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
            elif any((recipe.folder / name).is_file() for name in ("model.safetensors", "last.pt")):
                raise UserError(
                    f"{recipe.folder} has a run without a snapshot (deleted, or of an older isomorph) to resume from; "
                    "give `out` another folder"
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
    old, new = add_defaults(found.values["recipe"]), json.loads(identity_json(recipe))
    if recipe.optim.schedule == "constant" and recipe.iterations is None and old["epochs"] < recipe.epochs:
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
