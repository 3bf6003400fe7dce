"""A dry run: what a recipe trains, needs and costs, without its data, and two steps of it."""

import copy
import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as meta_config

from isomorph.errors import UserError
from isomorph.json_values import JsonObject
from isomorph.lab.distributed import Runtime, open_runtime
from isomorph.lab.training.build import plan_batches
from isomorph.lab.training.classification import recipe_task
from isomorph.lab.training.dry_run.h100 import FuseAttention, RecordOperations, StepCost
from isomorph.lab.training.dry_run.meta import RememberOutlines
from isomorph.lab.training.dry_run.needs import list_needs
from isomorph.lab.training.optim import build_optimizer, describe_groups
from isomorph.lab.training.parallel import prepare_model
from isomorph.lab.training.recipe.recipe import Recipe
from isomorph.lab.training.run.loop import slow_average, train_step
from isomorph.lab.training.run.resume import find_snapshot
from isomorph.lab.training.run.state import Run, check_model_given
from isomorph.lab.training.task import Objective, Task
from isomorph.surgery.anneal import annealed_layers
from isomorph.terminal_tables import Table

META = torch.device("meta")
# GPUs among which the predicted run divides its batches.
GPUS = 8
# Floating-point operations of a step on a CPU, which decide how many images it takes.
CPU_STEP = 3e11
# Bytes of state for each parameter: itself, its gradient, and two moments of the optimiser.
BYTES_A_PARAMETER = 16
GIB = 2**30


@dataclass(frozen=True)
class DryRun:
    """What a recipe would train, need and cost.

    >>> plan = iso.training.dry_run(iso.load_recipe("digits_cnn"), steps=0)
    >>> plan.steps, plan.parameters
    (126, 269722)
    """

    recipe: Recipe = field(repr=False)
    data: str
    """Name of the data set, and its training images."""
    epochs: int
    steps: int
    """Training steps of the whole run."""
    batch: int
    """Images of a step: of data.batch_size, or fewer where the data has fewer."""
    images: int
    """Images that the whole run trains on, repeated ones included."""
    parameters: int
    groups: list[str] = field(repr=False)
    """A line for each parameter group: its size, peak learning rate and weight decay."""
    needs: list[str] = field(repr=False)
    """What has to be downloaded or trained before."""
    memory: float
    """GiB of a step, calculated: weights, gradients, moments, and what the backward pass keeps."""
    part: int
    """Images at once in this process, for which `memory` is."""
    memory_h100: float
    """GiB of a step on each of eight H100, calculated."""
    h100: StepCost = field(repr=False)
    """Seconds of a step on each of eight H100, calculated."""
    seconds: float | None = None
    """Measured seconds for an image here; None if no step ran."""
    measured_images: int = 0
    measured_memory: float | None = None
    """Measured GiB of a step on a GPU."""
    notes: list[str] = field(default_factory=list, repr=False)

    @property
    def hours_here(self) -> float | None:
        """Hours of training on this machine, from the measured steps."""
        if self.seconds is None:
            return None
        return self.images * self.seconds / 3600

    @property
    def hours_h100(self) -> float:
        """Hours of training on eight H100, calculated."""
        return self.steps * self.h100.eager / 3600

    def table(self) -> Table:
        """Return the facts as rows of a name and a text."""
        recipe = self.recipe
        table = [["", recipe.name]]

        def add(name: str, *lines: str) -> None:
            for line in lines:
                table.append([name, line])
                name = ""

        batch = f"{self.batch:,} samples"
        add("source", recipe.source or "-")
        add("expected", recipe.expected or "no published number")
        add("data", self.data)
        add("run", f"{self.epochs:,} epochs, {self.steps:,} steps of {batch}")
        add("parameters", f"{self.parameters:,}")
        add("group", *map(str.strip, self.groups))
        add("memory of a step", self._memory_text())
        add("hours here", self._hours_text())
        add("hours on 8 H100", self._h100_text())
        add("needs", *(self.needs or ["nothing"]))
        add("note", *self.notes)
        return table

    def as_dict(self) -> JsonObject:
        """Return the facts as plain values, for JSON."""
        return {
            "recipe": self.recipe.name,
            "source": self.recipe.source,
            "expected": self.recipe.expected,
            "data": self.data,
            "epochs": self.epochs,
            "steps": self.steps,
            "batch_size": self.batch,
            "parameters": self.parameters,
            "groups": [line.strip() for line in self.groups],
            "memory_gib": self.memory,
            "measured_memory_gib": self.measured_memory,
            "hours_here": self.hours_here,
            "memory_8_h100_gib": self.memory_h100,
            "hours_8_h100": self.hours_h100,
            "hours_8_h100_graph": self.steps * self.h100.graph / 3600,
            "needs": self.needs,
            "notes": self.notes,
        }

    def _memory_text(self) -> str:
        text = f"{_number(self.memory)} GiB for {self.part:,} samples at once (calculated)"
        if self.measured_memory is not None:
            text += f", {_number(self.measured_memory)} GiB measured"
        return text

    def _hours_text(self) -> str:
        if self.hours_here is None or self.seconds is None:
            return "not measured"
        return (
            f"{_number(self.hours_here)} ({1 / self.seconds:.3g} samples a second, measured in "
            f"steps of {self.measured_images}, without reading data and testing)"
        )

    def _h100_text(self) -> str:
        graph = self.steps * self.h100.graph / 3600
        eager = _number(self.hours_h100)
        return (
            f"{eager}, {_number(graph)} as a CUDA graph, {_number(self.memory_h100)} GiB each "
            "(calculated, docs/gpu.md)"
        )


def _number(value: float) -> str:
    """Return a number with two digits, written out if it is large."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2g}"


class SyntheticTask:
    """A task with synthetic samples in place of its data; everything else is the task's own."""

    def __init__(self, task: Task, data: Any) -> None:
        self.task = task
        self.data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def open_data(self, recipe: Recipe) -> tuple[Any, Any]:
        """Return the stand-in for training and test data."""
        return self.data, self.data

    def test_loader(self, *_: Any) -> tuple[()]:
        """Return no test batches: a dry run does not evaluate."""
        return ()

    def train_loader(self, recipe: Recipe, config: Any, train: Any, sampler: Any) -> Iterator[Any]:
        """Yield random batches for ever."""
        samples = recipe.data.batch_size // sampler.parts.total
        model = self.model
        while True:
            device = torch.device("cpu")
            inputs, targets = self.task.synthetic_batch(recipe, model, config, samples, device)
            yield inputs, targets, []

    def build_model(self, recipe: Recipe, train: Any, recast_now: bool) -> nn.Module:
        """Build the task's model, and remember it for the shapes of its targets."""
        self.model = self.task.build_model(recipe, train, recast_now)
        return self.model


def dry_run(recipe: Recipe, steps: int = 2) -> DryRun:
    """Return what a recipe would train, need and cost, and train some steps on random samples.

    Nothing is read or downloaded: data has its published size, unless `data.root` is given, and
    weights are random, unless their file is here. Steps take as many samples as a CPU trains in
    seconds, or on a GPU as the run would; with `steps` 0, none is trained. Nothing is written.

    Raises: UserError for what does not fit: fields, weights, the batch, the memory of a GPU.

    >>> plan = iso.training.dry_run(iso.load_recipe("digits_cnn"))
    >>> plan.needs
    []
    """
    check_model_given(recipe)
    runtime = open_runtime(recipe.device, recipe.amp == "bf16")
    task = copy.copy(recipe_task(recipe))
    task.rehearses = True
    if recipe.folder.is_dir():
        find_snapshot(recipe)  # raises for another run in the folder
    data = _open_data(recipe, task)
    order, _ = plan_batches(recipe, data, runtime)
    total = recipe.iterations or recipe.epochs * order.steps
    name = getattr(data, "name", recipe.data.source)
    part = recipe.data.batch_size // (runtime.world * recipe.scale.accumulate)
    cost = _cost_on_meta(recipe, task, data)
    memory = (cost.state + cost.kept_a_sample * part) / GIB
    measured = _Measured()
    if steps:
        measured = _measure(recipe, task, data, runtime, part, cost, steps)
    return DryRun(
        recipe=recipe,
        data=f"{name}, {len(data):,} training samples",
        epochs=math.ceil(total / order.steps),
        steps=total,
        batch=order.batch,
        images=total * order.batch,
        parameters=cost.parameters,
        groups=cost.groups,
        needs=list(list_needs(recipe, name)),
        memory=memory,
        part=part,
        memory_h100=(cost.state + cost.kept_a_sample * recipe.data.batch_size / GPUS) / GIB,
        h100=cost.h100,
        seconds=measured.seconds,
        measured_images=measured.images,
        measured_memory=measured.memory,
        notes=[
            *filter(None, [recipe.shortened, slow_average(recipe.ema, total)]),
            *measured.notes,
        ],
    )


def _open_data(recipe: Recipe, task: Task) -> Any:
    if recipe.data.root is None:
        return task.synthetic_data(recipe)
    train, _ = task.open_data(recipe)
    return train


def _without_files(recipe: Recipe) -> Recipe:
    """Return the recipe with random weights."""
    changes = {"weights": None, "pretrained": False, "start": "random"}
    part = recipe.model.model_copy(update=changes)
    return recipe.model_copy(update={"model": part})


@dataclass(frozen=True)
class _Cost:
    parameters: int
    groups: list[str]
    state: float
    """Bytes of weights, gradients and moments, averages and a teacher's weights."""
    kept_a_sample: float
    """Bytes that the backward pass keeps for a sample."""
    work_a_sample: float
    """Floating-point operations of a step for a sample."""
    h100: StepCost


def _cost_on_meta(recipe: Recipe, task: Task, data: Any) -> _Cost:
    """Build the network on the meta device, and run one step of it, which computes shapes only."""
    samples = max(2, recipe.data.batch_size // GPUS // 2 * 2)
    amp = recipe.amp == "bf16"
    plain = _without_files(recipe) if recipe.model.name is not None else recipe
    # which boxes are inside a map depends on values: all of them are taken to be
    assume_nonzero = meta_config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    with assume_nonzero, RememberOutlines():
        with META:
            model = task.build_model(plain, data, True).to(META)
            config = task.data_config(plain, model)
            task.check_model(plain, model, config)
            if recipe.anneal:
                annealed_layers(model)
            objective = task.objective(plain, prepare_model(model, recipe.scale, _ALONE), META)
        trained = objective.loss_module.get_trainable_module()
        groups = describe_groups(trained, build_optimizer(trained, recipe.optim), recipe.optim)
        inputs, targets = task.synthetic_batch(plain, model, config, samples, META)
        mix = task.mix(plain, model)
        if mix:
            inputs, targets = mix(inputs, targets)
        recorded, kept = _step_on_meta(task, objective, inputs, targets, amp)
    weights = sum(parameter.numel() for parameter in trained.parameters())
    frozen = sum(parameter.numel() for parameter in objective.loss_module.parameters()) - weights
    state = BYTES_A_PARAMETER * weights + 4 * frozen + (4 * weights if recipe.ema else 0)
    return _Cost(
        parameters=weights,
        groups=groups,
        state=state,
        kept_a_sample=kept / samples,
        work_a_sample=recorded.flops() / samples,
        h100=recorded.cost(),
    )


def _step_on_meta(
    task: Task, objective: Objective, inputs: Any, targets: Any, amp: bool
) -> tuple[RecordOperations, float]:
    """Run a step, and return its operations, and the bytes that the backward pass keeps."""
    loss_module = objective.loss_module.train()
    own = {_storage(parameter) for parameter in loss_module.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in own:
            kept[_storage(tensor)] = tensor
        return tensor

    with FuseAttention(), RecordOperations(amp) as recorded:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = task.loss_without_values(objective, inputs, targets)
        loss.backward()
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return recorded, saved / 2 if amp else saved


_ALONE = Runtime(META, amp=False)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class _Measured:
    seconds: float | None = None
    images: int = 0
    memory: float | None = None
    notes: list[str] = field(default_factory=list)


def _measure(
    recipe: Recipe, task: Task, data: Any, runtime: Runtime, part: int, cost: _Cost, steps: int
) -> _Measured:
    """Train steps on random samples. Raises: UserError if they do not fit the GPU's memory."""
    on_gpu = runtime.device.type == "cuda"
    images = part if on_gpu else _affordable(part, cost)
    wanted = cost.state + cost.kept_a_sample * images
    free = _free_memory()
    if not on_gpu and free is not None and wanted > free:
        text = (
            f"no step was trained: it needs {wanted / GIB:.0f} GiB, and {free / GIB:.0f} are free"
        )
        return _Measured(notes=[text])
    run = _synthetic_run(recipe, task, data, runtime, images)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(runtime.device)
    try:
        seconds = _train_steps(run, steps)
        if not run.progress.recast:
            run.recast()
            seconds = _train_steps(run, steps)
    except torch.OutOfMemoryError:
        raise UserError(
            f"a step of {part:,} samples does not fit the GPU's memory; give `scale.accumulate`, "
            "or `scale.activation_checkpointing`"
        ) from None
    memory = None
    if on_gpu:
        memory = torch.cuda.max_memory_allocated(runtime.device) / GIB
    return _Measured(seconds / (images * runtime.world), images, memory)


def _affordable(part: int, cost: _Cost) -> int:
    """Return how many samples a CPU trains in seconds: an even number, so that they can be mixed."""
    count = int(CPU_STEP / max(cost.work_a_sample, 1))
    return max(2, min(part, count) // 2 * 2)


def _free_memory() -> float | None:
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return None


def _synthetic_run(recipe: Recipe, task: Task, data: Any, runtime: Runtime, images: int) -> Run:
    """Return a run that trains on random samples, and writes nothing."""
    here = recipe.model.weights is not None and recipe.model.weights.is_file()
    own = recipe if here else _without_files(recipe)
    folder = Path(tempfile.gettempdir()) / f"isomorph-dry-run-{os.getpid()}"
    changes = {
        "data": own.data.model_copy(update={"batch_size": images * runtime.world, "workers": 0}),
        "scale": own.scale.model_copy(update={"accumulate": 1}),
        "out": folder,
    }
    synthetic: Any = SyntheticTask(task, data)
    return Run(own.model_copy(update=changes), runtime, synthetic)


def _train_steps(run: Run, steps: int) -> float:
    """Train steps, and return the seconds of the last one."""
    run.loss_module.train()
    seconds = 0.0
    for _ in range(steps):
        begin = time.perf_counter()
        train_step(run)
        run.progress.step += 1
        loss = run.total[0].item()  # waits for the device
        seconds = time.perf_counter() - begin
        if not math.isfinite(loss):
            raise UserError("the loss of a step on random samples is not finite; lower optim.lr")
    return seconds
