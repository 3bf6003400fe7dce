"""A run: its model, data and optimiser, how it is measured, and how it is saved."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from timm.data import Mixup
from timm.scheduler.scheduler import Scheduler
from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from isomorph.checkpoints.autoencoder import write_autoencoder
from isomorph.checkpoints.model import (
    is_complete,
    load,
    read_header,
    read_tensors,
    write_model,
)
from isomorph.checkpoints.optimizer_state import (
    AVERAGED_PREFIX,
    MODEL_PREFIX,
    model_tensors,
    split_optimizer,
)
from isomorph.checkpoints.snapshot import (
    IntactSnapshot,
    write_snapshot,
)
from isomorph.checkpoints.snapshot_values import RunProgress
from isomorph.data.sampler import BatchOrder, BatchParts, TrainSampler
from isomorph.distributed import Runtime
from isomorph.training.build import (
    Data,
    build_train_loader,
)
from isomorph.training.objectives.objective import Objective
from isomorph.training.objectives.supervised import build_mixup
from isomorph.training.parallel import gathered_state_dict
from isomorph.training.recipe.recipe import (
    Recipe,
    identity_json,
)
from isomorph.training.run.guards import LossGuard

LOSS_SUM = "progress.loss"
LOSS_DTYPES = {"mps": torch.float32}
"""Where losses of an epoch cannot be summed in float64."""


@dataclass
class Run:
    """The moving parts of a run."""

    recipe: Recipe
    runtime: Runtime
    objective: Objective
    optimizer: Optimizer
    scheduler: Scheduler
    order: BatchOrder
    share: BatchParts
    train: Data
    config: dict[str, Any]
    test: DataLoader[Any]
    header: dict[str, str]
    progress: RunProgress
    guard: LossGuard
    total: Tensor
    start: str = ""
    found: IntactSnapshot | None = None
    warned: bool = False
    batches: Iterator[Any] | None = None

    @property
    def task(self) -> TrainingTask:
        """What is minimised, and the modules it owns."""
        return self.objective.task

    @property
    def trained(self) -> nn.Module:
        """The module whose parameters move."""
        return unwrap_model(self.task.get_trainable_module())

    @cached_property
    def mixup(self) -> Mixup | None:
        """What mixes the images of a part of a batch, if anything does."""
        maps = bool(self.recipe.token_labels and self.recipe.token_labels.maps)
        return build_mixup(self.recipe.augment, getattr(self.eval_model, "num_classes", 1000), maps)

    @property
    def lanes(self) -> int:
        """Into how many lanes a stream is split: a run within an epoch needs as many again."""
        return self.share.total * max(self.recipe.data.workers, 1) if self.recipe.data.streamed else 0

    @property
    def counts(self) -> dict[str, int]:
        """What a run counts its images by: with other numbers, no step is where it was."""
        return {"images": self.order.images, "steps": self.order.steps, "classes": len(self.train.classes)}

    @property
    def averaged(self) -> nn.Module | None:
        """The averaged copy of it, where there is one."""
        return self.task.get_trainable_module(ema=True).module if self.task.has_ema() else None

    @property
    def eval_model(self) -> nn.Module:
        """What is evaluated and kept: the averaged weights where there are any."""
        return self.objective.result(self.averaged or self.trained)

    def share_buffers(self) -> None:
        """Gives every process the first one's running statistics, trained and averaged."""
        for module in (self.trained, self.averaged):
            if module is not None:
                self.runtime.share_buffers(module)

    def measure(self) -> dict[str, float]:
        """What is evaluated and kept, measured on the test images by all processes together."""
        self.share_buffers()
        return self.objective.measure(self.averaged or self.trained, self.test, self.runtime)

    def note_unreadable(self, problems: list[str]) -> None:
        """Remembers images that could not be read, each once."""
        self.progress.unreadable += [said for said in dict.fromkeys(problems) if said not in self.progress.unreadable]

    def share_unreadable(self) -> None:
        """Makes every process know of all."""
        found = self.runtime.gathered(self.progress.unreadable)
        self.progress.unreadable = list(dict.fromkeys(said for each in found for said in each))

    def loader(self) -> DataLoader[Any]:
        """The training images that are left, from the next step on."""
        deals = TrainSampler(self.order, self.recipe.epochs, self.progress.step, self.share)
        return build_train_loader(self.recipe, self.config, self.train, deals)

    def next_part(self) -> Any:
        """The next part of a batch: images, labels, problems."""
        if self.batches is None:
            self.batches = iter(self.loader())
        return next(self.batches)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that the rest of the run depends on: tensors by name, and plain values."""
        kept, values = split_optimizer(self.trained, self.optimizer)
        total = torch.full_like(self.total, self.runtime.mean(self.total))
        tensors = model_tensors(self.trained, MODEL_PREFIX) | kept | {LOSS_SUM: total}
        if self.averaged is not None:
            tensors |= model_tensors(self.averaged, AVERAGED_PREFIX)
        return tensors, values

    def snapshot(self) -> Path:
        """Writes a snapshot. Raises: UserError when it cannot be written."""
        self.share_buffers()
        tensors, values = self.tensors()
        self.progress.first_loss = self.guard.first
        state = {
            "optimizer": values,
            "recipe": json.loads(identity_json(self.recipe)),
            "progress": vars(self.progress),
            "lanes": self.lanes,
            "data": self.counts,
            "model": self.header,
        }
        return write_snapshot(self.recipe.folder, self.progress.step, tensors, state, self.runtime)

    def save(self, path: Path) -> None:
        """Writes what is evaluated and kept as a checkpoint; every process calls it."""
        tensors = gathered_state_dict(self.eval_model)
        if self.runtime.leads:
            write_model(self.header, tensors, path)

    def has_written(self, path: Path) -> bool:
        """Whether `save` has left this checkpoint, and it is still what was written; every process calls it."""
        tensors = gathered_state_dict(self.eval_model)
        if not self.runtime.leads:
            return bool(self.runtime.highest(0)[0])
        same = is_complete(path) and read_header(path) == self.header
        found = read_tensors(path) if same else {}
        same = found.keys() == tensors.keys() and all(torch.equal(t.cpu(), found[name]) for name, t in tensors.items())
        return bool(self.runtime.highest(same)[0])

    def save_autoencoder(self) -> None:
        """Writes all of a masked autoencoder, where that is what was trained; every process calls it."""
        if self.objective.autoencoder:
            model = self.objective.autoencoder(self.averaged or self.trained)
            tensors = gathered_state_dict(model)
            if self.runtime.leads:
                write_autoencoder(model, self.header, tensors, self.recipe.folder / "autoencoder.safetensors")

    def result(self) -> nn.Module:
        """What is evaluated and kept, whole, in eval mode."""
        if self.recipe.scale.parallel == "ddp":
            return self.eval_model.eval()
        self.runtime.highest(0)  # the file is whole before anyone reads it
        return load(self.recipe.folder / "model.safetensors")
