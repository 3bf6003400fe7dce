"""Assignments `group.field=value` of a command line, applied to the values of a recipe."""

import typing
from datetime import date
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union

import yaml

from isomorph.errors import UserError
from isomorph.training.recipe.fields import DataPart
from isomorph.training.recipe.parse import parse_value
from isomorph.training.recipe.recipe import fields_of


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
            group = (
                group.setdefault(name, {}) if group.get(name) is not None else group.update({name: {}}) or group[name]
            )
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
    kinds = {
        typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind for kind in _members(annotation)
    }
    return kinds <= {str, Path, NoneType}


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    return typing.get_args(annotation) if typing.get_origin(annotation) in (Union, UnionType) else (annotation,)
