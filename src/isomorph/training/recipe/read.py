"""Read recipes: YAML and TOML files, assignments `field=value` to their fields, and schedules for a shorter run."""

import tomllib
import typing
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeGuard, Union

import yaml

from isomorph.errors import UserError
from isomorph.training.recipe.fields import DataPart, OptimPart
from isomorph.training.recipe.recipe import Recipe, fields_of, validate

MAX_CHARACTERS = 100_000
"""Most characters in a recipe."""
MAX_DEPTH = 32
"""Most levels of groups and lists."""
MAX_VALUES = 10_000
"""Most values, with YAML aliases counted each time they expand."""

FRACTIONAL = {"epochs": ("optim.warmup_epochs", "anneal.epochs", "optim.milestones"), "iterations": ()}
"""Schedules in epochs or parts of them; there are none in parts of a step."""
WHOLE = {
    "epochs": {"model.recast_epoch": 0, "evaluate_every": 1, "keep_every": 1},
    "iterations": {"optim.warmup_iterations": 1, "optim.milestones": 1, "evaluate_every": 1, "keep_every": 1},
}
"""Schedules in whole epochs or steps, and the smallest value of each."""


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the values of a YAML or TOML file. Raises: UserError when it is missing, unreadable or not a mapping."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
        values = _parse(text, tomllib.loads if path.suffix == ".toml" else _load_yaml)
    except FileNotFoundError:
        raise UserError(f"cannot read recipe {path}: there is no such file") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot read recipe {path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"recipe {path} must be a mapping of fields, like 'epochs: 10'")
    return values


def parse_value(text: str) -> Any:
    """Return a value on a command line: a number such as 1e-3, true, null or None, a list such as [96, 128], or text.

    Raises: UserError for too many values or levels.
    """
    try:
        value = _parse(text, _load_yaml)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError):  # a glob like *.conv2 is not YAML: it is text
        return text
    if not isinstance(value, str):
        return value
    try:
        return None if value == "None" else float(value)  # 1e-3 is text in YAML
    except ValueError:
        return value


def _parse(text: str, load: Callable[[str], Any]) -> Any:
    """Return what `load` reads from a text. Raises: UserError when it is too long or has too many levels."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"a recipe has at most {MAX_CHARACTERS:,} characters; this has more")
    try:
        return load(text)
    except RecursionError:
        raise UserError(f"a recipe has at most {MAX_DEPTH} levels of groups and lists; this has more") from None


def _load_yaml(text: str) -> Any:
    """Return the values of YAML text, after a check of the size of its expanded aliases.

    Raises: UserError for too many values or levels; YAMLError, ValueError for text that is not YAML.
    """
    root, count = yaml.compose(text, Loader=yaml.SafeLoader), 0
    pending = [(root, 1)] if root else []
    while pending:
        node, depth = pending.pop()
        count += 1
        if count > MAX_VALUES:
            raise UserError(f"a recipe has at most {MAX_VALUES:,} values, with aliases expanded; this has more")
        if depth > MAX_DEPTH:
            raise RecursionError
        if isinstance(node, yaml.MappingNode):
            pending += [(part, depth + 1) for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            pending += [(part, depth + 1) for part in node.value]
    return yaml.safe_load(text)


def override_recipe(values: dict[str, Any], assignments: list[str]) -> Recipe:
    """Return a recipe from its values and assignments `field=value`, with schedules shortened for fewer epochs.

    If the backbone of the network is another one, the recipe's arguments of its own are left out.

    Raises: UserError for an assignment without `=`, or, with all problems in one line, for invalid fields.
    """
    changed = apply_overrides(values, assignments)
    given = [assignment.partition("=")[0].replace("-", "_") for assignment in assignments]
    unit = "iterations" if values.get("iterations") else "epochs"
    moved = _warm_up_in_steps(changed, given) if unit == "epochs" else ""
    usual = values.get(unit, Recipe.model_fields[unit].default)
    shortened = shorten_schedules(changed, usual, given, unit)
    replaced = _leave_out_arguments(values, changed, given)
    return validate(changed).with_note("; ".join(filter(None, (moved or shortened, replaced))))


def _leave_out_arguments(values: dict[str, Any], changed: dict[str, Any], given: Sequence[str]) -> str:
    """Leave out the recipe's arguments of a backbone that an override replaces; return what was left out."""
    groups = (
        each["model"].get("kwargs") if isinstance(each.get("model"), dict) else None for each in (values, changed)
    )
    before, after = (group if isinstance(group, dict) else {} for group in groups)
    own, name = before.get("backbone_kwargs"), after.get("backbone")
    if not own or name == before.get("backbone") or any(n.startswith("model.kwargs.backbone_kwargs") for n in given):
        return ""
    after.pop("backbone_kwargs", None)
    return f"the backbone is {name}, so {', '.join(own)} of {before.get('backbone')} is left out"


def _warm_up_in_steps(values: dict[str, Any], given: Sequence[str]) -> str:
    """Give a recipe in epochs that is now to run some iterations its warm-up in steps; return what was changed."""
    steps: Any = values.get("iterations")
    optim, epochs = values.get("optim"), values.get("epochs", Recipe.model_fields["epochs"].default)
    old = optim.get("warmup_epochs", OptimPart.model_fields["warmup_epochs"].default) if isinstance(optim, dict) else 0
    numbers = all(_is_number(value) and value > 0 for value in (steps, epochs, old))
    if not numbers or any(name in given for name in ("optim.warmup_epochs", "optim.warmup_iterations")):
        return ""
    new = min(max(1, round(steps * min(old / epochs, 0.5))), steps - 1)
    values["optim"] |= {"warmup_epochs": 0, "warmup_iterations": new or None}
    return f"{steps} iterations, so optim.warmup_epochs {old:g} -> {new} steps"


def apply_overrides(values: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Return values with assignments `group.field=value` applied, the value as YAML; `data=FOLDER` keeps its group.

    Raises: UserError for an assignment without `=`, to a field of something that is not a group, or a missing folder.
    """
    result = yaml.safe_load(yaml.safe_dump(values))
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise UserError(f"override {assignment!r} must have the form field=value, like optim.lr=1e-4")
        *groups, last = path.replace("-", "_").split(".")
        group = result
        for name in groups:
            if group.get(name) is None:
                group[name] = {}
            group = group[name]
            if not isinstance(group, dict):
                raise UserError(f"override {assignment!r}: {name} is not a group of fields")
        value = parse_value(text)
        if isinstance(value, int | float | date) and _takes_text(groups, last, result):
            value = text  # a folder named 2024_01_31 is not a number
        if [*groups, last] == ["data"] and isinstance(value, str) and isinstance(group.get("data", {}), dict):
            value = {**group.get("data", {}), **DataPart.named(text)}
        group[last] = value
    return result


def _takes_text(groups: list[str], name: str, values: dict[str, Any]) -> bool:
    """True for a field that is a text or a path."""
    try:
        annotation = fields_of(groups, values)[name].annotation
    except (KeyError, AttributeError, UserError):  # no such field, which validation reports
        return False
    members = typing.get_args(annotation) if typing.get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = {typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind for kind in members}
    return kinds <= {str, Path, NoneType}


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
        value: Any = group.get(name) if isinstance(group, dict) else None
        old = value if isinstance(value, list) else [value]
        if not all(map(_is_number, old)) or any(f"{field}.".startswith(f"{other}.") for other in given):
            continue
        new = [_scale(each, length / usual, WHOLE[unit].get(field)) for each in old]
        new = sorted(set(new)) if field == "keep_every" else new
        group[name] = new if isinstance(value, list) else new[0]
        if new != old:
            before, after = (", ".join(f"{each:g}" for each in lengths) for lengths in (old, new))
            changes.append(f"{field} {before} -> {after}")
    return f"{length} of {usual} {unit}, so {', '.join(changes)}" if changes else ""


def _scale(old: float, factor: float, least: int | None) -> float:
    """Return a scaled length: a whole number of at least `least`, or a fraction where that is None."""
    new = float(f"{old * factor:.4g}")
    return new if least is None else max(least, round(new))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
