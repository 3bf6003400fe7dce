"""What a task brings to the training loop, and the tasks by name.

One loop trains every task. A task opens the data, builds the network, deals batches, and has a loss, test metrics and
predictions of its own. A recipe names it (`task: {name: segmentation, ...}`); without a name it is image
classification (`Classification`).
"""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from isomorph.data.sampler import TrainSampler
from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import training_config
from isomorph.training.recipe.part import Part

if TYPE_CHECKING:
    from isomorph.training.objectives.objective import Objective
    from isomorph.training.recipe.recipe import Recipe

ENTRY_POINTS = "isomorph.tasks"
"""Group of the entry points by which other packages offer tasks."""

TASKS: dict[str, "str | type[Task]"] = {
    "detection": "isomorph.tasks.detection.task:Detection",
    "masked_lm": "isomorph.tasks.language.masked_lm:MaskedLM",
    "text_classification": "isomorph.tasks.language.classify:TextClassification",
    "diffusion": "isomorph.tasks.diffusion.task:Diffusion",
    "segmentation": "isomorph.tasks.segmentation.task:Segmentation",
}
"""Tasks by their names in recipes and checkpoints: a class, or `module:class` to import; `register_task` adds one."""


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
    size: tuple[int, int] | None = None
    max_images: int | None = None
    page: Path | None = None
    """File for a page with the predictions of single images, the worst first."""


class Prediction(NamedTuple):
    """The prediction of a model for one file.

    `rows` are what to print, with the same keys each, e.g. class and probability; `files` are what to write, an image
    or plain values for JSON, each under the ending of its file's name: {".png": picture, "-mask.png": mask}.
    """

    rows: list[dict[str, Any]]
    files: dict[str, Any]


class ImagesWithTruth(Protocol):
    """Images with their truth, as a task opens them to evaluate a model.

    `alter`, if it is not None, changes each image after it was read, given the name of its file.
    """

    alter: Callable[[Image.Image, str], Image.Image] | None

    @property
    def classes(self) -> Sequence[str]:
        """Return the names of the classes."""

    def __len__(self) -> int: ...

    def image(self, index: int) -> Image.Image:
        """Return an image in RGB, altered."""

    def file_name(self, index: int) -> str:
        """Return the name of an image's file."""

    def truth(self, index: int) -> list[np.ndarray]:
        """Return what the task compares predictions with."""


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
    unused: ClassVar[tuple[str, ...]] = ("augment", "loss", "distill", "token_labels", "map_similarity", "mask")
    """Recipe fields that do not apply to the task, or groups of fields: `loss`, `data.size`, `augment`."""
    printed: ClassVar[dict[str, str]] = {}
    """Metrics to print after each epoch, with their formats."""
    classifies: ClassVar[bool] = False
    """True if the models classify images: `isomorph evaluate` measures their accuracy."""
    corruption_metric: ClassVar[str] = ""
    """Metric of `evaluate_images`, in percent, for `isomorph robustness`; empty if the task has no such images."""

    def __init__(self, options: Part) -> None:
        self.options: Any = options

    def check_recipe(self, recipe: "Recipe") -> None:
        """Raise ValueError for fields that do not fit together; what is wrong with files is found by `open_data`."""

    def open_data(self, recipe: "Recipe") -> tuple[Any, Any]:
        """Open the data sets to train and to test on. Raises: UserError for anything wrong with them."""
        raise NotImplementedError

    def build_model(self, recipe: "Recipe", train: Any, recast_now: bool) -> nn.Module:
        """Build the network with its initial weights, and recast it if `recast_now`."""
        from isomorph.training.build import build_model

        return build_model(recipe.model, len(train.classes), recipe.drop_path, recast_now)

    def data_config(self, recipe: "Recipe", model: nn.Module) -> dict[str, Any]:
        """Return what the loaders need to know about the model's inputs: here input_size, mean, std, interpolation."""
        return training_config(model, recipe.data.size, {})

    def check_model(self, recipe: "Recipe", model: nn.Module, config: dict[str, Any]) -> None:
        """Raise UserError, before anything is written, if the model cannot process the data."""

    def attention_inputs(self, config: dict[str, Any]) -> torch.Tensor | None:
        """Return inputs of the right shape to try `monitor_every` on; None if attention cannot be monitored."""
        return torch.zeros(1, *config["input_size"]) if "input_size" in config else None

    def train_loader(
        self, recipe: "Recipe", config: dict[str, Any], train: Any, sampler: TrainSampler
    ) -> DataLoader[Any]:
        """Return the loader of this process's parts of every batch, from the sampler's first step to the last.

        It yields (inputs, targets, messages about unreadable samples). Inputs and targets are tensors, or lists, tuples
        and dictionaries of tensors. All random draws depend on the seeds that the sampler deals.
        """
        raise NotImplementedError

    def mix(self, recipe: "Recipe", model: nn.Module) -> Callable[[Any, Any], tuple[Any, Any]] | None:
        """Return what mixes the samples of a batch on the device: (inputs, targets) -> the same; None for nothing."""
        return None

    def test_loader(self, recipe: "Recipe", config: dict[str, Any], test: Any, runtime: Runtime) -> Iterable[Any]:
        """Return the batches of this process's share of the test data: samples rank, rank + world, ..."""
        raise NotImplementedError

    def objective(self, recipe: "Recipe", model: nn.Module, device: torch.device) -> "Objective":
        """Return the loss around the model, the test metrics and the score that decides which epoch is best."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, options: EvaluationOptions, runtime: Runtime) -> list[dict[str, Any]]:
        """Return rows of metrics of a trained model, for `isomorph evaluate` and `iso.evaluate`."""
        raise UserError(f"{type(self).__name__} has no evaluation of its own; see the metrics in the run's log.jsonl")

    def open_images(self, model: nn.Module, options: EvaluationOptions) -> ImagesWithTruth:
        """Return the images to evaluate a trained model on; for tasks with a `corruption_metric`."""
        raise NotImplementedError

    def evaluate_images(
        self, model: nn.Module, images: Any, options: EvaluationOptions, runtime: Runtime
    ) -> list[dict[str, Any]]:
        """Return rows of metrics on opened images, the first of all together; for tasks with a `corruption_metric`."""
        raise NotImplementedError

    def predict(self, model: nn.Module, path: Path) -> Prediction:
        """Return the prediction of a trained model for a file. Raises: UserError when it cannot be read."""
        raise UserError(f"{type(self).__name__} makes no predictions for a file")


def find_task(name: str) -> type[Task]:
    """Return the class of a task by its name. Raises: UserError for an unknown task."""
    if name not in TASKS:
        _register_installed_tasks()
    if name not in TASKS:
        close = get_close_matches(name, TASKS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(TASKS)}, or leave it out"
        raise UserError(f"{name!r} is not a task; {hint}")
    found = TASKS[name]
    if isinstance(found, str):
        module, _, kind = found.partition(":")
        found = getattr(import_module(module), kind)
    return found


def register_task(name: str, task: str | type[Task]) -> None:
    """Add a task, a class or `module:class`, to those that recipes and checkpoints know by name.

    An installed package offers a task with an entry point in the group `isomorph.tasks`.

    Raises: UserError if the name is taken.

    >>> class Relabelled(iso.training.Classification):
    ...     "Classification with a loss of its own."
    >>> iso.training.register_task("relabelled", Relabelled)
    >>> data = {"source": "digits", "size": [8, 8]}
    >>> recipe = iso.Recipe(model={"name": "cifar_resnet20"}, data=data, task={"name": "relabelled"})
    """
    if TASKS.get(name, task) != task:
        raise UserError(f"a task named {name} is registered already; choose another name")
    TASKS[name] = task


def _register_installed_tasks() -> None:
    """Register the tasks that installed packages offer."""
    for entry in entry_points(group=ENTRY_POINTS):
        register_task(entry.name, entry.value)


def open_task(name: str, options: dict[str, Any]) -> Task:
    """Return a task with its options. Raises: UserError for an unknown task, pydantic.ValidationError for options."""
    task = find_task(name)
    return task(task.fields.model_validate(options))


def task_of(model: nn.Module) -> Task | None:
    """Return the task that evaluates a model, as its checkpoint recorded it; None for an image classifier.

    A model of a task derived from `Classification` is one too, unless the task has an `evaluate` of its own.
    """
    task = recorded_task(model)
    if task and task.classifies and type(task).evaluate is Task.evaluate:
        return None
    return task


def task_record(model: nn.Module) -> dict[str, Any]:
    """Return name and options of the task that a model's checkpoint recorded; empty if the recipe named none."""
    return (getattr(model, "pretrained_cfg", None) or {}).get("task") or {}


def recorded_task(model: nn.Module) -> Task | None:
    """Return the task that a model was trained for, as its checkpoint recorded it; None if the recipe named none."""
    recorded = task_record(model)
    if not recorded:
        return None
    options = {name: value for name, value in recorded.items() if name != "name"}
    try:
        return open_task(recorded["name"], options)
    except ValueError as error:
        raise UserError(f"the model's checkpoint names a task with options that it does not have: {error}") from None


def task_names(source: str) -> Sequence[str]:
    """Return the names of the tasks that take a data source."""
    return [name for name in TASKS if source in find_task(name).sources]
