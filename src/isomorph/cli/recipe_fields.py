"""A quick check of the recipe fields on a command line, before torch is imported for the thorough one."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from isomorph.cli.option_names import recipe_fields
from isomorph.cli.sizes import SIZE_FIELDS, parse_size
from isomorph.cli.tables import tables
from isomorph.errors import UserError

_OWN_CHECKS = ("model.recast.", "task.")
"""Groups whose fields may come from other packages: those of rules and of tasks."""

_BOUNDS = {
    "minimum": ("greater than or equal to", float.__ge__),
    "exclusiveMinimum": ("greater than", float.__gt__),
    "maximum": ("less than or equal to", float.__le__),
    "exclusiveMaximum": ("less than", float.__lt__),
}
"""Names of bounds in a JSON schema: how a message words them, and the comparison that must hold."""


def rewrite_size(assignment: str) -> str:
    """Return an assignment to a size field with the size as a list: data.size=96x128 -> data.size=[96, 128]."""
    name, _, value = assignment.partition("=")
    if name not in SIZE_FIELDS or value in ("null", "~", ""):
        return assignment
    return f"{name}={list(parse_size(f'--{name}', value))}"


def check_fields(assignments: Sequence[str]) -> None:
    """Check that the fields of assignments `field=value` exist, and that their values have the right type and size.

    Only what is wrong in any recipe is found here; the recipe checks the rest.

    Raises: UserError with all problems.
    """
    known = recipe_fields()
    problems = []
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        name = name.replace("-", "_")
        if not _is_known(name, known):
            problems.append(_unknown_field(name, known))
        elif allowed := _violated(value.strip(), tables()["recipe_values"].get(name, {})):
            problems.append(f"--{name}: input should be {allowed} (given {value[:80]})")
    if problems:
        raise UserError(f"the recipe has {len(problems)} problem{'s' * (len(problems) > 1)}: {'; '.join(problems)}")


def _is_known(name: str, known: Sequence[str]) -> bool:
    """Return True for a field, a group of fields, an entry of a field of several, or a field of a rule or a task."""
    return name.startswith(_OWN_CHECKS) or any(
        name == field or field.startswith(f"{name}.") or name.startswith(f"{field}.") for field in known
    )


def _unknown_field(name: str, known: Sequence[str]) -> str:
    """Return the message for an unknown field."""
    group = name.rpartition(".")[0]
    siblings = [field for field in known if field.rpartition(".")[0] == group] or list(known)
    close = difflib.get_close_matches(name, siblings, n=1) or difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean --{close[0]}?" if close else f"fields: {', '.join(siblings)}"
    return f"--{name} is not a field ({hint})"


def _violated(text: str, allowed: Mapping[str, Any]) -> str | None:
    """Return what a value should be, or None if it may be right; `allowed` is a JSON schema of a number or a choice."""
    if not allowed or (allowed["null"] and text in ("null", "~", "")):
        return None
    if choices := allowed.get("enum"):
        return None if text.strip("'\"") in map(str, choices) else " or ".join(map(repr, choices))
    try:
        number = float(text.removesuffix("x"))  # `10x` is a multiple of another rate
    except ValueError:
        return f"a valid {allowed['type']}"
    if text.endswith("x"):
        return None
    if allowed["type"] == "integer" and not number.is_integer():
        return "a valid integer"
    for key, (words, holds) in _BOUNDS.items():
        if key in allowed and not holds(number, float(allowed[key])):
            return f"{words} {allowed[key]:g}"
    return None
