"""What an exported model says about itself: the images that it expects, its classes, and the sizes that it takes."""

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from isomorph.checkpoints.header import DATA_KEYS, parse_data
from isomorph.checkpoints.rebuild import describe_data
from isomorph.deployment.named_inputs import NamedShapes
from isomorph.deployment.shapes import DYNAMIC, ExportShapes
from isomorph.errors import UserError
from isomorph.evaluation.input_sizes import evaluation_config

FORMAT_KEY = "isomorph_version"
"""The key by which a file is known to be isomorph's."""
METADATA_KEYS = (
    *(FORMAT_KEY, "architecture", "num_classes", "class_names", "input_size", "mean", "std"),
    *("interpolation", "crop_pct", "crop_mode", "source", "split", "dynamic", "size_multiple"),
    *("quantization", "inputs", "length", "task"),
)
"""Keys of the metadata, each with a JSON value; the version, and a name or word, stand there without quotes."""
_WORDS = (FORMAT_KEY, "architecture", "interpolation", "crop_mode", "source", "quantization")


def describe(model: nn.Module, shapes: ExportShapes | NamedShapes) -> dict[str, str]:
    """Return the metadata of a model exported with these shapes, as texts by key.

    Keys without a value (class names of a model that has none) are left out.
    """
    if isinstance(shapes, NamedShapes):
        config, inputs = shapes.data(), list(shapes.names)
    else:
        config, inputs = evaluation_config(model, (shapes.checks[0][2], shapes.checks[0][3])), None
    data = describe_data(model) | {key: config[key] for key in (*DATA_KEYS, "length") if key in config}
    values = {
        FORMAT_KEY: own_version(),
        "architecture": (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or type(model).__name__,
        "num_classes": getattr(model, "num_classes", None),
        "class_names": data.pop("label_names", None),
        **data,
        "dynamic": list(shapes.dynamic),
        "size_multiple": shapes.size_multiple,
        "inputs": inputs,
    }
    return {
        key: values[key] if key in _WORDS else json.dumps(values[key])
        for key in METADATA_KEYS
        if values.get(key) is not None
    }


def own_version() -> str:
    """Return isomorph's version, "unknown" where it runs without being installed."""
    try:
        return version("isomorph")
    except PackageNotFoundError:
        return "unknown"


def parse_metadata(texts: Mapping[str, str], path: object) -> dict[str, Any]:
    """Return the values of metadata by key. Raises: UserError when isomorph did not write it, or a value is damaged."""
    if FORMAT_KEY not in texts or not {"input_size", "inputs"} & set(texts):
        raise UserError(f"{path} does not say which images it expects; give a file that isomorph export wrote")
    try:
        known = {key: texts[key] for key in METADATA_KEYS if key in texts}
        values = {key: text if key in _WORDS else json.loads(text) for key, text in known.items()}
        dynamic, classes = values.get("dynamic", []), values.get("num_classes", 0)
        multiple = values.setdefault("size_multiple", None) or 1
        if not (set(dynamic) <= set(DYNAMIC) and type(classes) is int and type(multiple) is int and multiple > 0):
            raise ValueError("dynamic, num_classes or size_multiple has an impossible value")
    except (ValueError, TypeError) as error:
        raise UserError(f"cannot read the metadata of {path}: {error}") from None
    data = {key: values[key] for key in DATA_KEYS if key in values}
    names = values.get("class_names")
    return values | parse_data(data | ({"label_names": names} if names is not None else {}), path)
