"""Assignments `field=value` to the fields of recipes, and schedules for a shorter run."""

import copy
import math
from collections.abc import Sequence
from typing import Any

from isomorph.errors import UserError
from isomorph.json_values import is_number
from isomorph.lab.training.recipe.fields import DataPart, Fields
from isomorph.lab.training.recipe.recipe import Recipe, validate
from isomorph.yaml_values import parse_value

# Fields that become shorter with a run, and the smallest value of those that are whole numbers.
SCHEDULES: dict[str, int | None] = {
    "optim.warmup_epochs": None,
    "optim.warmup_iterations": 1,
    "optim.milestones": None,
    "anneal.epochs": None,
    "augment.small_epochs": None,
    "model.recast_epoch": None,
    "evaluate_every": 1,
    "keep_every": 1,
}

# Fields whose values on a command line are taken as they are: a folder named 2024_01_31 is not a number.
TEXTS = (
    "name",
    "out",
    "data.root",
    "model.weights",
    "distill.teacher",
    "distill.weights",
    "mask.teacher",
    "token_labels.maps",
    "task.teacher",
    "task.teacher_weights",
    "task.tokenizer",
    "task.train",
    "task.train_images",
    "task.test",
    "task.test_images",
)


def override_recipe(values: Fields, assignments: list[str]) -> Recipe:
    """Return a recipe from its values and assignments `field=value`, with schedules shortened for fewer epochs.

    Raises: UserError for an assignment without `=`, for epochs where iterations are the length, or, with all problems
        in one line, for invalid fields.
    """
    changed = apply_overrides(values, assignments)
    given = [assignment.partition("=")[0].replace("-", "_") for assignment in assignments]
    iterations = values.get("iterations")
    if iterations and "epochs" in given and "iterations" not in given:
        raise UserError(
            f"the length of this recipe is {iterations} iterations, so epochs={changed['epochs']} has no effect; give "
            "iterations=NUMBER, or iterations=null as well"
        )
    unit = "iterations" if iterations else "epochs"
    usual = values.get(unit, Recipe.model_fields[unit].default)
    shortened = shorten_schedules(changed, usual, given, unit)
    recipe = validate(changed)
    recipe._shortened = shortened
    return recipe


def apply_overrides(values: Fields, assignments: list[str]) -> Fields:
    """Return values with assignments `group.field=value` applied, the value as YAML; `data=FOLDER` keeps its group.

    Raises: UserError for an assignment without `=`, to a field of something that is not a group, or a missing folder.
    """
    result = copy.deepcopy(values)
    if isinstance(result.get("data"), str):  # the name of a source, or a folder
        result["data"] = DataPart.named(result["data"])
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise UserError(
                f"override {assignment!r} must have the form field=value, like optim.lr=1e-4"
            )
        path = path.replace("-", "_")
        *groups, last = path.split(".")
        group = result
        for name in groups:
            if group.get(name) is None:
                group[name] = {}
            group = group[name]
            if not isinstance(group, dict):
                raise UserError(f"override {assignment!r}: {name} is not a group of fields")
        value = parse_value(text)
        if path in TEXTS and value is not None:
            value = text
        old = group.get(last, {})
        is_name = value is not None and not isinstance(value, dict | list)
        if path == "data" and is_name and isinstance(old, dict):
            value = old | DataPart.named(text)
        group[last] = value
    return result


def shorten_schedules(
    values: Fields, usual: int, given: Sequence[str], unit: str = "epochs"
) -> str:
    """Scale the schedules in a recipe's values by epochs / usual, if that is below 1; return what was changed.

    `usual` is the number of epochs (or of another `unit`) before the overrides; those `given`, and values of wrong
    types, stay as they are.
    """
    length = values.get(unit)
    if not is_number(length) or not is_number(usual) or not 0 < length < usual:
        return ""
    changes = []
    for field, least in SCHEDULES.items():
        place, _, name = field.rpartition(".")
        group: Any = values.get(place) if place else values
        value = group.get(name) if isinstance(group, dict) else None
        old: list[Any] = value if isinstance(value, list) else [value]
        is_given = any(f"{field}.".startswith(f"{other}.") for other in given)
        if is_given or not all(map(is_number, old)):
            continue
        scaled = [float(f"{span * length / usual:.4g}") for span in old]
        if field == "model.recast_epoch":
            new = [_shortened_recast(old[0], usual, length)]
        else:
            new = sorted({_rounded(span, least) for span in scaled})
        group[name] = new if isinstance(value, list) else new[0]
        if new != old:
            changes.append(f"{field} {_listed(old)} -> {_listed(new)}")
    if changes:
        return f"{length} of {usual} {unit}, so {', '.join(changes)}"
    return ""


def _shortened_recast(epoch: float, usual: float, length: float) -> float:
    """Return the epoch of a recast in a run of `length` instead of `usual` epochs.

    A recast at the start stays there, one at the end too, which is none; any other stays between them. It is rounded
    down, so that an anneal after it still fits.
    """
    if epoch <= 0:
        return 0
    if epoch >= usual:
        return length
    middle = max(1, math.floor(epoch * length / usual))
    return min(middle, length - 1)


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(map("{:g}".format, numbers))


def _rounded(value: float, least: int | None) -> float:
    if least is None:
        return value
    return max(least, round(value))
