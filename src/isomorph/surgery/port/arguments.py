"""The arguments of torch's functions by name."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from isomorph.surgery.port.watch import Call, Ref

# The parameters of functions that are not written in Python, in order.
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (*_CONV[:5], "output_padding", "groups", "dilation")
_POSITIONAL: dict[str, tuple[str, ...]] = {
    "linear": _CONV[:3],
    **{f"conv{n}d": _CONV for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _TRANSPOSED for n in (1, 2, 3)},
    "gelu": ("input", "approximate"),
    "softmax": ("input", "dim"),
    "prelu": ("input", "weight"),
    "clamp": ("input", "min", "max"),
}
# The values that torch takes where code gives none.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gelu": {"approximate": "none"},
    **{f"conv{n}d": {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "bias": None} for n in (1, 2, 3)},
}
_NUMBERED = ("first", "second", "third", "fourth")


@cache
def _signature(function: Callable[..., Any] | None) -> inspect.Signature | None:
    if function is None:
        return None
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def named_arguments(call: Call) -> dict[str, Any]:
    """Return the arguments of a call by name, with torch's defaults where they are known."""
    names = _POSITIONAL.get(call.name)
    if names is None and (signature := _signature(call.function)):
        try:
            bound = signature.bind(*call.args, **call.kwargs)
        except TypeError:
            bound = None
        if bound is not None and not {"args", "kwargs"} & set(bound.arguments):
            bound.apply_defaults()
            return dict(bound.arguments)
    names = (names or _NUMBERED) + tuple(f"argument {i}" for i in range(5, 20))
    given = dict(zip(names, call.args, strict=False))
    return {**_DEFAULTS.get(call.name, {}), **given, **call.kwargs}


def bind(call: Call) -> dict[str, int]:
    """Return the values that a call reads by the name of its argument."""
    values: dict[str, int] = {}
    for name, given in named_arguments(call).items():
        if isinstance(given, Ref):
            values[name] = given.number
        elif isinstance(given, list | tuple):
            for i, each in enumerate(given):
                if isinstance(each, Ref):
                    values[f"{name} {i}"] = each.number
    return values


def settings_of(call: Call) -> dict[str, Any]:
    """Return the arguments of a call that are not tensors: numbers, words and None."""
    settings = {}
    for name, given in named_arguments(call).items():
        if isinstance(given, Ref) or name in ("input", "normalized_shape", "training", "momentum"):
            continue
        if name in ("weight", "bias", "running_mean", "running_var", "inplace"):
            continue
        settings[name] = plain(given)
    return settings


def plain(value: Any) -> Any:
    """Return a setting in one form: sides of equal size as one number."""
    if isinstance(value, list | tuple):
        sides = [plain(each) for each in value]
        if sides and all(side == sides[0] for side in sides):
            return sides[0]
        return tuple(sides)
    return value
