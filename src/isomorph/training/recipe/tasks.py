"""The tasks that a recipe can name, and its group of fields `task`; without it a recipe is of image classification."""

from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol

from pydantic import ConfigDict, field_validator, model_validator
from pydantic.fields import FieldInfo

from isomorph.errors import UserError
from isomorph.training.recipe.part import Part

ENTRY_POINTS = "isomorph.tasks"
"""Group of the entry points by which other packages offer tasks."""


class RecipeTask(Protocol):
    """What a recipe needs to know about a task; `isomorph.training.Task` has it all."""

    fields: ClassVar[type[Part]]
    """The fields of the recipe's group `task`, besides its name."""
    sources: ClassVar[tuple[str, ...]]
    """Values of data.source that the task takes."""
    unused: ClassVar[tuple[str, ...]]
    """Recipe fields, or groups of fields, that do not apply to the task."""

    def __init__(self, options: Part) -> None: ...

    def check_recipe(self, recipe: Any) -> None:
        """Raise ValueError for fields of a recipe that do not fit together."""


TASKS: dict[str, str | type[RecipeTask]] = {
    "detection": "isomorph.tasks.detection.task:Detection",
    "masked_lm": "isomorph.tasks.language.masked_lm:MaskedLM",
    "text_classification": "isomorph.tasks.language.classify:TextClassification",
    "diffusion": "isomorph.tasks.diffusion.task:Diffusion",
    "segmentation": "isomorph.tasks.segmentation.task:Segmentation",
}
"""Tasks by their names in recipes and checkpoints: a class, or `module:class` to import; `register_task` adds one."""


def find_task(name: str) -> type[RecipeTask]:
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


def register_task(name: str, task: str | type[RecipeTask]) -> None:
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
    for entry in entry_points(group=ENTRY_POINTS):
        register_task(entry.name, entry.value)


def open_task(name: str, options: dict[str, Any]) -> RecipeTask:
    """Return a task with its options. Raises: UserError for an unknown task, pydantic.ValidationError for options."""
    task = find_task(name)
    return task(task.fields.model_validate(options))


def task_names(source: str) -> list[str]:
    """Return the names of the tasks that take a data source."""
    return [name for name in TASKS if source in find_task(name).sources]


def _named_fields(values: Any) -> type[Part] | None:
    """Return the fields of the task that the values of a recipe's group name; None for no task, or an unknown one."""
    name = values.get("name") if isinstance(values, dict) else None
    try:
        return find_task(name).fields if isinstance(name, str) else None
    except UserError:
        return None


class TaskPart(Part):
    """Task to train for, other than image classification; its fields follow."""

    model_config = ConfigDict(extra="allow")

    name: str
    """Name of the task, e.g. segmentation."""

    @field_validator("name")
    @classmethod
    def check_name(cls, name: str) -> str:
        try:
            find_task(name)
        except UserError as error:
            raise ValueError(str(error)) from None
        return name

    @model_validator(mode="before")
    @classmethod
    def check_own_fields(cls, values: Any) -> Any:
        """Check the fields of the named task, and add its defaults."""
        part = _named_fields(values)
        if part is None:
            return values
        given = {name: value for name, value in values.items() if name != "name"}
        return {"name": values["name"], **part.model_validate(given).model_dump()}

    @cached_property
    def task(self) -> RecipeTask:
        """The task with its options."""
        return open_task(self.name, self.model_extra or {})

    @classmethod
    def documented_fields(cls, values: Any = None) -> dict[str, FieldInfo]:
        """Return the name, and the fields of the task that the values name, or of all tasks.

        The description of a field that several tasks have is each one's.
        """
        if part := _named_fields(values):
            return cls.model_fields | part.model_fields
        found: dict[str, FieldInfo] = dict(cls.model_fields)
        for task in TASKS:
            for name, field in find_task(task).fields.model_fields.items():
                text = f"{task}: {field.description}"
                default = field.get_default(call_default_factory=True)
                described = f"{found[name].description} {text}" if name in found else text
                found[name] = FieldInfo(annotation=Any, default=default, description=described)
        return found
