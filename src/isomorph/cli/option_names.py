"""Messages of the library in the words of the command line: recipe fields and arguments as options."""

import re
from collections.abc import Container

from isomorph.cli.tables import tables

_OPTIONS = {
    "data.root": "--root",
    "data.source": "--data",
    "data.classes": "--classes",
    "data.split": "--split",
    "test_fraction": "--split",
    "model.weights": "--weights",
    "device=cpu": "--device cpu",
    "batch_size": "--batch-size",
    "model_kwargs": "--model-kwargs",
    "grid_size": "--grid-size",
    "prefix_tokens": "--prefix-tokens",
    "rescale_by": "--rescale-by",
    "in where": "in --where",
    "dynamic": "--dynamic",
    "opset": "--opset",
    "float_layers": "--float-layers",
    "atol": "--atol",
    "weight_bits": "--weight-bits",
    "checkpoint_path=FILE": "--weights FILE",
    "pretrained=False": "--no-pretrained",
}
"""Options of all commands but `train`, by the names that the library uses."""

_TRAIN_OPTIONS = {
    "--arch": "--model.name",
    "device=cpu": "--device cpu",
    "--weights": "--model.weights",
    "--no-pretrained": "--model.pretrained false",
    "checkpoint_path=FILE": "--model.weights FILE",
    "pretrained=False": "--model.pretrained false",
    "--root": "--data.root",
    "in where": "in --model.recast.where",
}
"""Options of `train` for those of the other commands."""


_PROBLEM = r"(problems?: |; )([\w.]+)(?=: | is not a field | is missing| is a group of fields| does not apply to )"
"""The start of a problem with a recipe: what precedes it, and the field."""


def name_options(message: str, command: str) -> str:
    """Return a message in which fields and arguments have the names of the command's options."""
    if command == "recast":
        rules = "|".join(row["name"] for row in tables()["rule_options"])
        message = re.sub(rf"^({rules})(?= \S)", lambda found: "--" + found[1].replace("_", "-"), message)
    if command != "train":
        return _replace(message, _OPTIONS)
    fields = recipe_fields()
    message = _name_problems(message, {field.partition(".")[0] for field in fields})
    return _replace(message, _TRAIN_OPTIONS | {name: f"--{name}" for name in fields if "." in name})


def _name_problems(message: str, top: Container[str]) -> str:
    """Return the message on a recipe with options for the fields at fault, also those of other packages or unknown.

    `top` are the names of the recipe's own fields and groups.
    """
    message = re.sub(_PROBLEM, lambda m: m[1] + "--" * (m[2].partition(".")[0] in top) + m[2], message)
    return re.sub(r"(--([\w.]+\.)\w+ is not a field \(did you mean )(?=\w)", r"\1--\2", message)


def recipe_fields() -> list[str]:
    """Return the names of all recipe fields, for example optim.lr."""
    return re.findall(r"`--([\w.]+)`", tables()["recipe_help"])


def _replace(message: str, options: dict[str, str]) -> str:
    """Return the message with whole names replaced."""
    names = "|".join(map(re.escape, sorted(options, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.-])({names})(?![\w-]|\.\w)", lambda found: options[found[1]], message)
