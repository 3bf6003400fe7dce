"""A run and its moving parts: built from a recipe, taken up from a snapshot, and written as one."""

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
    describe_model,
    is_whole,
    load,
    read_header,
    read_tensors,
    remember_data,
    write_model,
)
from isomorph.checkpoints.optimizer_state import (
    AVERAGED,
    MODEL,
    OPTIMISER,
    fill_optimizer,
    model_tensors,
    room_for,
    split_optimizer,
)
from isomorph.checkpoints.snapshot import (
    Damaged,
    Found,
    newest,
    read_layout,
    read_tensors_into,
    write_snapshot,
)
from isomorph.checkpoints.snapshot_values import Progress
from isomorph.data import Deals, Order, Share
from isomorph.distributed import Runtime, open_runtime, seed_everything
from isomorph.errors import UserError
from isomorph.training.build import (
    Data,
    build_model,
    build_test_loader,
    build_train_loader,
    data_config,
    open_sources,
    plan,
    refuse_blind,
)
from isomorph.training.objectives.objective import Objective, build_objective
from isomorph.training.objectives.supervised import build_mixup
from isomorph.training.optim import build_optimizer, build_scheduler
from isomorph.training.parallel import prepare_model, spread, whole_state
from isomorph.training.recipe.recipe import (
    Recipe,
    changes,
    identity,
    with_defaults,
)
from isomorph.training.run.guards import LossGuard
from isomorph.training.run.preflight import (
    refuse_missing_files,
    refuse_random_start,
    refuse_unfit,
    refuse_unwatchable,
)

TOTAL = "progress.loss"
SUMS = {"mps": torch.float32}
"""Where losses of an epoch cannot be summed in float64."""


@dataclass
class Run:
    """The moving parts of a run."""

    recipe: Recipe
    runtime: Runtime
    objective: Objective
    optimizer: Optimizer
    scheduler: Scheduler
    order: Order
    share: Share
    train: Data
    config: dict[str, Any]
    test: DataLoader[Any]
    header: dict[str, str]
    progress: Progress
    guard: LossGuard
    total: Tensor
    start: str = ""
    found: Found | None = None
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
        return self.share.of * max(self.recipe.data.workers, 1) if self.recipe.data.streamed else 0

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
        deals = Deals(self.order, self.recipe.epochs, self.progress.step, self.share)
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
        tensors = model_tensors(self.trained, MODEL) | kept | {TOTAL: total}
        if self.averaged is not None:
            tensors |= model_tensors(self.averaged, AVERAGED)
        return tensors, values

    def snapshot(self) -> Path:
        """Writes a snapshot. Raises: UserError when it cannot be written."""
        self.share_buffers()
        tensors, values = self.tensors()
        self.progress.first_loss = self.guard.first
        state = {
            "optimizer": values,
            "recipe": json.loads(identity(self.recipe)),
            "progress": vars(self.progress),
            "lanes": self.lanes,
            "data": self.counts,
            "model": self.header,
        }
        return write_snapshot(self.recipe.folder, self.progress.step, tensors, state, self.runtime)

    def save(self, path: Path) -> None:
        """Writes what is evaluated and kept as a checkpoint; every process calls it."""
        tensors = whole_state(self.eval_model)
        if self.runtime.leads:
            write_model(self.header, tensors, path)

    def has_written(self, path: Path) -> bool:
        """Whether `save` has left this checkpoint, and it is still what was written; every process calls it."""
        tensors = whole_state(self.eval_model)
        if not self.runtime.leads:
            return bool(self.runtime.highest(0)[0])
        same = is_whole(path) and read_header(path) == self.header
        found = read_tensors(path) if same else {}
        same = found.keys() == tensors.keys() and all(torch.equal(t.cpu(), found[name]) for name, t in tensors.items())
        return bool(self.runtime.highest(same)[0])

    def save_autoencoder(self) -> None:
        """Writes all of a masked autoencoder, where that is what was trained; every process calls it."""
        if self.objective.autoencoder:
            model = self.objective.autoencoder(self.averaged or self.trained)
            tensors = whole_state(model)
            if self.runtime.leads:
                write_autoencoder(model, self.header, tensors, self.recipe.folder / "autoencoder.safetensors")

    def result(self) -> nn.Module:
        """What is evaluated and kept, whole, in eval mode."""
        if self.recipe.scale.parallel == "ddp":
            return self.eval_model.eval()
        self.runtime.highest(0)  # the file is whole before anyone reads it
        return load(self.recipe.folder / "model.safetensors")


def open_run(recipe: Recipe, runtime: Runtime | None = None) -> Run:
    """Builds every part of a run from its recipe, before anything is written, and takes it up where it was left.

    Raises: UserError when something is missing or does not fit, or the folder holds another run.
    """
    runtime = runtime or open_runtime(recipe.device, recipe.amp == "bf16")
    refuse_missing_files(recipe)
    found = find_snapshot(recipe, runtime)
    if not found:
        refuse_random_start(recipe)
    recast = found.values["progress"]["recast"] if found else recipe.model.recast_epoch == 0
    train, test = open_sources(recipe)
    order, share = plan(recipe, train, runtime)
    seed_everything("birth", recipe.seed)
    model = build_model(recipe.model, len(train.classes), recipe.drop_path, recast)
    refuse_unfit(recipe, model, len(train.classes), recast)
    config = data_config(recipe, model)
    refuse_blind(model, config["input_size"], recipe.model.name)
    remember_data(model, {**config, "source": recipe.data.source, "label_names": list(train.classes)})
    testing = build_test_loader(recipe, config, test, runtime)
    refuse_unwatchable(recipe, model.to(runtime.device), config, recast)
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
        progress=Progress(recast=recast),
        guard=LossGuard(recipe.divergence),
        start=getattr(model, "isomorph_start", ""),
        total=torch.zeros((), device=runtime.device, dtype=SUMS.get(runtime.device.type, torch.float64)),
    )
    if found:
        restore(run, found)
    return run


def assemble(
    recipe: Recipe, model: nn.Module, runtime: Runtime, steps: int
) -> tuple[Objective, Optimizer, Scheduler, dict[str, str]]:
    """Objective, optimiser, schedule around a model, spread over the processes; and the header of its checkpoints."""
    header = describe_model(model)
    objective = build_objective(recipe, prepare_model(model, recipe.scale, runtime), runtime.device)
    if recipe.ema:
        objective.task.setup_ema(decay=recipe.ema)
    spread(objective.task, recipe.scale, runtime)
    optimizer = build_optimizer(unwrap_model(objective.task.get_trainable_module()), recipe.optim)
    return objective, optimizer, build_scheduler(optimizer, recipe.optim, recipe.epochs, steps), header


def find_snapshot(recipe: Recipe, runtime: Runtime) -> Found | None:
    """The newest whole snapshot of the recipe's folder, the same for every process.

    Raises: UserError when the folder holds a run of another recipe, or nothing but damage.
    """
    found: Found | None = None
    problem = ""
    if runtime.leads:
        try:
            if recipe.folder.exists() and not recipe.folder.is_dir():
                raise UserError(f"{recipe.folder} is a file; give `out` a folder")
            found = newest(recipe.folder)
            if found:
                refuse_other(recipe, found)
            elif any((recipe.folder / name).is_file() for name in ("model.safetensors", "last.pt")):
                raise UserError(
                    f"{recipe.folder} holds a run without a snapshot to go on from (deleted, or of an older isomorph); "
                    "give `out` another folder"
                )
        except Damaged as error:
            problem = f"{error}; delete {recipe.folder} to start the run again"
        except UserError as error:
            problem = str(error)
    found, problem = runtime.gathered((found, problem))[0]
    if problem:
        raise UserError(problem)
    return found


def refuse_other(recipe: Recipe, found: Found) -> None:
    """Raises: UserError when the snapshot is of another recipe."""
    changed = changes(with_defaults(found.values["recipe"]), json.loads(identity(recipe)))
    if changed:
        where = found.path.parent
        hint = f"give `out` another folder (model.weights={where / 'model.safetensors'} starts from this run's weights)"
        raise UserError(f"{where} holds another run ({'; '.join(changed)}); {hint}")


def restore(run: Run, found: Found) -> None:
    """Takes a run up where the snapshot was taken. Raises: UserError when the snapshot does not fit."""
    if differing := changes(found.values["data"], run.counts):
        raise UserError(
            f"{found.path} is of a run on other data ({'; '.join(differing)} an epoch): give it the images that it was "
            "begun with, or `out` another folder"
        )
    within = found.values["progress"]["step"] % run.order.steps
    if within and found.values["lanes"] != run.lanes:
        raise UserError(
            f"{found.path} was taken within an epoch of a stream, in {found.values['lanes']} lanes (parts times "
            f"workers), this run has {run.lanes} and would leave images out; give it as many processes and data.workers"
        )
    tensors, _ = run.tensors()
    layout = read_layout(found.path)
    parameters = {name: parameter.detach() for name, parameter in run.trained.named_parameters()}
    for name, (shape, dtype) in layout.items():
        if name.startswith(OPTIMISER):
            tensors[name] = room_for(name, shape, dtype, parameters)
    differing = sorted(tensors.keys() ^ layout.keys()) + [
        name for name in tensors.keys() & layout.keys() if tensors[name].shape != layout[name][0]
    ]
    if differing:
        raise UserError(f"{found.path} does not fit the model: {', '.join(differing[:3])}; give `out` another folder")
    read_tensors_into(found.path, tensors)
    run.total.copy_(tensors[TOTAL])
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith(OPTIMISER)}
    fill_optimizer(run.trained, run.optimizer, kept, found.values["optimizer"])
    run.progress = Progress(**found.values["progress"])
    run.guard.first = run.progress.first_loss
    run.found = found
