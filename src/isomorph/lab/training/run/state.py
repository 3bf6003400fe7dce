"""A run: built from its recipe, restored from its newest snapshot, recast in the middle, evaluated and saved."""

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from timm.task import TrainingTask
from timm.utils import unwrap_model
from torch import Tensor, nn

from isomorph.analysis import logit_stats
from isomorph.analysis.cost import has_pyramids
from isomorph.checkpoints.autoencoder import save_autoencoder
from isomorph.checkpoints.files import read_contents
from isomorph.checkpoints.model import describe_model, record_data, write_model
from isomorph.checkpoints.named_state import (
    AVERAGED_PREFIX,
    GROUP_PREFIX,
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    allocate_tensor,
    load_optimizer,
    model_tensors,
    owner_name,
    split_optimizer,
)
from isomorph.checkpoints.open import load, local_file
from isomorph.checkpoints.snapshot import (
    DamagedSnapshot,
    IntactSnapshot,
    RunProgress,
    newest_snapshot,
    read_layout,
    read_tensors_into,
    write_snapshot,
)
from isomorph.distributed import Runtime, open_runtime, seed_everything
from isomorph.errors import UserError
from isomorph.lab.data.sampler import TrainSampler
from isomorph.lab.data.streams import workers_of_part
from isomorph.lab.training.build import apply_surgery, plan_batches
from isomorph.lab.training.classification import recipe_task
from isomorph.lab.training.optim import build_optimizer, build_scheduler
from isomorph.lab.training.parallel import distribute, gathered_state_dict, prepare_model
from isomorph.lab.training.recipe.recipe import Recipe, changed_fields, identity_json
from isomorph.lab.training.task import Task
from isomorph.models.input_sizes import class_count, shorten
from isomorph.surgery import notes
from isomorph.surgery.anneal import annealed_layers
from isomorph.surgery.recast import check_finite
from isomorph.surgery.rule import record

_TOTALS = "progress.totals"


class Run:
    """A run in memory, built from its recipe in stages that check what they take; nothing is written before.

    - recipe; runtime, by default the one that it asks for; task, by default the recipe's
    - found: the snapshot that it resumes from, or None; progress
    - train, test: the training data, and the batches of this process's test images; config: the images' size and norm
    - order, share: the order of the training images, and the parts of every batch that this process trains on
    - has_weights: whether it starts from weights: given, public, or those that its own function may load
    - objective, optimizer, scheduler; header: what rebuilds the model from a checkpoint; start: what its weights were
    - total: sums of loss and training accuracy over the steps of this epoch; batches: the training batches, once begun

    Raises: UserError when something is missing or does not fit, or the folder holds another run.
    """

    def __init__(self, recipe: Recipe, runtime: Runtime | None = None, task: Task | None = None) -> None:
        runtime = runtime or open_runtime(recipe.device, recipe.amp == "bf16")
        self.recipe = recipe
        self.runtime = runtime
        self.task = task or recipe_task(recipe)
        check_model_given(recipe)
        if not self.task.rehearses:
            check_files(recipe)
        self.found = runtime.on_main(lambda: find_snapshot(recipe))
        self.has_weights = bool(recipe.model.weights or recipe.model.pretrained or recipe.model.is_own)
        if not self.found and recipe.model.start == "weights" and not self.has_weights:
            raise UserError(
                f"{recipe.name} requires trained weights; give --model.weights FILE or --model.pretrained true "
                "(--model.start random starts from random weights)"
            )
        if self.found:
            values = self.found.values["progress"]
        else:
            values = {"recast": recipe.model.recast_epoch == 0}
        self.progress = RunProgress(**values)
        self.train, test = self.task.open_data(recipe)
        self.order, self.share = plan_batches(recipe, self.train, runtime)
        if (recipe.optim.warmup_iterations or 0) >= self.iterations:
            raise UserError(f"optim.warmup_iterations must be below the run's {self.iterations:,} steps; lower it")
        model = self._initialise_model()
        self.test: Iterable[Any] = self.task.test_loader(recipe, self.config, test, runtime)
        self._check_layers(model.to(runtime.device))
        self._assemble(model)
        self.start = record(model).start
        dtype = torch.float32 if runtime.device.type == "mps" else torch.float64  # which MPS does not have
        self.total = torch.zeros(2, device=runtime.device, dtype=dtype)
        self.batches: Iterator[Any] | None = None
        if self.found:
            self._restore(self.found)

    def _initialise_model(self) -> nn.Module:
        recipe = self.recipe
        task = self.task
        classes = list(self.train.classes)
        seed_everything("birth", recipe.seed)  # seeds derive from this word: another word is another initialisation
        model = task.build_model(recipe, self.train, self.progress.recast)
        if not self.progress.recast:
            apply_surgery(copy.deepcopy(model), recipe.model)  # raises, before the run starts, if it would fail later
        check_finite(model)
        if getattr(model, "num_classes", len(classes)) < len(classes):
            own = model.num_classes
            raise UserError(f"the data has {len(classes)} classes, but model.num_classes is {own}; leave it out")
        self.config = task.data_config(recipe, model)
        task.check_model(recipe, model, self.config)
        extra: dict[str, Any] = {} if recipe.data.streamed else {"split": getattr(self.train, "split", None)}
        extra |= {"task": recipe.task.model_dump(mode="json")} if recipe.task else {}
        record_data(model, {**self.config, "source": recipe.data.source, "label_names": classes, **extra})
        if recipe.model.is_own and (outputs := class_count(model)) != len(classes):
            raise UserError(
                f"{recipe.model.name} has {outputs} classes, the data has {len(classes)} ({shorten(classes)}); give the"
                " function's own argument for it as --model.kwargs.NAME VALUE"
            )
        return model

    def _check_layers(self, model: nn.Module) -> None:
        recipe = self.recipe
        if recipe.anneal and self.progress.recast:
            annealed_layers(model)
        if recipe.monitor_every:
            inputs = self.task.attention_inputs(self.config)
            if inputs is None:
                raise UserError("monitor_every is for models of images; leave it out")
            watched = model if self.progress.recast else apply_surgery(copy.deepcopy(model), recipe.model)
            if not has_pyramids(watched):  # whose branches are monitored in any model
                logit_stats(watched, inputs.to(self.runtime.device))

    def _assemble(self, model: nn.Module) -> None:
        recipe = self.recipe
        runtime = self.runtime
        self.header = describe_model(model)
        self.objective = self.task.objective(recipe, prepare_model(model, recipe.scale, runtime), runtime.device)
        if recipe.ema:
            sharded = recipe.scale.parallel == "fsdp"  # foreach cannot mix these parameters with plain buffers
            self.loss_module.setup_ema(decay=recipe.ema, foreach=not sharded)
        distribute(self.loss_module, recipe.scale, runtime)
        self.optimizer = build_optimizer(self.trained, recipe.optim)
        self.scheduler = build_scheduler(
            self.optimizer, recipe.optim, recipe.epochs, self.order.steps, recipe.iterations
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
        return min(self.order.steps, self.iterations - self.progress.closed * self.order.steps)

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
    def mix(self) -> Callable[[Any, Any], tuple[Any, Any]] | None:
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
        """Numbers of images, steps and classes per epoch; with others, a run cannot be resumed."""
        return {
            "images": self.order.images,
            "steps": self.order.steps,
            "classes": len(self.train.classes),
        }

    def mean_total(self, index: int) -> float:
        """Return a sum of `total`, the mean over all processes: 0 is the loss, 1 the training accuracy."""
        return self.runtime.mean(self.total[index])

    def next_part(self) -> Any:
        """Return the next part of a batch: inputs, targets, messages about unreadable samples."""
        if self.batches is None:  # the first since the run began or resumed: the loader starts at the next step
            sampler = TrainSampler(self.order, self.epochs, self.progress.step, self.share)
            self.batches = iter(self.task.train_loader(self.recipe, self.config, self.train, sampler))
        return next(self.batches)

    def measure(self) -> dict[str, float]:
        self._share_buffers()
        return self.objective.measure(self.averaged or self.trained, self.test, self.runtime)

    def _share_buffers(self) -> None:
        for module in filter(None, (self.trained, self.averaged)):
            self.runtime.broadcast_buffers(module)

    def note_unreadable(self, *messages: list[str]) -> None:
        self.progress.unreadable = list(dict.fromkeys(sum(messages, self.progress.unreadable)))

    def recast(self) -> str:
        """Recast the model in the middle of the run; return a message.

        Parameters whose name, shape and values are unchanged keep their optimiser state. Averaged weights are recast
        too, with the same random draws. Source: T-CNN section 5, Table 3
        """
        before: dict[str, Tensor] = dict(self.trained.named_parameters())
        tensors, values = split_optimizer(self.trained, self.optimizer)
        model = self._recast_copy(self.trained)
        averaged = self.averaged and self._recast_copy(self.averaged)
        parameters = dict(model.named_parameters())
        kept = {n for n, p in parameters.items() if n in before and torch.equal(before[n], p)}
        self._assemble(model)
        if averaged is not None:
            self.averaged.load_state_dict(averaged.state_dict())  # type: ignore[union-attr]
        owned = {n: t for n, t in tensors.items() if owner_name(n) in kept or owner_name(n).startswith(GROUP_PREFIX)}
        values["state"] = {name: value for name, value in values["state"].items() if name in kept}
        load_optimizer(self.trained, self.optimizer, owned, values)
        self.progress.recast = True
        counts = f"{len(kept)} parameter tensors are unchanged, {len(parameters) - len(kept)} are new"
        return "; ".join((f"recast after epoch {self.progress.closed}: {counts}", *notes(self.trained)))

    def _recast_copy(self, model: nn.Module) -> nn.Module:
        seed_everything("recast", self.recipe.seed)
        return apply_surgery(copy.deepcopy(model), self.recipe.model).train(model.training)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything that a snapshot stores: tensors by name, and plain values of the optimiser."""
        optimizer_tensors, values = split_optimizer(self.trained, self.optimizer)
        totals = torch.tensor([self.mean_total(0), self.mean_total(1)], dtype=torch.float64).to(self.total)
        tensors = model_tensors(self.trained, MODEL_PREFIX) | optimizer_tensors | {_TOTALS: totals}
        if self.averaged is not None:
            tensors |= model_tensors(self.averaged, AVERAGED_PREFIX)
        return tensors, values

    def snapshot(self) -> Path:
        self._share_buffers()
        tensors, values = self.tensors()
        state = {
            "optimizer": values,
            "recipe": json.loads(identity_json(self.recipe)),
            "progress": vars(self.progress),
            "lanes": self.lanes,
            "data": self.counts,
            "model": self.header,
        }
        return write_snapshot(self.recipe.folder, self.progress.step, tensors, state, self.runtime)

    def _restore(self, found: IntactSnapshot) -> None:
        classes = [json.loads(header["data"]).get("label_names", []) for header in (found.values["model"], self.header)]
        moved = [f"class {i} was {a}, is now {b}" for i, (a, b) in enumerate(zip(*classes, strict=False)) if a != b]
        differing = changed_fields(found.values["data"], self.counts) + moved[:1]
        if differing:
            raise UserError(
                f"{found.path} is of a run on other data ({'; '.join(differing)}); use the images it started with, or "
                "give `out` another folder"
            )
        if self.progress.step % self.order.steps and found.values["lanes"] != self.lanes:
            raise UserError(
                f"{found.path} is from within an epoch of a stream with {found.values['lanes']} lanes where this run "
                f"has {self.lanes}, and would skip images; use the same processes, scale.accumulate and data.workers, "
                "and the version of isomorph that wrote it"
            )
        tensors = self.tensors()[0]
        layout = read_layout(found.path)
        parameters = {name: parameter.detach() for name, parameter in self.trained.named_parameters()}
        for name, (shape, dtype) in layout.items():
            if name.startswith(OPTIMIZER_PREFIX):
                tensors[name] = allocate_tensor(name, shape, dtype, parameters)
        differing = sorted(tensors.keys() ^ layout.keys())
        differing += [name for name in tensors.keys() & layout.keys() if tensors[name].shape != layout[name][0]]
        if differing:
            names = ", ".join(differing[:3])
            raise UserError(f"{found.path} does not fit the model: {names}; give `out` another folder")
        read_tensors_into(found.path, tensors)
        self.total.copy_(tensors[_TOTALS])
        of_optimizer = {name: tensor for name, tensor in tensors.items() if name.startswith(OPTIMIZER_PREFIX)}
        load_optimizer(self.trained, self.optimizer, of_optimizer, found.values["optimizer"])

    def save(self, path: Path) -> None:
        """Write a checkpoint of the evaluated model. Every process must call it."""
        tensors = gathered_state_dict(self.eval_model)
        if self.runtime.is_main:
            write_model(self.header, tensors, path)

    def has_written(self, path: Path) -> bool:
        """Return True if this checkpoint exists with the current weights. Every process must call it."""
        tensors = gathered_state_dict(self.eval_model)
        same = False
        if self.runtime.is_main:
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
                save_autoencoder(model, self.recipe.folder / "autoencoder.safetensors", self.header, tensors)

    def result(self) -> nn.Module:
        """Return the evaluated model, unsharded, in eval mode."""
        if self.recipe.scale.parallel == "ddp":
            return self.eval_model.eval()
        self.runtime.maximum(0)  # wait until the leading process has written the file
        return load(self.recipe.folder / "model.safetensors")


def check_model_given(recipe: Recipe) -> None:
    """Raise UserError for a recipe without a model."""
    if recipe.model.name is None and recipe.model.weights is None:
        raise UserError(f"{recipe.name} has no model; give --model.weights FILE, or a timm model as --model.name NAME")


def check_files(recipe: Recipe) -> None:
    """Raise UserError for a file that does not exist; names the run that makes it, if known."""
    files = {"model.weights": recipe.model.weights and local_file(recipe.model.weights)}
    files |= {"mask.teacher": recipe.mask.teacher} if recipe.mask else {}
    files |= {"distill.weights": recipe.distill.weights} if recipe.distill else {}
    for field, path in files.items():
        if path and path.is_dir():
            raise UserError(f"{field}: {path} is a folder; give a checkpoint in it, like {path / 'model.safetensors'}")
        if path and not path.is_file():
            if path.parts[0] == "runs" and path.parts[1:]:
                run = path.parts[1]
            else:
                run = ""
            raise UserError(f"{field}: {path} does not exist" + f"; `isomorph train {run}` creates it" * bool(run))


def find_snapshot(recipe: Recipe) -> IntactSnapshot | None:
    """Return the newest complete snapshot in the recipe's folder, or None.

    Raises: UserError when the folder has a run of another recipe, or no readable snapshot.
    """
    folder = recipe.folder
    try:
        found = newest_snapshot(folder)
    except DamagedSnapshot as error:
        raise UserError(f"{error}; delete {folder} to start the run again") from None
    if not found:
        if (folder / "model.safetensors").is_file():
            raise UserError(f"{folder} has a run without a snapshot to resume from; give `out` another folder")
        return None
    old = dict(found.values["recipe"])
    new = json.loads(identity_json(recipe))
    if recipe.optim.schedule == "constant" and recipe.iterations is None and old.get("epochs", 0) < recipe.epochs:
        old["epochs"] = recipe.epochs  # at a constant rate, both runs are the same until then
    changed = changed_fields(old, new)
    if changed:
        start = f"model.weights={folder / 'model.safetensors'} starts from this run's weights"
        raise UserError(f"{folder} has another run ({'; '.join(changed)}); give `out` another folder ({start})")
    return found
