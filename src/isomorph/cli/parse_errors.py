"""Errors of the command line's parser in the words of isomorph's own messages."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from inspect import signature

from cyclopts import CoercionError, CycloptsError, MissingArgumentError, UnusedCliTokensError

from isomorph.cli.app import app


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
    before = list(tokens[: tokens.index(unused[0])]) if unused and unused[0] in tokens else []
    if len(before) < 2 or before[-2] not in _repeatable_options(command) or unused[0].startswith("-"):
        return ""
    return f"; for several values, give the option several times: {before[-2]} {before[-1]} {before[-2]} {unused[0]}"


def _repeatable_options(command: str) -> set[str]:
    """Return the options of a command that may be given several times."""
    parameters = signature(app[command].default_command).parameters.values()  # type: ignore[arg-type]
    return {
        f"--{p.name.replace('_', '-')}"
        for p in parameters
        if "list[" in str(p.annotation) or "..." in str(p.annotation)
    }


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
