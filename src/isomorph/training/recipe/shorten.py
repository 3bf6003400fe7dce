"""Shorten the schedules of a recipe in proportion when it is run for fewer epochs or steps than it was written for."""

from collections.abc import Sequence
from typing import Any, TypeGuard

from isomorph.training.recipe.overrides import apply_overrides
from isomorph.training.recipe.recipe import Recipe, validate

FRACTIONAL = {"epochs": ("optim.warmup_epochs", "anneal.epochs", "optim.milestones"), "iterations": ()}
"""Schedules in epochs or parts of them; there are none in parts of a step."""
WHOLE = {
    "epochs": {"model.recast_epoch": 0, "evaluate_every": 1, "keep_every": 1},
    "iterations": {"optim.warmup_iterations": 1, "optim.milestones": 1, "evaluate_every": 1, "keep_every": 1},
}
"""Schedules in whole epochs or steps, and the smallest value of each."""


def override_recipe(values: dict[str, Any], assignments: list[str]) -> Recipe:
    """Return a recipe from its values and assignments `field=value`, with schedules shortened for fewer epochs.

    Raises: UserError for an assignment without `=`, or, with all problems in one line, for invalid fields.
    """
    changed = apply_overrides(values, assignments)
    given = [assignment.partition("=")[0].replace("-", "_") for assignment in assignments]
    unit = "iterations" if values.get("iterations") else "epochs"
    usual = values.get(unit, Recipe.model_fields[unit].default)
    shortened = shorten_schedules(changed, usual, given, unit)
    return validate(changed).with_note(shortened)


def shorten_schedules(values: dict[str, Any], usual: int, given: Sequence[str], unit: str = "epochs") -> str:
    """Scale the schedules in a recipe's values by epochs / usual, if that is below 1; return what was changed.

    `usual` is the number of epochs before the overrides, and `given` are the fields that overrides set: they stay as
    they are. With `unit` iterations, steps take the place of epochs. Values of wrong types stay too; validation reports
    them.
    """
    length = values.get(unit)
    if not _is_number(length) or not _is_number(usual) or not 0 < length < usual:
        return ""
    changes = []
    for field in (*FRACTIONAL[unit], *WHOLE[unit]):
        *groups, name = field.split(".")
        group: Any = values
        for each in groups:
            group = group.get(each) if isinstance(group, dict) else None
        old: Any = group.get(name) if isinstance(group, dict) else None
        if not _is_schedule(old) or any(f"{field}.".startswith(f"{other}.") for other in given):
            continue
        least = WHOLE[unit].get(field)
        scaled = [_scale(each, length / usual, least) for each in (old if isinstance(old, list) else [old])]
        group[name] = scaled if isinstance(old, list) else scaled[0]
        if group[name] != old:
            changes.append(f"{field} {_text(old)} -> {_text(group[name])}")
    return f"{length} of {usual} {unit}, so {', '.join(changes)}" if changes else ""


def _scale(old: float, factor: float, least: int | None) -> float:
    """Return a scaled length: a whole number of at least `least`, or a fraction where that is None."""
    new = float(f"{old * factor:.4g}")
    return new if least is None else max(least, round(new))


def _text(value: Any) -> str:
    """Return a length, or several, for a message."""
    return ", ".join(f"{each:g}" for each in value) if isinstance(value, list) else f"{value:g}"


def _is_schedule(value: Any) -> bool:
    """Return True for a number, or a list of numbers."""
    return all(map(_is_number, value)) if isinstance(value, list) else _is_number(value)


def _is_number(value: Any) -> TypeGuard[float]:
    """Return True for an int or float that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
