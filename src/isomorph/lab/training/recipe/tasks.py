"""The tasks that a recipe can name; without a name it is of image classification."""

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from isomorph.errors import UserError, did_you_mean

ENTRY_POINTS = "isomorph.tasks"

# Tasks by their names in recipes and checkpoints: a class, or `module:class` to import; `register_task` adds one.
TASKS: dict[str, str | type] = {
    "detection": "isomorph.lab.tasks.detection.task:Detection",
    "masked_lm": "isomorph.lab.tasks.language.masked_lm:MaskedLM",
    "text_classification": "isomorph.lab.tasks.language.glue:TextClassification",
    "diffusion": "isomorph.lab.tasks.diffusion.task:Diffusion",
    "segmentation": "isomorph.lab.tasks.segmentation.task:Segmentation",
}


def find_task(name: Any) -> Any:
    """Return the class of a task (a `training.Task`) by its name. Raises: UserError for an unknown task."""
    if not isinstance(name, str):
        raise UserError(f"{str(name)[:60]} is not the name of a task")
    if name not in TASKS:
        for entry in entry_points(group=ENTRY_POINTS):
            register_task(entry.name, entry.value)
    if name not in TASKS:
        hint = did_you_mean(name, TASKS, f"choose one of {', '.join(TASKS)}, or leave it out")
        raise UserError(f"{name!r} is not a task; {hint}")
    task = TASKS[name]
    if isinstance(task, str):
        module, _, class_name = task.partition(":")
        return getattr(import_module(module), class_name)
    return task


def register_task(name: str, task: str | type) -> None:
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


def task_names(source: str) -> list[str]:
    return [name for name in TASKS if source in find_task(name).sources]
