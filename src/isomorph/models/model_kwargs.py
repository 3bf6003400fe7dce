"""Arguments of timm.create_model that a recipe gives as model.kwargs, or a command as --model-kwargs."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from isomorph.errors import UserError

RESERVED_ARGUMENTS = {
    "name": "give model.name",
    "model_name": "give model.name",
    "pretrained": "give model.pretrained",
    "checkpoint_path": "give model.weights",
    "pretrained_cfg": "name the weights in model.name, like resnet50.a1_in1k",
    "pretrained_cfg_overlay": "give data.size or data.test_crop",
    "pretrained_strict": "give model.weights",
    "pretrained_filter_fn": "give model.weights",
    "cache_dir": "set HF_HOME",
    **dict.fromkeys(("features_only", "out_indices", "feature_cfg", "feature_cls"), "a run trains whole networks"),
    **dict.fromkeys(("scriptable", "exportable", "no_jit"), "export the trained model instead"),
}
"""Arguments that model.kwargs may not have, and what to do instead."""

MAX_NUMBER = 2**24
"""Largest number that an argument may have: no size, depth or width of a network is above it."""
MAX_NESTING = 8
"""Levels of lists and groups within an argument."""


def parse_model_kwargs(assignments: Sequence[str]) -> dict[str, Any]:
    """Return arguments from assignments like `img_size=96`, `img_size=96,128` or `global_pool=avg`.

    Raises: UserError for text without `=`.
    """
    arguments: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--model-kwargs {assignment!r} must be NAME=VALUE, for example img_size=96")
        arguments[name] = _parse_value(text)
    return arguments


def _parse_value(text: str) -> Any:
    """Return a number, a list, true, false, or else the text itself."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
    return list(value) if isinstance(value, tuple) else value


def check_model_kwargs(arguments: Mapping[str, Any]) -> None:
    """Check the arguments in model.kwargs.

    Raises: ValueError for an argument that another field of the recipe sets, or a value that no network takes.
    """
    for name, value in arguments.items():
        if name in RESERVED_ARGUMENTS:
            raise ValueError(f"{name} is not allowed in model.kwargs; {RESERVED_ARGUMENTS[name]}")
        if name in ("in_chans", "num_classes") and not (type(value) is int and value >= 0):
            raise ValueError(f"{name} {value!r} must be a whole number of at least 0")
        _check_value(name, value)


def _check_value(name: str, value: Any, depth: int = 1) -> None:
    """Check one value: a number of at most MAX_NUMBER, text, true, false, null, or lists and groups of these.

    Raises: ValueError for any other value.
    """
    if depth > MAX_NESTING:
        raise ValueError(f"{name} has more than {MAX_NESTING} levels of lists and groups")
    if isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            _check_value(name, each, depth + 1)
    elif isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
        raise ValueError(f"{name} {str(value)[:20]} must be a number of at most {MAX_NUMBER:,}")
    elif not isinstance(value, int | float | str | None):
        raise ValueError(f"{name} must be a number, text, true, false, null, or a list or group of these")
