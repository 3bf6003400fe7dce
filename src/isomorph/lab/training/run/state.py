"""A run: built from its recipe, restored from its newest snapshot, recast in the middle, evaluated."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import nn

from isomorph.analysis import logit_stats
from isomorph.analysis.cost import has_pyramids
from isomorph.checkpoints.model import describe_model, record_data
from isomorph.checkpoints.open import local_file
from isomorph.errors import UserError
from isomorph.json_values import JsonObject
from isomorph.lab.data.sampler import TrainSampler
from isomorph.lab.data.streams import workers_of_part
from isomorph.lab.distributed import Runtime, open_runtime, seed_everything
from isomorph.lab.evaluation.classes import class_count, shorten
from isomorph.lab.training.build import apply_surgery, plan_batches
from isomorph.lab.training.classification import recipe_task
from isomorph.lab.training.optim import build_optimizer, build_scheduler
from isomorph.lab.training.parallel import distribute, prepare_model
from isomorph.lab.training.recipe.recipe import Recipe, task_teacher_file
from isomorph.lab.training.run.named_state import (
    AVERAGED_PREFIX,
    GROUP_PREFIX,
    MODEL_PREFIX,
    Tensors,
    load_optimizer,
    model_tensors,
    owner_name,
    split_optimizer,
)
from isomorph.lab.training.run.resume import Resume, find_snapshot, weights_in
from isomorph.lab.training.run.snapshot import RunProgress
from isomorph.lab.training.task import Mix, Task
from isomorph.operations import copy_module
from isomorph.surgery import notes
from isomorph.surgery.recast import check_finite
from isomorph.surgery.rule import record
from isomorph.terminal_tables import Metrics

_TOTALS = "progress.totals"


class Run:
    """A run in memory, built from its recipe in stages that check what they take; nothing is written before.

    - recipe; runtime, by default the one that it asks for; task, by default the recipe's
    - resumed_from: the snapshot that it resumes from, or None; progress
    - train, test: the training data, and the batches of this process's test images; config: the images' size and norm
    - order, share: the order of the training images, and the parts of every batch that this process trains on
    - has_weights: whether it starts from weights: given, public, or those that its own function may load
    - objective, optimizer, scheduler; header: what rebuilds the model from a checkpoint; start: what its weights were
    - total: sums of loss and training accuracy over the steps of this epoch; batches: the training batches, once begun

    Raises: UserError when something is missing or does not fit, or the folder holds another run.
    """

    def __init__(
        self, recipe: Recipe, runtime: Runtime | None = None, task: Task | None = None
    ) -> None:
        runtime = runtime or open_runtime(recipe.device, recipe.amp == "bf16")
        self.recipe = recipe
        self.runtime = runtime
        self.task = task or recipe_task(recipe)
        check_model_given(recipe)
        if not self.task.rehearses:
            check_files(recipe)
        self.resumed_from = runtime.on_main(lambda: find_snapshot(recipe))
        self.has_weights = bool(
            recipe.model.weights or recipe.model.pretrained or recipe.model.is_of_function
        )
        if not self.resumed_from and recipe.model.start == "weights" and not self.has_weights:
            raise UserError(
                f"{recipe.name} requires trained weights; give model.weights=FILE or model.pretrained=True "
                "(model.start=random starts from random weights)"
            )
        if self.resumed_from:
            self.progress = RunProgress(**self.resumed_from.values["progress"])
        else:
            self.progress = RunProgress(recast=recipe.model.recast_epoch == 0)
        self.train, test = self.task.open_data(recipe)
        self.order, self.share = plan_batches(recipe, self.train, runtime)
        model = self._initialise_model()
        self.test: Iterable[Any] = self.task.test_loader(recipe, self.config, test, runtime)
        self._check_layers(model.to(runtime.device))
        self._assemble(model)
        self.start = record(model).start
        # which MPS does not have
        dtype = torch.float32 if runtime.device.type == "mps" else torch.float64
        self.total = torch.zeros(2, device=runtime.device, dtype=dtype)
        self.batches: Iterator[Any] | None = None
        if self.resumed_from:
            resume = Resume(self.resumed_from)
            resume.check_data(self.header, self.counts)
            if self.progress.step % self.order.steps:
                resume.check_lanes(self.lanes)
            tensors = self.tensors()[0]
            resume.read_into(tensors, self.trained, self.optimizer)
            self.total.copy_(tensors[_TOTALS])

    def _initialise_model(self) -> nn.Module:
        recipe = self.recipe
        task = self.task
        classes = list(self.train.classes)
        # seeds derive from this word: another word is another initialisation
        seed_everything("birth", recipe.seed)
        model = task.build_model(recipe, self.train, self.progress.recast)
        if not self.progress.recast:
            # raises, before the run starts, if it would fail later
            apply_surgery(copy_module(model), recipe.model)
        check_finite(model)
        if not recipe.mask and getattr(model, "num_classes", len(classes)) < len(classes):
            own = model.num_classes
            raise UserError(
                f"the data has {len(classes)} classes, but model.num_classes is {own}; leave it out"
            )
        self.config = task.data_config(recipe, model)
        task.check_model(recipe, model, self.config)
        data = {**self.config, "source": recipe.data.source, "label_names": classes}
        if not recipe.data.streamed:
            data["split"] = getattr(self.train, "split", None)
        if recipe.task:
            data["task"] = recipe.task.model_dump(mode="json")
        record_data(model, data)
        if recipe.model.is_of_function:
            outputs = class_count(model)
            if outputs != len(classes):
                raise UserError(
                    f"{recipe.model.name} has {outputs} classes, the data has {len(classes)} ({shorten(classes)}); "
                    "give the function's own argument for it as model.kwargs.NAME=VALUE"
                )
        return model

    def _check_layers(self, model: nn.Module) -> None:
        """Raise UserError for a network that cannot be annealed or monitored, as it is after its recast."""
        recipe = self.recipe
        if not (recipe.anneal or recipe.monitor_every):
            return
        tried = copy_module(model)
        if not self.progress.recast:
            tried = apply_surgery(tried, recipe.model)
        if recipe.monitor_every:
            inputs = self.task.attention_inputs(self.config)
            if inputs is None:
                raise UserError("monitor_every is for models of images; leave it out")
            if not has_pyramids(tried):  # whose branches are monitored in any model
                logit_stats(tried, inputs.to(self.runtime.device))
        if recipe.anneal:
            recipe.anneal.schedule(1).apply(tried, 0)

    def _assemble(self, model: nn.Module) -> None:
        recipe = self.recipe
        runtime = self.runtime
        self.header = describe_model(model)
        prepared = prepare_model(model, recipe.scale, runtime)
        self.objective = self.task.objective(recipe, prepared, runtime.device)
        if recipe.ema:
            # foreach cannot mix these parameters with plain buffers
            sharded = recipe.scale.parallel == "fsdp"
            self.loss_module.setup_ema(decay=recipe.ema, foreach=not sharded)
        distribute(self.loss_module, recipe.scale, runtime)
        self.optimizer = build_optimizer(self.trained, recipe.optim)
        steps = self.order.steps
        self.scheduler = build_scheduler(
            self.optimizer, recipe.optim, recipe.epochs, steps, recipe.iterations
        )

    @property
    def iterations(self) -> int:
        return self.recipe.iterations or self.recipe.epochs * self.order.steps

    @property
    def epochs(self) -> int:
        """Number of epochs of the run; with `iterations` in the recipe the last one may be incomplete."""
        return -(-self.iterations // self.order.steps)

    @property
    def epoch_steps(self) -> int:
        left = self.iterations - self.progress.closed * self.order.steps
        return min(self.order.steps, left)

    @property
    def loss_module(self) -> TrainingTask:
        return self.objective.loss_module

    @property
    def trained(self) -> nn.Module:
        return unwrap_model(self.loss_module.get_trainable_module())

    @property
    def averaged(self) -> nn.Module | None:
        if self.loss_module.has_ema():
            return self.loss_module.get_trainable_module(ema=True).module
        return None

    @property
    def eval_model(self) -> nn.Module:
        return self.objective.result(self.averaged or self.trained)

    @cached_property
    def mix(self) -> Mix | None:
        """What mixes the samples of a part of a batch, such as mixup and cutmix; or None."""
        return self.task.mix(self.recipe, self.eval_model)

    @property
    def lanes(self) -> int:
        """Number of lanes of a stream, which must be the same when resuming within an epoch; 0 without a stream."""
        if not self.recipe.data.streamed:
            return 0
        return self.share.total * workers_of_part(self.share, max(self.recipe.data.workers, 1))

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of images, steps and classes, and the size of a batch; with others, a run cannot be resumed."""
        order = self.order
        return {
            "images": order.images,
            "steps": order.steps,
            "classes": len(self.train.classes),
            "batch": order.batch,
        }

    def mean_total(self, index: int) -> float:
        """Return a sum of `total`, the mean over all processes: 0 is the loss, 1 the training accuracy."""
        return self.runtime.mean(self.total[index])

    def next_part(self) -> Any:
        """Return the next part of a batch: inputs, targets, messages about unreadable samples."""
        # the first since the run began or resumed: the loader starts at the next step
        if self.batches is None:
            sampler = TrainSampler(self.order, self.epochs, self.progress.step, self.share)
            self.batches = iter(
                self.task.train_loader(self.recipe, self.config, self.train, sampler)
            )
        return next(self.batches)

    def measure(self) -> Metrics:
        self.share_buffers()
        return self.objective.measure(self.averaged or self.trained, self.test, self.runtime)

    @property
    def models(self) -> list[nn.Module]:
        """The trained model, and the one with averaged weights if there is one."""
        averaged = self.averaged
        if averaged is None:
            return [self.trained]
        return [self.trained, averaged]

    def share_buffers(self) -> None:
        """Give the buffers of the leading process to all others."""
        for model in self.models:
            self.runtime.broadcast_buffers(model)

    def note_unreadable(self, messages: Iterable[str]) -> None:
        """Add messages about unreadable samples, each once."""
        self.progress.unreadable = list(dict.fromkeys([*self.progress.unreadable, *messages]))

    def share_unreadable(self) -> None:
        """Collect the messages about unreadable samples from all processes."""
        gathered = self.runtime.gather(self.progress.unreadable)
        self.note_unreadable(chain.from_iterable(gathered))

    def recast(self) -> str:
        """Recast the model in the middle of the run; return a message.

        Parameters whose name, shape and values are unchanged keep their optimiser state. Averaged weights are recast
        too, with the same random draws. Source: T-CNN section 5, Table 3
        """
        before: Tensors = dict(self.trained.named_parameters())
        tensors, values = split_optimizer(self.trained, self.optimizer)
        model = self._recast_copy(self.trained)
        averaged = self.averaged and self._recast_copy(self.averaged)
        after = dict(model.named_parameters())
        kept = {name for name in before.keys() & after if torch.equal(before[name], after[name])}
        self._assemble(model)
        if averaged is not None:
            self.averaged.load_state_dict(averaged.state_dict())  # type: ignore[union-attr]

        still_owned = {}
        for name, tensor in tensors.items():
            owner = owner_name(name)
            if owner in kept or owner.startswith(GROUP_PREFIX):
                still_owned[name] = tensor
        values["state"] = {name: value for name, value in values["state"].items() if name in kept}
        load_optimizer(self.trained, self.optimizer, still_owned, values)
        self.progress.recast = True
        message = (
            f"recast after epoch {self.progress.closed}: {len(kept)} parameter tensors are "
            f"unchanged, {len(after) - len(kept)} are new"
        )
        return "; ".join([message, *notes(self.trained)])

    def _recast_copy(self, model: nn.Module) -> nn.Module:
        seed_everything("recast", self.recipe.seed)
        return apply_surgery(copy_module(model), self.recipe.model).train(model.training)

    def tensors(self) -> tuple[Tensors, JsonObject]:
        """Return everything that a snapshot stores: tensors by name, and plain values of the optimiser."""
        optimizer_tensors, values = split_optimizer(self.trained, self.optimizer)
        totals = torch.tensor([self.mean_total(0), self.mean_total(1)], dtype=torch.float64)
        tensors = model_tensors(self.trained, MODEL_PREFIX) | optimizer_tensors
        tensors[_TOTALS] = totals.to(self.total)
        if self.averaged is not None:
            tensors |= model_tensors(self.averaged, AVERAGED_PREFIX)
        return tensors, values


def check_model_given(recipe: Recipe) -> None:
    """Raise UserError for a recipe without a model."""
    if recipe.model.name is None and recipe.model.weights is None:
        raise UserError(
            f"{recipe.name} has no model; give model.weights=FILE, or a timm model as model.name=NAME"
        )


def check_files(recipe: Recipe) -> None:
    """Raise UserError for a file or teacher that is missing; names the run that makes it, if known."""
    if recipe.model.weights:
        _check_file("model.weights", local_file(recipe.model.weights))
    if recipe.mask:
        _check_file("mask.teacher", recipe.mask.teacher)
    if recipe.distill:
        _check_file("distill.weights", recipe.distill.weights)
    teacher = task_teacher_file(recipe)
    if teacher is not None and not teacher.is_dir():
        _check_file("task.teacher", teacher)


def _check_file(field: str, path: Path | None) -> None:
    if not path or path.is_file():
        return
    if path.is_dir():
        file = weights_in(path) or path / "model.safetensors"
        raise UserError(f"{field}: {path} is a folder; give a checkpoint in it, like {file}")
    raise UserError(f"{field}: {path} does not exist{_hint_for_missing(path)}")


def _hint_for_missing(path: Path) -> str:
    best = path.parent / "best.safetensors"
    if path.name == "model.safetensors" and best.is_file():
        return f"; its run is not finished, and {best} is there"
    weights = weights_in(path.parent)
    if weights:
        return f"; {weights} is there"
    if path.parts[0] == "runs" and len(path.parts) > 2:
        return f"; if {path.parts[1]} is a recipe, `isomorph train {path.parts[1]}` creates it"
    return ""
