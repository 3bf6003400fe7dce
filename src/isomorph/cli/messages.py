"""Messages in the words of the command line: errors of the parser, of torch and of the library."""

import re

from cyclopts import CycloptsError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError

from isomorph.cli.options import app
from isomorph.cli.tables import tables
from isomorph.errors import did_you_mean

# What the library writes as name=VALUE or `name` is an argument; calls in Python code stay as they are.
_VALUE = r"\([^()]*\)|\[[^\]]*\]|'[^']*'|[^\s;,()`]+(?:\([^()]*\))?"
_ARGUMENT = re.compile(
    r"(?P<code>[A-Za-z_][\w.]*\((?:[^()]|\([^()]*\))*\))"
    rf"|(?<![\w./-])(?P<name>[a-z][\w.]*)=(?P<value>{_VALUE})"
    r"|`(?P<quoted>[a-z][\w.]*)`"
    r"|(?<![\w./-])(?P<field>data\.(?:root|source|classes|split)|model\.weights)(?![\w-]|\.\w)"
)
# Arguments by the names of options that are not theirs.
_OTHER_NAMES = {
    "base": ("arch", "model.name"),
    "checkpoint_path": ("weights", "model.weights"),
    "corruptions": ("corruption",),
    "data.source": ("data", "data.source"),
    "model.kwargs": ("model-kwargs", "model.kwargs"),
    "test_fraction": ("split", "data.split"),
    "where": ("where", "layers", "model.recast.where"),
}
# Arguments of timm.create_model, which a command takes together as one option.
_MODEL_ARGUMENTS = ("img_size", "patch_size")


def name_options(message: str, command: str = "") -> str:
    """Return a message in which the library's arguments and fields have the names of the command's options."""
    options = _options_of(command)

    def as_option(match: re.Match[str]) -> str:
        name = match["name"] or match["quoted"] or match["field"]
        if name is None:
            return match[0]
        if name == "thorough" and command and name not in options:
            return "isomorph verify --thorough"
        return _typed(name, match["value"], options) or match[0]

    return _ARGUMENT.sub(as_option, message)


def _options_of(command: str) -> set[str]:
    """Return the options of a command, without dashes; of `train` the fields of a recipe."""
    if command == "train":
        return set(re.findall(r"`--([\w.]+)`", tables()["recipe_help"]))
    if command not in app:
        return set()
    names: set[str] = set()
    for argument in app[command].assemble_argument_collection():
        names.update(name.removeprefix("--") for name in argument.names)
    return names


def _typed(name: str, value: str | None, options: set[str]) -> str | None:
    """Return an argument with its value as it is typed, or None if the command has no such option."""
    if name in _MODEL_ARGUMENTS and value is not None:
        sizes = value.strip("()").replace(", ", ",")
        if "model-kwargs" in options:
            return f"--model-kwargs {name}={sizes}"
        return f"--model.kwargs.{name} {sizes}" if "model.kwargs" in options else None
    last = name.rpartition(".")[2]
    candidates = _OTHER_NAMES.get(name, (name, last, f"data.{last}", f"model.{last}"))
    for candidate in candidates:
        option = candidate if candidate in options else candidate.replace("_", "-")
        if option in options or (option.startswith("model.kwargs.") and "model.kwargs" in options):
            return _with_value(option, value, options)
    return None


def _with_value(option: str, value: str | None, options: set[str]) -> str:
    if value is None:
        return f"--{option}"
    is_recipe = "model.name" in options
    if value == "True" and not is_recipe:
        return f"--{option}"
    if value == "False" and f"no-{option}" in options:
        return f"--no-{option}"
    if "(" in value and option in ("arch", "model.name"):
        value = "package.module:function"
    if value in ("True", "False"):
        value = value.lower()
    if re.fullmatch(r"\(\d+, \d+\)", value):
        value = value.strip("()").replace(", ", "x")
    if not is_recipe:
        value = value.strip("[]").replace(", ", " ")
    return f"--{option} " + value.replace("'", "")


_PATTERNS = {
    r"Input (?:height|width) \((\d+)\) doesn't match model \((\d+)\)": (
        "images of {0} pixels do not fit this model, which was built for {1}; give size={1}, leave `size` out, or "
        "build a ViT of timm for them with img_size={0}"
    ),
    r"Input (?:height|width) \((\d+)\) should be divisible by patch size \((\d+)\)": (
        "images of {0} pixels do not fit this model; give a `size` that is a multiple of its patch size {1}"
    ),
    r"(?:expected input\[.*?\] to have|reads feature maps of) (\d+) channels, (?:but got|not) (\d+)": (
        "the model takes {0}-channel images, but these have {1} channels; give other data, or another model"
    ),
    r"[Kk]ernel size can't be greater than actual input size|Output size is too small": (
        "the images are too small for this model; give a larger `size`"
    ),
}


def explain_shape_error(text: str) -> str | None:
    """Return what to do about an error message of torch or timm, or None if it is not about the shape of images."""
    for pattern, advice in _PATTERNS.items():
        match = re.search(pattern, text)
        if match is not None:
            return advice.format(*match.groups())
    return None


def explain_parse_error(error: CycloptsError) -> str:
    """Return the line to print for an error of the parser."""
    command = " ".join(error.command_chain or ())
    see = f"; see `isomorph {command} --help`" if command else ""
    if isinstance(error, MissingArgumentError) and error.argument:
        name = error.keyword or error.argument.name
        unknown = _unknown_option(error)
        if unknown:
            return unknown
        if error.keyword or error.argument.tokens:
            return f"{name} needs a value{see}"
        return f"{command} needs {name}{see}"
    if isinstance(error, UnusedCliTokensError):
        unused = " ".join(error.unused_tokens or ())
        other = _explain_second_value(error)
        if other:
            return other + see
        if command in ("analyze", "bench"):
            other = f"; give another model as --against {unused}"
        return f"{command} does not take {unused}{other}{see}"
    # which the parser cuts short
    text = re.sub(r"Available commands: .*", "See `isomorph --help`", str(error).strip())
    text = re.sub(r"(?:^|(\.) )(\w)", _join_sentences, text.removesuffix("."))
    if isinstance(error, UnknownOptionError) and not text.endswith("?"):
        return text + see
    return text


def _unknown_option(error: MissingArgumentError) -> str:
    """Return the message for a misspelt option, which the parser reports as a missing argument; "" if there is none."""
    command, *tokens = error.root_input_tokens or [""]
    options = sorted(f"--{name}" for name in _options_of(command))
    for token in tokens:
        option = token.partition("=")[0]
        is_known = option in options or option.replace("_", "-") in options
        if is_known or not option.startswith("--"):
            continue
        hint = did_you_mean(option, options, "")
        if hint:
            return f"unknown option: {option}; {hint}"
    return ""


def _explain_second_value(error: UnusedCliTokensError) -> str:
    """Return that an option takes one value, for a token that follows its first one; else nothing."""
    tokens = error.root_input_tokens or []
    unused = error.unused_tokens or []
    valued = {}
    for argument in app[tokens[0]].assemble_argument_collection():
        if argument.hint is not bool:
            valued.update(dict.fromkeys(argument.names, argument))
    for option, first, second in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if option in valued and second == unused[0] and not first.startswith("--"):
            said = f"{option} takes one value, not {first} and {second}"
            if valued[option].parameter.metavar == "SIZE":
                said += f"; write {option} {first}x{second} for height and width"
            return said
    return ""


def _join_sentences(found: re.Match[str]) -> str:
    """Return the beginning of a sentence as that of a part of one."""
    return f"{'; ' if found[1] else ''}{found[2].lower()}"
