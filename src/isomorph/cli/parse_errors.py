"""Errors of the command line's parser in the words of isomorph's own messages."""

import re
from difflib import get_close_matches

from cyclopts import CycloptsError, MissingArgumentError, UnusedCliTokensError


def explain_parse_error(error: CycloptsError) -> str:
    """Return the line to print for an error of the parser."""
    command = " ".join(error.command_chain or ())
    see = f"; see `isomorph {command} --help`" if command else ""
    if isinstance(error, MissingArgumentError) and error.argument:
        return _missing_message(error, command) + see
    if isinstance(error, UnusedCliTokensError):
        return f"{command} does not take {' '.join(error.unused_tokens or ())}{see}"
    whole = re.sub(r"^Invalid value for (--[\w.-]+): (?=\1 )", "", str(error).strip())
    sentences = whole.removesuffix(".").split(". ")
    return "; ".join(text[:1].lower() + text[1:] for text in sentences)


def _missing_message(error: MissingArgumentError, command: str) -> str:
    """Return the message for an option or argument that is missing, misspelt or without its value."""
    assert error.argument
    name = error.argument.name
    if error.keyword or error.argument.tokens:
        return f"{error.keyword or name} needs a value"
    others = [token for token in error.unused_tokens or () if token.startswith("-")]
    if close := get_close_matches(name, others, n=1):
        return f"{close[0]} is not an option (did you mean {name}?)"
    return f"{command} needs {name}"
