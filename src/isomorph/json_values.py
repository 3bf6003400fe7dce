"""What JSON can hold of a report."""

import math
from collections.abc import Mapping
from typing import Any

# An object of JSON: values by name.
JsonObject = dict[str, Any]


def json_values(value: Any) -> Any:
    """Return a value of dicts, lists and numbers as JSON can hold it, with None for NaN and infinity."""
    if isinstance(value, Mapping):
        return {key: json_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
