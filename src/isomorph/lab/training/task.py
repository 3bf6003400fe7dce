"""What a task brings to the training loop, and the task that a checkpoint recorded.

One loop trains every task; a recipe names it (`task: {name: segmentation, ...}`), or it is image classification.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from timm.task import TrainingTask
from torch import nn
from torch.utils.data import DataLoader

from isomorph.errors import UserError
from isomorph.lab.data.loaders import ImageConfig
from isomorph.lab.data.sampler import TrainSampler
from isomorph.lab.distributed import Runtime
from isomorph.lab.training.build import build_model
from isomorph.lab.training.dry_run.synthetic import (
    SyntheticData,
    random_images,
    random_labels,
    synthetic_data,
)
from isomorph.lab.training.recipe.fields import Part
from isomorph.lab.training.recipe.recipe import Recipe, check_part
from isomorph.lab.training.recipe.tasks import find_task
from isomorph.models.input_sizes import training_config
from isomorph.models.masked_autoencoder import MaskedAutoencoder
from isomorph.spec import ImageSize, spec_of
from isomorph.terminal_tables import Metrics, Rows


class EvaluationOptions(NamedTuple):
    """How to evaluate a trained model: the options of `isomorph evaluate`.

    >>> iso.training.EvaluationOptions(data="digits").batch_size
    100
    """

    data: str | None = None
    """Name of a data source or a folder; None for what the model was trained on."""
    root: Path | None = None
    batch_size: int = 100
    workers: int = 0
    size: ImageSize | None = None
    max_images: int | None = None


class Prediction(NamedTuple):
    """The prediction of a model for one file.

    `rows` are what to print, with the same keys each, e.g. class and probability; `files` are what to write, an image
    or plain values for JSON, each under the ending of its file's name: {".png": picture, "-mask.png": mask}.
    """

    rows: Rows
    files: dict[str, Any]


# Mixes the samples of a batch, inputs and targets.
Mix = Callable[[Any, Any], tuple[Any, Any]]
# What a loss module returns by name: `loss`, its parts, and the `output` of the model where its accuracy is counted.
Losses = dict[str, torch.Tensor]
Measure = Callable[[nn.Module, Iterable[Any], Runtime], dict[str, float]]


@dataclass(frozen=True)
class Objective:
    """The loss of a run, the metrics of its trained module, and the model to save.

    >>> loss = timm.task.ClassificationTask(timm.create_model("cifar_resnet20"), torch.nn.CrossEntropyLoss())
    >>> objective = iso.training.Objective(loss, lambda model, loader, runtime: {"top1": 10.0}, lambda m: m["top1"])
    >>> objective.score({"top1": 10.0})
    10.0
    """

    loss_module: TrainingTask
    """The loss, with the modules that it trains."""
    measure: Measure
    """Computes the test metrics, over all processes."""
    score: Callable[[Metrics], float]
    """Turns metrics into the number that is highest for the best epoch."""
    result: Callable[[nn.Module], nn.Module] = lambda trained: trained
    """Returns the model to evaluate and save, given the trained module."""
    accuracy: Callable[[Any, Any], torch.Tensor] | None = None
    """Returns the share of training samples classified as labelled, given the loss's output and its `target`, or the
    targets of the batch."""
    autoencoder: Callable[[nn.Module], MaskedAutoencoder] | None = None
    """Returns the autoencoder, which pre-training saves too, given the trained module."""


class Task:
    """What a task brings to the training loop; a subclass for each task.

    `options` are the fields of the recipe's group `task`, checked. A data set that `open_data` returns has a length and
    `classes` (names, or an empty tuple); everything else about it is between the task and its loaders.

    >>> iso.training.Task.unused
    ('augment', 'loss', 'distill', 'token_labels', 'map_similarity', 'mask')
    """

    fields: ClassVar[type[Part]] = Part
    """The fields of the recipe's group `task`, besides its name."""
    sources: ClassVar[tuple[str, ...]] = ()
    """Values of data.source that the task takes."""
    unused: ClassVar[tuple[str, ...]] = (
        "augment",
        "loss",
        "distill",
        "token_labels",
        "map_similarity",
        "mask",
    )
    """Recipe fields that do not apply to the task, or groups of fields: `loss`, `data.size`, `augment`."""
    printed: ClassVar[dict[str, str]] = {}
    """Metrics to print after each epoch, with their formats."""
    classifies: ClassVar[bool] = False
    """True if the models classify images: `isomorph evaluate` measures their accuracy."""

    recorded: bool = False
    """True for the task that a checkpoint names, whose options may come from anyone: it fetches nothing by them."""

    rehearses: bool = False
    """True in a dry run: teachers that are not there have random weights, and nothing is fetched."""

    def __init__(self, options: Part) -> None:
        self.options: Any = options

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise ValueError for fields that do not fit together; what is wrong with files is found by `open_data`."""

    def open_data(self, recipe: Recipe) -> tuple[Any, Any]:
        """Open the data sets to train and to test on. Raises: UserError for anything wrong with them."""
        raise NotImplementedError

    def build_model(self, recipe: Recipe, train: Any, recast_now: bool) -> nn.Module:
        """Build the network with its initial weights, and recast it if `recast_now`."""
        return build_model(recipe.model, len(train.classes), recipe.drop_path, recast_now)

    def data_config(self, recipe: Recipe, model: nn.Module) -> ImageConfig:
        """Return what the loaders need to know about the model's inputs: here input_size, mean, std, interpolation."""
        return training_config(model, recipe.data.size, {})

    def check_model(self, recipe: Recipe, model: nn.Module, config: ImageConfig) -> None:
        """Raise UserError, before anything is written, if the model cannot process the data."""

    def attention_inputs(self, config: ImageConfig) -> torch.Tensor | None:
        """Return inputs of the right shape to try `monitor_every` on; None if attention cannot be monitored."""
        if "input_size" in config:
            return torch.zeros(1, *config["input_size"])
        return None

    def train_loader(
        self, recipe: Recipe, config: ImageConfig, train: Any, sampler: TrainSampler
    ) -> DataLoader[Any]:
        """Return the loader of this process's parts of batches: (inputs, targets, messages about unreadable samples).

        Inputs and targets are tensors, or lists, tuples and dictionaries of them. Draws depend on the sampler's seeds.
        """
        raise NotImplementedError

    def mix(self, recipe: Recipe, model: nn.Module) -> Mix | None:
        """Return what mixes the samples of a batch on the device: (inputs, targets) -> the same; None for nothing."""
        return None

    def test_loader(
        self, recipe: Recipe, config: ImageConfig, test: Any, runtime: Runtime
    ) -> Iterable[Any]:
        """Return the batches of this process's share of the test data: samples rank, rank + world, ..."""
        raise NotImplementedError

    def objective(self, recipe: Recipe, model: nn.Module, device: torch.device) -> Objective:
        """Return the loss around the model, the test metrics and the score that decides which epoch is best."""
        raise NotImplementedError

    def synthetic_data(self, recipe: Recipe) -> SyntheticData:
        """Return what stands for the training data in a dry run: its published size and its number of classes."""
        return synthetic_data(recipe)

    def synthetic_batch(
        self,
        recipe: Recipe,
        model: nn.Module,
        config: ImageConfig,
        samples: int,
        device: torch.device,
    ) -> tuple[Any, Any]:
        """Return random inputs and targets for a dry run, of the types and shapes that `train_loader` yields."""
        labels = random_labels(getattr(model, "num_classes", 0), samples, device)
        return random_images(config, samples, device), labels

    def loss_without_values(self, objective: Objective, inputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss of a batch on the meta device, which has shapes only; for a dry run."""
        return objective.loss_module(inputs, targets)["loss"]

    def evaluate(self, model: nn.Module, options: EvaluationOptions, runtime: Runtime) -> Rows:
        """Return rows of metrics of a trained model, for `isomorph evaluate` and `iso.evaluate`."""
        raise UserError(
            f"{type(self).__name__} has no evaluation of its own; see the metrics in the run's log.jsonl"
        )

    def predict(self, model: nn.Module, path: Path) -> Prediction:
        """Return the prediction of a trained model for a file. Raises: UserError when it cannot be read."""
        raise UserError(f"{type(self).__name__} makes no predictions for a file")


def task_of(model: nn.Module) -> Task | None:
    """Return the task that evaluates a model, as its checkpoint recorded it; None for an image classifier.

    A model of a task derived from `Classification` is one too, unless the task has an `evaluate` of its own.
    """
    task = recorded_task(model)
    if task and task.classifies and type(task).evaluate is Task.evaluate:
        return None
    return task


def recorded_task(model: nn.Module) -> Task | None:
    """Return the task that a model was trained for, as its checkpoint recorded it; None if the recipe named none."""
    recorded = spec_of(model).task
    if not recorded:
        return None
    options = {name: value for name, value in recorded.items() if name != "name"}
    try:
        task_class: Any = find_task(recorded.get("name"))
        task = cast(Task, task_class(check_part(task_class.fields, "its task", options)))
    except UserError as error:
        raise UserError(f"the checkpoint names a task that isomorph cannot open: {error}") from None
    task.recorded = True
    return task
