"""Shorten the schedules of a recipe in proportion when it is run for fewer epochs than it was written for."""

from collections.abc import Sequence
from typing import Any, TypeGuard

from isomorph.training.recipe.recipe import Recipe, apply_overrides, validate

FRACTIONAL = ("optim.warmup_epochs", "anneal.epochs")
"""Schedules in epochs or parts of them."""
WHOLE = {"model.recast_epoch": 0, "evaluate_every": 1, "keep_every": 1}
"""Schedules in whole epochs, and the smallest value of each."""


def override_recipe(values: dict[str, Any], assignments: list[str]) -> Recipe:
    """Return a recipe from its values and assignments `field=value`, with schedules shortened for fewer epochs.

    Raises: UserError for an assignment without `=`, or, with all problems in one line, for invalid fields.
    """
    changed = apply_overrides(values, assignments)
    given = [assignment.partition("=")[0].replace("-", "_") for assignment in assignments]
    shortened = shorten_schedules(changed, values.get("epochs", Recipe.model_fields["epochs"].default), given)
    return validate(changed).with_note(shortened)


def shorten_schedules(values: dict[str, Any], usual: int, given: Sequence[str]) -> str:
    """Scale the schedules in a recipe's values by epochs / usual, if that is below 1; return what was changed.

    `usual` is the number of epochs before the overrides, and `given` are the fields that overrides set: they stay as
    they are. Values of wrong types stay too; validation reports them.
    """
    epochs = values.get("epochs")
    if not _is_number(epochs) or not _is_number(usual) or not 0 < epochs < usual:
        return ""
    changes = []
    for field in (*FRACTIONAL, *WHOLE):
        *groups, name = field.split(".")
        group: Any = values
        for each in groups:
            group = group.get(each) if isinstance(group, dict) else None
        old = group.get(name) if isinstance(group, dict) else None
        if not _is_number(old) or any(f"{field}.".startswith(f"{other}.") for other in given):
            continue
        new = float(f"{old * epochs / usual:.4g}")
        group[name] = new if field in FRACTIONAL else max(WHOLE[field], round(new))
        if group[name] != old:
            changes.append(f"{field} {old:g} -> {group[name]:g}")
    return f"{epochs} of {usual} epochs, so {', '.join(changes)}" if changes else ""


def _is_number(value: Any) -> TypeGuard[float]:
    """Return True for an int or float that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
