"""The exception for requests that isomorph cannot fulfil as given, and the advice on missing packages."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any


class UserError(ValueError):
    """A problem with what the user asked for, explained in one line; the command line prints it and exits with 2.

    >>> try:
    ...     iso.load_recipe("digits_cn")
    ... except iso.UserError as error:
    ...     print(error)
    there is no recipe 'digits_cn'; did you mean digits_cnn?
    """

    exit_status = 2


class NotFinite(UserError):
    """Weights or outputs are NaN or infinite, so that no number follows from them; the command line exits with 1."""

    exit_status = 1


class Stopped(UserError):
    """A signal (Ctrl-C, SIGTERM or SIGHUP) stopped the run; if it is started again, it resumes from its snapshot.

    `number` is that of the signal.

    >>> iso.training.Stopped("stopped by SIGTERM", number=15).number
    15
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class DataWarning(UserWarning):
    """Something about the data that the user should know, such as files that are left out."""


class DoesNotRun(UserError):
    """A model cannot read the inputs that it was given; `__cause__` is the model's own error."""


class UnknownModel(UserError):
    """A file has weights and does not say of what model."""


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def short_reason(error: Exception) -> str:
    """Return the first sentence of an error, with its type if it is a single word."""
    line = next(iter(str(error).splitlines()), "").partition(". ")[0]
    return line if " " in line else f"{type(error).__name__} {line}".strip()


def is_out_of_memory(error: Exception) -> bool:
    """True for the errors of Python and torch when memory is used up."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return not kinds.isdisjoint(
        {"MemoryError", "OutOfMemoryError"}
    ) or "can't allocate memory" in str(error)


def names_class(name: str) -> bool:
    """True for text such as SmallNet, networks.SmallNet or SmallNet(): names of models begin with small letters.

    >>> from isomorph.errors import names_class
    >>> names_class("SmallNet()"), names_class("resnet5O"), names_class("networks:SmallNet")
    (True, False, False)
    """
    bare = name.removesuffix("()")
    last = bare.rpartition(".")[2]
    return bare.replace(".", "_").isidentifier() and last[:1].isupper()


def describe_value(field: str, problem: Any) -> str:
    """Return what pydantic says about the value of a field: what is allowed, and what was given."""
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] != "value_error":
        message = message[0].lower() + message[1:]
    if isinstance(problem["input"], dict):
        return f"{field}: {message}"
    return f"{field}: {message} (given {repr(problem['input'])[:80]})"


def invalid_fields(title: str, problems: Sequence[str]) -> UserError:
    """Return the error with all problems in one line."""
    noun = "problem" if len(problems) == 1 else "problems"
    return UserError(f"{title} has {len(problems)} {noun}: {'; '.join(problems)}")


def unknown_model(name: str, known: Sequence[str]) -> str:
    """Return that there is no model of this name, and the most similar names among the known ones."""
    base = name.partition(".")[0]
    longer = sorted(
        (other for other in known if other.startswith(base)), key=lambda other: (len(other), other)
    )
    around = [other for other in known if base in other]
    # as in facebook/dinov2-small
    words = [word for word in re.split(r"[\W_]", base) if len(word) > 4]
    shared = {other: sum(word in other for word in words) for other in known}
    similar = sorted(filter(shared.get, known), key=lambda other: -shared[other])
    suggestions = longer or get_close_matches(base, known, n=3) or around or similar
    hint = "see `isomorph models` and timm.list_models()."
    if suggestions:
        hint = f"did you mean {', '.join(suggestions[:3])}?"
    if "." in name and base not in known:
        hint += f" A function of yours is {':'.join(name.rsplit('.', 1))}"
    elif names_class(name):
        hint += f" A class of yours is package.module:{name.removesuffix('()')}"
    hint = hint.removesuffix(".")
    return f"there is no model {name!r}; {hint}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return "did you mean X?" with the most similar of the known names, or other advice where none is similar.

    >>> from isomorph.errors import did_you_mean
    >>> did_you_mean("trian", ["train", "test"], "choose train or test")
    'did you mean train?'
    """
    close = get_close_matches(name[:200], list(known), n=1)
    return f"did you mean {close[0]}?" if close else otherwise


def unknown_field(field: str, names: Sequence[str]) -> str:
    """Return that there is no field of this name in its group, which has `names`: the most similar, or all of them.

    >>> from isomorph.errors import unknown_field
    >>> unknown_field("optim.lrr", ["name", "lr"])
    'optim.lrr is not a field (did you mean lr?)'
    """
    last = field.rpartition(".")[2]
    others = [name for name in names if name != last]  # one of this name may be of another task
    hint = did_you_mean(last, others, f"fields: {', '.join(others)}")
    return f"{field} is not a field ({hint})"


def install_hint(extra: str) -> str:
    """Return the command that installs an optional part of isomorph, to end a message with."""
    return f"run pip install 'isomorph[{extra}]'"


def optional_module(name: str, purpose: str, extra: str) -> Any:
    """Return a module of an optional package. Raises: UserError, with its purpose and how to install it, without it."""
    try:
        return import_module(name)
    except ImportError:
        raise UserError(f"{purpose}; {install_hint(extra)}") from None
