"""The arguments of torch's functions by name."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from isomorph.surgery.layer_calls import LAYERS
from isomorph.surgery.port.watch import Call, Ref

# The parameters of functions that are not written in Python, in order.
_POSITIONAL = LAYERS | {
    "gelu": ("input", "approximate"),
    "softmax": ("input", "dim"),
    "prelu": ("input", "weight"),
    "clamp": ("input", "min", "max"),
}
# The values that torch takes where code gives none.
_PLAIN_CONV = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "bias": None}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gelu": {"approximate": "none"},
    **{f"conv{n}d": _PLAIN_CONV for n in (1, 2, 3)},
}
_NUMBERED = ("first", "second", "third", "fourth")
_MORE = tuple(f"argument {i}" for i in range(5, 20))


# Arguments that change nothing in eval mode, or follow from the tensors.
_NO_SETTINGS = {
    "input",
    "normalized_shape",
    "training",
    "momentum",
    "inplace",
    "weight",
    "bias",
    "running_mean",
    "running_var",
}


@cache
def _signature(function: Callable[..., Any] | None) -> inspect.Signature | None:
    """Return the signature of a function, or None if it has none that Python knows."""
    if function is None:
        return None
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def named_arguments(call: Call) -> dict[str, Any]:
    """Return the arguments of a call by name, with torch's defaults where they are known."""
    if call.name not in _POSITIONAL:
        bound = _bound(call)
        if bound is not None:
            return bound
    names = _POSITIONAL.get(call.name, _NUMBERED) + _MORE
    by_position = dict(zip(names, call.args, strict=False))
    defaults = _DEFAULTS.get(call.name, {})
    return {**defaults, **by_position, **call.kwargs}


def _bound(call: Call) -> dict[str, Any] | None:
    """Return the arguments by the function's own names; None for a function that does not say them."""
    signature = _signature(call.function)
    if signature is None:
        return None
    try:
        bound = signature.bind(*call.args, **call.kwargs)
    except TypeError:
        return None
    if "args" in bound.arguments or "kwargs" in bound.arguments:
        return None
    bound.apply_defaults()
    return dict(bound.arguments)


def bind(call: Call) -> dict[str, int]:
    """Return the values that a call reads by the name of its argument."""
    values: dict[str, int] = {}
    for name, argument in named_arguments(call).items():
        if isinstance(argument, Ref):
            values[name] = argument.slot
        elif isinstance(argument, list | tuple):
            for i, item in enumerate(argument):
                if isinstance(item, Ref):
                    values[f"{name} {i}"] = item.slot
    return values


def settings_of(call: Call) -> dict[str, Any]:
    """Return the arguments of a call that are not tensors: numbers, words and None."""
    settings = {}
    for name, argument in named_arguments(call).items():
        if name not in _NO_SETTINGS and not isinstance(argument, Ref):
            settings[name] = plain(argument)
    return settings


def plain(value: Any) -> Any:
    """Return a setting in one form: sides of equal size as one number."""
    if isinstance(value, list | tuple):
        sides = [plain(item) for item in value]
        if sides and all(side == sides[0] for side in sides):
            return sides[0]
        return tuple(sides)
    return value
