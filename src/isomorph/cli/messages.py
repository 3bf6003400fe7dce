"""Messages in the words of the command line: errors of the parser, of torch and of the library."""

import re

from cyclopts import CycloptsError, MissingArgumentError, UnknownOptionError, UnusedCliTokensError

# Options of `train`, and before them those of all other commands, by the names that the library uses.
_NAMES = {
    "checkpoint_path=FILE": ("--weights FILE", "--model.weights FILE"),
    **dict.fromkeys(
        ("pretrained=False", "--no-pretrained"), ("--no-pretrained", "--model.pretrained false")
    ),
    "device=cpu": ("--device cpu", "--device cpu"),
    "data=NAME": ("--data NAME", "--data NAME"),
    **dict.fromkeys(("data.root", "--root"), ("--root", "--data.root")),
    "data.source": ("--data", "--data.source"),
    "data.classes": ("--classes", "--data.classes"),
    **dict.fromkeys(("data.split", "test_fraction"), ("--split", "--data.split")),
    "anneal.epochs of a recipe": ("--anneal.epochs of `isomorph train`",) * 2,
    **dict.fromkeys(("model.weights", "--weights"), ("--weights", "--model.weights")),
    "--arch": ("--arch", "--model.name"),
    "--model-kwargs": ("--model-kwargs", "--model.kwargs"),
    "--size": ("--size", "--data.size"),
    "float_layers": ("--float-layers", "--float-layers"),
    "in where": ("in --where", "in --model.recast.where"),
}


def name_options(message: str, command: str) -> str:
    """Return a message in which fields and arguments have the names of the command's options."""
    names = "|".join(map(re.escape, sorted(_NAMES, key=len, reverse=True)))
    pattern = rf"(?<![\w.-])({names})(?![\w-]|\.\w)"
    text = re.sub(pattern, lambda found: _NAMES[found[1]][command == "train"], message)
    return re.sub(r"--model\.kwargs (\w+)=", r"--model.kwargs.\1 ", text)


_PATTERNS = {
    r"Input (?:height|width) \((\d+)\) doesn't match model \((\d+)\)": (
        "images of {0} pixels do not fit this model, which was built for {1}; give --size {1}, leave --size out, or "
        "build a ViT of timm for them with --model-kwargs img_size={0}"
    ),
    r"Input (?:height|width) \((\d+)\) should be divisible by patch size \((\d+)\)": (
        "images of {0} pixels do not fit this model; give a --size that is a multiple of its patch size {1}"
    ),
    r"(?:expected input\[.*?\] to have|reads feature maps of) (\d+) channels, (?:but got|not) (\d+)": (
        "the model takes {0}-channel images, but these have {1} channels; give other data, or another model"
    ),
    r"[Kk]ernel size can't be greater than actual input size|Output size is too small": (
        "the images are too small for this model; give a larger --size"
    ),
}


def explain_shape_error(text: str) -> str | None:
    """Return what to do about an error message of torch or timm, or None if it is not about the shape of images."""
    for pattern, advice in _PATTERNS.items():
        found = re.search(pattern, text)
        if found is not None:
            return advice.format(*found.groups())
    return None


def explain_parse_error(error: CycloptsError) -> str:
    """Return the line to print for an error of the parser."""
    command = " ".join(error.command_chain or ())
    see = f"; see `isomorph {command} --help`" if command else ""
    if isinstance(error, MissingArgumentError) and error.argument:
        name = error.keyword or error.argument.name
        if error.keyword or error.argument.tokens:
            return f"{name} needs a value{see}"
        return f"{command} needs {name}{see}"
    if isinstance(error, UnusedCliTokensError):
        unused = " ".join(error.unused_tokens or ())
        other = ""
        if command in ("analyze", "bench"):
            other = f"; give another model as --against {unused}"
        return f"{command} does not take {unused}{other}{see}"
    text = re.sub(
        r"Available commands: .*", "See `isomorph --help`", str(error).strip()
    )  # which the parser cuts short
    text = re.sub(r"(?:^|(\.) )(\w)", _join_sentences, text.removesuffix("."))
    if isinstance(error, UnknownOptionError) and not text.endswith("?"):
        return text + see
    return text


def _join_sentences(found: re.Match[str]) -> str:
    """Return the beginning of a sentence as that of a part of one."""
    return f"{'; ' if found[1] else ''}{found[2].lower()}"
