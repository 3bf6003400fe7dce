"""Arguments of timm.create_model that a recipe gives as model.kwargs, or a command as model-kwargs."""

from collections.abc import Mapping
from typing import Any

RESERVED_ARGUMENTS = {
    "name": "give model.name",
    "model_name": "give model.name",
    "pretrained": "give model.pretrained",
    "checkpoint_path": "give model.weights",
    "pretrained_cfg": "name the weights in model.name, like resnet50.a1_in1k",
    "pretrained_cfg_overlay": "write a function that returns the model with its pretrained_cfg",
    "pretrained_strict": "give model.weights",
    "pretrained_filter_fn": "give model.weights",
    "cache_dir": "set HF_HOME",
    **dict.fromkeys(
        ("features_only", "out_indices", "feature_cfg", "feature_cls"),
        "a run trains whole networks",
    ),
    **dict.fromkeys(("scriptable", "exportable", "no_jit"), "export the trained model instead"),
}


# Of those, what a network around another one may give to that.
_ALLOWED_INSIDE = ("pretrained", "features_only", "out_indices")


def check_model_kwargs(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that another field of the recipe sets, or a value that no network takes."""
    for name, value in arguments.items():
        if name in RESERVED_ARGUMENTS:
            raise ValueError(f"{name} is not allowed in model.kwargs; {RESERVED_ARGUMENTS[name]}")
        if name in ("in_chans", "num_classes") and not (type(value) is int and value >= 0):
            raise ValueError(f"{name} {value!r} must be a whole number of at least 0")
        _check_inside(name, value)
        check_limits(name, value)


def _check_inside(name: str, value: Any) -> None:
    """Raise ValueError for an argument that a network may not give to the one in it."""
    if isinstance(value, list | tuple):
        for item in value:
            _check_inside(name, item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in RESERVED_ARGUMENTS and key not in _ALLOWED_INSIDE:
                raise ValueError(f"{name}.{key} is not allowed; {RESERVED_ARGUMENTS[key]}")
            _check_inside(name, item)


def check_limits(name: str, value: Any, depth: int = 1) -> None:
    """Raise ValueError for an argument with larger numbers, or longer or deeper lists, than any network has."""
    if depth > 8:
        raise ValueError(f"{name} has more than 8 levels of lists and groups")
    limit = 1000 if any(word in name for word in ("depth", "layers", "blocks")) else 2**24
    if isinstance(value, list | tuple | dict):
        if len(value) > limit:
            raise ValueError(f"{name} has {len(value):,} values and may have {limit:,}")
        for item in value.values() if isinstance(value, dict) else value:
            check_limits(name, item, depth + 1)
    elif isinstance(value, int | float) and not abs(value) <= limit:
        digits = str(value)
        shown = digits if len(digits) <= 20 else f"{digits[:20]}..."
        raise ValueError(f"{name} {shown} must be a number of at most {limit:,}")
    elif not isinstance(value, int | float | str | None):
        raise ValueError(
            f"{name} must be a number, text, true, false, null, or a list or group of these",
        )
