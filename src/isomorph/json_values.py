"""Values of JSON: objects in files, groups by dotted name, numbers, and what it can hold of a report."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

# An object of JSON: values by name.
JsonObject = dict[str, Any]


def parse_object(text: str | bytes) -> JsonObject | None:
    """Return the JSON object in a text, or None if the text is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_object(path: Path) -> JsonObject | None:
    """Return the object in a JSON file; None where there is none, or where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return parse_object(text)


def parse_log_row(line: str | bytes) -> JsonObject | None:
    """Return the row in a line of a run's log; None unless it is an object whose step and epoch are integers."""
    row = parse_object(line)
    if row is None or any(type(row.get(key, 0)) is not int for key in ("step", "epoch")):
        return None
    return row


def flatten(groups: Mapping[str, Any], prefix: str = "") -> JsonObject:
    """Return the values in nested groups by dotted name.

    >>> from isomorph.json_values import flatten
    >>> flatten({"optim": {"lr": 0.1}, "epochs": 2})
    {'optim.lr': 0.1, 'epochs': 2}
    """
    values: JsonObject = {}
    for name, value in groups.items():
        if isinstance(value, Mapping):
            values |= flatten(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def is_number(value: Any) -> TypeGuard[float]:
    """True for a finite number of JSON; True and False are not numbers."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def json_values(value: Any) -> Any:
    """Return a value of dicts, lists and numbers as JSON can hold it, with None for NaN and infinity."""
    if isinstance(value, Mapping):
        return {key: json_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
