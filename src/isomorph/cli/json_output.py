"""Results as JSON on standard output."""

import json
import math
from collections.abc import Callable
from typing import Any


def print_json(value: Any, default: Callable[[Any], str] | None = None) -> None:
    """Print a value as JSON, and null for numbers that are not finite, which JSON does not have.

    `default` converts values that JSON has no type for.
    """
    print(json.dumps(_without_nan(value), default=default))


def _without_nan(value: Any) -> Any:
    """Return plain values with None for each number that is not finite."""
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
