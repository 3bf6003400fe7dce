"""Recipe fields of the task, which is image classification if there are none."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, field_validator, model_validator
from pydantic.fields import FieldInfo

from isomorph.data.formats.registry import SOURCES
from isomorph.data.streams.stream import STREAMS
from isomorph.errors import UserError
from isomorph.training.recipe.part import Part
from isomorph.training.task import TASKS, Task, find_task, open_task, task_names

if TYPE_CHECKING:
    from isomorph.training.recipe.recipe import Recipe


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
    def task(self) -> Task:
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


def check_task(recipe: "Recipe") -> None:
    """Raise ValueError for data or fields that the recipe's task does not take."""
    source = recipe.data.source
    if recipe.task is None:
        if source not in (*SOURCES, *STREAMS):
            raise ValueError(f"data.source {source} needs a task; give --task.name {' or '.join(task_names(source))}")
        return
    task, name = recipe.task.task, recipe.task.name
    if source not in task.sources:
        raise ValueError(f"data.source {source} is not for {name}; choose one of {', '.join(task.sources)}")
    for field in task.unused:
        if _is_changed(recipe, field):
            raise ValueError(f"{field} does not apply to {name}; leave it out")
    task.check_recipe(recipe)


def _is_changed(part: Part, field: str) -> bool:
    """True if a field such as `loss` or `data.size` differs from its default."""
    *groups, name = field.split(".")
    for group in groups:
        part = getattr(part, group)
    return getattr(part, name) != type(part).model_fields[name].get_default()
