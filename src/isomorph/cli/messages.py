"""Messages in the words of the command line: errors of the parser, of torch and of the library."""

import re
from collections.abc import Container, Sequence
from difflib import get_close_matches

from cyclopts import CoercionError, CycloptsError, MissingArgumentError, UnusedCliTokensError

from isomorph.cli.options import app
from isomorph.cli.tables import recipe_fields, tables

_SAME_NAMES = (
    *("batch_size", "model_kwargs", "grid_size", "prefix_tokens", "rescale_by", "dynamic", "opset", "float_layers"),
    *("atol", "weight_bits"),
)
_OPTIONS = {
    "data.root": "--root",
    "data.source": "--data",
    "data.classes": "--classes",
    "data.split": "--split",
    "test_fraction": "--split",
    "model.weights": "--weights",
    "device=cpu": "--device cpu",
    "in where": "in --where",
    "checkpoint_path=FILE": "--weights FILE",
    "pretrained=False": "--no-pretrained",
    **{name: f"--{name.replace('_', '-')}" for name in _SAME_NAMES},
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


def _replace(message: str, options: dict[str, str]) -> str:
    """Return the message with whole names replaced."""
    names = "|".join(map(re.escape, sorted(options, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.-])({names})(?![\w-]|\.\w)", lambda found: options[found[1]], message)


_PATTERNS = {
    r"Input (?:height|width) \((\d+)\) doesn't match model \((\d+)\)": (
        "images of {0} pixels do not fit this model, which was built for {1}; give --size {1}, or leave --size out"
    ),
    r"Input (?:height|width) \((\d+)\) should be divisible by patch size \((\d+)\)": (
        "images of {0} pixels do not fit this model; give a --size that is a multiple of its patch size {1}"
    ),
    r"expected input\[.*?\] to have (\d+) channels, but got (\d+) channels": (
        "the model takes {0}-channel images, but these have {1} channels; give other data, or another model"
    ),
    r"reads feature maps of (\d+) channels, not (\d+)": (
        "the model takes {0}-channel images, but these have {1} channels; give other data, or another model"
    ),
    r"[Kk]ernel size can't be greater than actual input size": (
        "the images are too small for this model; give a larger --size"
    ),
    r"Output size is too small": "the images are too small for this model; give a larger --size",
}


def explain_shape_error(text: str) -> str | None:
    """Return what to do about an error message of torch or timm, or None if it is not about the shape of images."""
    for pattern, advice in _PATTERNS.items():
        if found := re.search(pattern, text):
            return advice.format(*found.groups())
    return None


def explain_parse_error(error: CycloptsError) -> str:
    """Return the line to print for an error of the parser."""
    command = " ".join(error.command_chain or ())
    see = f"; see `isomorph {command} --help`" if command else ""
    if isinstance(error, MissingArgumentError) and error.argument:
        return _missing_message(error, command) + see
    if isinstance(error, UnusedCliTokensError):
        unused = list(error.unused_tokens or ())
        hint = _repeat_hint(command, error.root_input_tokens or (), unused)
        return f"{command} does not take {' '.join(unused)}{hint}{see}"
    if isinstance(error, CoercionError) and error.token and error.target_type is float:
        return f"{error.token.keyword} {error.token.value} must be a number"
    whole = re.sub(r"^Invalid value for (--[\w.-]+): (?=\1 )", "", str(error).strip())
    whole = re.sub(r"Available commands: .*", "See `isomorph --help`", whole)  # which the parser cuts short
    sentences = whole.removesuffix(".").split(". ")
    return "; ".join(text[:1].lower() + text[1:] for text in sentences)


def _repeat_hint(command: str, tokens: Sequence[str], unused: Sequence[str]) -> str:
    """Return a hint to give an option several times, if the first unused token follows a value of such a one, or ""."""
    arguments = app[command].assemble_argument_collection()
    repeatable = {name for a in arguments if "list[" in str(a.hint) or "..." in str(a.hint) for name in a.names}
    before = list(tokens[: tokens.index(unused[0])]) if unused and unused[0] in tokens else []
    if len(before) < 2 or before[-2] not in repeatable or unused[0].startswith("-"):
        return ""
    return f"; for several values, give the option several times: {before[-2]} {before[-1]} {before[-2]} {unused[0]}"


def _missing_message(error: MissingArgumentError, command: str) -> str:
    """Return the message for an option or argument that is missing, misspelt or without its value."""
    assert error.argument
    name = error.argument.name
    if error.keyword or error.argument.tokens:
        return f"{error.keyword or name} needs a value"
    others = [token for token in error.unused_tokens or () if token.startswith("-")]
    if close := get_close_matches(name, others, n=1):
        return f"{close[0]} is not an option (did you mean {name}?)"
    values = [token for token in error.unused_tokens or () if not token.startswith("-")]
    if values and name.startswith("--"):
        return f"{values[0]} needs the name of its option (did you mean {name} {values[0]}?)"
    return f"{command} needs {name}"
