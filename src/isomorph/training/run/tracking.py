"""The curves of a run in TensorBoard or in Weights & Biases."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from isomorph.checkpoints.files import write_atomically
from isomorph.errors import UserError
from isomorph.training.recipe.recipe import Recipe

WANDB_ID = "wandb-id.txt"
"""File in the folder of a run with the id of its wandb run, so that a resumed run continues it."""


class Tracker(Protocol):
    """Takes the numbers of a run as they come."""

    def add(self, group: str, step: int, values: dict[str, float]) -> None:
        """Add a point to each of the curves `group/name`; the step of the group "epoch" is the epoch."""

    def close(self, failed: bool) -> None:
        """Write what is buffered; `failed` is True for a run that stopped before its end."""


def check_tracker(recipe: Recipe) -> None:
    """Raise UserError when the package that draws the curves is not installed.

    A folder of curves with its name, such as wandb/ in the working folder, is not the package: it has no origin.
    """
    if recipe.track and ((spec := find_spec(recipe.track)) is None or spec.origin is None):
        raise UserError(f"track: {recipe.track} is not installed; run pip install {recipe.track}, or leave track out")


def open_tracker(recipe: Recipe, step: int) -> Tracker | None:
    """Return the tracker that a recipe asks for, or None; `step` is the last one that is done.

    Raises: UserError when wandb cannot start.
    """
    if recipe.track is None:
        return None
    return TensorBoard(recipe.folder, step) if recipe.track == "tensorboard" else WeightsAndBiases(recipe)


class TensorBoard:
    """TensorBoard's event files in `tensorboard/` of the run's folder; steps to be repeated are dropped from them."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here, as it imports all of tensorboard

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def add(self, group: str, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{group}/{name}", value, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class WeightsAndBiases:
    """One wandb run for each run folder, with the recipe as its config.

    Every group of curves has an axis of its own, so a resumed run draws the steps that it repeats over the old ones.

    Source: https://docs.wandb.ai (wandb.init, define_metric, log, finish)
    """

    def __init__(self, recipe: Recipe) -> None:
        import wandb

        file = recipe.folder / WANDB_ID
        known = file.read_text().strip() if file.is_file() else None
        try:
            self.run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "isomorph"),
                name=recipe.name,
                id=known,
                resume="allow",
                dir=str(recipe.folder),
                config=recipe.model_dump(mode="json"),
                allow_val_change=True,
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise UserError(f"wandb cannot start: {reason}; run wandb login, or set WANDB_MODE=offline") from None
        write_atomically(file, lambda path: path.write_text(f"{self.run.id}\n"))
        for group, axis in (("train", "step"), ("epoch", "epoch")):
            self.run.define_metric(f"{group}/*", step_metric=f"{group}/{axis}")

    def add(self, group: str, step: int, values: dict[str, float]) -> None:
        axis = "epoch" if group == "epoch" else "step"
        self.run.log({f"{group}/{name}": value for name, value in {**values, axis: step}.items()})

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))
