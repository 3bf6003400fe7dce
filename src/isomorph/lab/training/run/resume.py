"""The snapshot that a run resumes from: found in its folder, compared with the run, and read into it."""

import json
from collections.abc import Mapping
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from isomorph.errors import UserError
from isomorph.lab.training.recipe.recipe import Recipe, changed_fields, identity_json
from isomorph.lab.training.run.named_state import (
    OPTIMIZER_PREFIX,
    Tensors,
    allocate_tensor,
    load_optimizer,
)
from isomorph.lab.training.run.snapshot import (
    DamagedSnapshot,
    IntactSnapshot,
    newest_snapshot,
    read_layout,
    read_tensors_into,
)


def weights_in(folder: Path) -> Path | None:
    """Return the file with a run's weights: model.safetensors, else the best epoch's so far; None without any."""
    files = [folder / "model.safetensors", folder / "best.safetensors"]
    return next(filter(Path.is_file, files), None)


def find_snapshot(recipe: Recipe) -> IntactSnapshot | None:
    """Return the newest complete snapshot in the recipe's folder, or None.

    Raises: UserError when the folder has a run of another recipe, or no readable snapshot.
    """
    folder = recipe.folder
    try:
        snapshot = newest_snapshot(folder)
    except DamagedSnapshot as error:
        raise UserError(f"{error}; delete {folder} to start the run again") from None
    if not snapshot:
        if (folder / "model.safetensors").is_file():
            raise UserError(
                f"{folder} has a run without a snapshot to resume from; give `out` another folder"
            )
        return None
    old = dict(snapshot.values["recipe"])
    new = json.loads(identity_json(recipe))
    optim = recipe.optim
    steady = optim.schedule == "constant" and optim.min_weight_decay is None
    if steady and recipe.iterations is None and old.get("epochs", 0) < recipe.epochs:
        # nothing depends on the number of epochs: both runs are the same until then
        old["epochs"] = recipe.epochs
    changed = changed_fields(old, new)
    if changed:
        weights = weights_in(folder)
        from_there = f" (model.weights={weights} starts from this run's weights)" if weights else ""
        raise UserError(
            f"{folder} has another run ({'; '.join(changed)}); give `out` another folder{from_there}"
        )
    return snapshot


class Resume:
    """A snapshot that a run resumes from. Every check raises a UserError if the snapshot does not fit the run."""

    def __init__(self, snapshot: IntactSnapshot) -> None:
        self.path = snapshot.path
        self.values = snapshot.values

    def check_data(self, header: Mapping[str, str], counts: dict[str, int]) -> None:
        """Check that the run has the images and classes that it began with."""
        old_counts = self.values["data"]  # an older version may have fewer
        differences = changed_fields(
            old_counts, {name: counts[name] for name in counts if name in old_counts}
        )
        old_names = json.loads(self.values["model"]["data"]).get("label_names", [])
        new_names = json.loads(header["data"]).get("label_names", [])
        for number, (old, new) in enumerate(zip(old_names, new_names, strict=False)):
            if old != new:
                differences.append(f"class {number} was {old}, is now {new}")
                break
        if differences:
            raise UserError(
                f"{self.path} is of a run on other data ({'; '.join(differences)}); use the images it started with, "
                "or give `out` another folder"
            )

    def check_lanes(self, lanes: int) -> None:
        """Check, for a snapshot from within an epoch, that a stream has the lanes that it had."""
        if self.values["lanes"] != lanes:
            raise UserError(
                f"{self.path} is from within an epoch of a stream with {self.values['lanes']} lanes where this run "
                f"has {lanes}, and would skip images; use the same processes, scale.accumulate and data.workers, "
                "and the version of isomorph that wrote it"
            )

    def read_into(self, tensors: Tensors, model: nn.Module, optimizer: Optimizer) -> None:
        """Read the snapshot into the tensors of a run, by name, and into its optimiser."""
        layout = read_layout(self.path)
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for name, (shape, dtype) in layout.items():
            if name.startswith(OPTIMIZER_PREFIX):
                tensors[name] = allocate_tensor(name, shape, dtype, parameters)
        misfits = sorted(tensors.keys() ^ layout.keys())
        for name in tensors.keys() & layout.keys():
            if tensors[name].shape != layout[name][0]:
                misfits.append(name)
        if misfits:
            names = ", ".join(misfits[:3])
            raise UserError(
                f"{self.path} does not fit the model: {names}; give `out` another folder"
            )
        read_tensors_into(self.path, tensors)
        state = {
            name: tensor for name, tensor in tensors.items() if name.startswith(OPTIMIZER_PREFIX)
        }
        load_optimizer(model, optimizer, state, self.values["optimizer"])
