"""The state of a run: model, data, optimiser and progress, with evaluation and saving."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from timm.scheduler.scheduler import Scheduler
from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.optim import Optimizer

from isomorph.checkpoints.autoencoder import write_autoencoder
from isomorph.checkpoints.files import read_contents
from isomorph.checkpoints.model import write_model
from isomorph.checkpoints.open import load
from isomorph.checkpoints.optimizer_state import AVERAGED_PREFIX, MODEL_PREFIX, model_tensors, split_optimizer
from isomorph.checkpoints.snapshot import IntactSnapshot, RunProgress, write_snapshot
from isomorph.data.sampler import BatchOrder, BatchParts, TrainSampler
from isomorph.data.streams.loader import workers_of_part
from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.training.classification import recipe_task
from isomorph.training.parallel import gathered_state_dict
from isomorph.training.recipe.recipe import Recipe, identity_json
from isomorph.training.run.guards import LossGuard
from isomorph.training.task import Objective

LOSS_SUM = "progress.loss"
LOSS_DTYPES = {"mps": torch.float32}
"""Types for the sum of losses, on devices without float64."""


@dataclass
class Run:
    """The state of a run."""

    recipe: Recipe
    runtime: Runtime
    objective: Objective
    optimizer: Optimizer
    scheduler: Scheduler
    order: BatchOrder
    share: BatchParts
    train: Any
    config: dict[str, Any]
    test: Iterable[Any]
    header: dict[str, str]
    progress: RunProgress
    guard: LossGuard
    total: Tensor
    start: str = ""
    found: IntactSnapshot | None = None
    warned: bool = False
    batches: Iterator[Any] | None = None

    @property
    def iterations(self) -> int:
        """Number of training steps of the whole run."""
        return self.recipe.iterations or self.recipe.epochs * self.order.steps

    @property
    def epochs(self) -> int:
        """Number of epochs of the run; with `iterations` in the recipe the last one may be incomplete."""
        return -(-self.iterations // self.order.steps)

    @property
    def epoch_steps(self) -> int:
        """Number of steps of the current epoch."""
        return min(self.order.steps, self.iterations - self.progress.closed * self.order.steps)

    @property
    def task(self) -> TrainingTask:
        """The task, with the loss and the trained modules."""
        return self.objective.task

    @property
    def trained(self) -> nn.Module:
        """The trained module, unwrapped."""
        return unwrap_model(self.task.get_trainable_module())

    @cached_property
    def mix(self) -> Callable[[Any, Any], tuple[Any, Any]] | None:
        """What mixes the samples of a part of a batch, such as mixup and cutmix; or None."""
        return recipe_task(self.recipe).mix(self.recipe, self.eval_model)

    @property
    def lanes(self) -> int:
        """Number of lanes of a stream, which must be the same when resuming within an epoch; 0 without a stream."""
        if not self.recipe.data.streamed:
            return 0
        return self.share.total * workers_of_part(self.share, max(self.recipe.data.workers, 1))

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of images, steps and classes per epoch; with others, a run cannot be resumed."""
        return {"images": self.order.images, "steps": self.order.steps, "classes": len(self.train.classes)}

    @property
    def averaged(self) -> nn.Module | None:
        """The trained module with averaged weights, or None."""
        return self.task.get_trainable_module(ema=True).module if self.task.has_ema() else None

    @property
    def eval_model(self) -> nn.Module:
        """The model to evaluate and save, with averaged weights if there are any."""
        return self.objective.result(self.averaged or self.trained)

    def share_buffers(self) -> None:
        """Broadcast the running statistics of the first process, of trained and averaged modules."""
        for module in (self.trained, self.averaged):
            if module is not None:
                self.runtime.broadcast_buffers(module)

    def measure(self) -> dict[str, float]:
        """Return the metrics of the evaluated model on the test images, over all processes."""
        self.share_buffers()
        return self.objective.measure(self.averaged or self.trained, self.test, self.runtime)

    def note_unreadable(self, problems: list[str]) -> None:
        """Record messages about unreadable images, each once."""
        self.progress.unreadable += [text for text in dict.fromkeys(problems) if text not in self.progress.unreadable]

    def share_unreadable(self) -> None:
        """Gather the records of unreadable images of all processes in each."""
        gathered = self.runtime.gather(self.progress.unreadable)
        self.progress.unreadable = list(dict.fromkeys(text for each in gathered for text in each))

    def next_part(self) -> Any:
        """Return the next part of a batch: inputs, targets, messages about unreadable samples."""
        if self.batches is None:  # the first since the run began or resumed: the loader starts at the next step
            deals = TrainSampler(self.order, self.epochs, self.progress.step, self.share)
            self.batches = iter(recipe_task(self.recipe).train_loader(self.recipe, self.config, self.train, deals))
        return next(self.batches)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything that a snapshot stores: tensors by name, and plain values of the optimiser."""
        optimizer_tensors, values = split_optimizer(self.trained, self.optimizer)
        total = torch.full_like(self.total, self.runtime.mean(self.total))
        tensors = model_tensors(self.trained, MODEL_PREFIX) | optimizer_tensors | {LOSS_SUM: total}
        if self.averaged is not None:
            tensors |= model_tensors(self.averaged, AVERAGED_PREFIX)
        return tensors, values

    def snapshot(self) -> Path:
        """Write a snapshot. Raises: UserError when it cannot be written."""
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
        """Write a checkpoint of the evaluated model. Every process must call it."""
        tensors = gathered_state_dict(self.eval_model)
        if self.runtime.is_main:
            write_model(self.header, tensors, path)

    def has_written(self, path: Path) -> bool:
        """Return True if this checkpoint exists with the current weights. Every process must call it."""
        tensors = gathered_state_dict(self.eval_model)
        if not self.runtime.is_main:
            return bool(self.runtime.maximum(0)[0])
        same = False
        with suppress(UserError):  # no such file, or a truncated one
            written = read_contents(path)
            same = written.header == self.header and written.tensors.keys() == tensors.keys()
            same = same and all(torch.equal(t.cpu(), written.tensors[name]) for name, t in tensors.items())
        return bool(self.runtime.maximum(same)[0])

    def save_autoencoder(self) -> None:
        """Write the whole autoencoder after masked pre-training. Every process must call it."""
        if self.objective.autoencoder:
            model = self.objective.autoencoder(self.averaged or self.trained)
            tensors = gathered_state_dict(model)
            if self.runtime.is_main:
                write_autoencoder(model, self.header, tensors, self.recipe.folder / "autoencoder.safetensors")

    def result(self) -> nn.Module:
        """Return the evaluated model, unsharded, in eval mode."""
        if self.recipe.scale.parallel == "ddp":
            return self.eval_model.eval()
        self.runtime.maximum(0)  # wait until the leading process has written the file
        return load(self.recipe.folder / "model.safetensors")
