"""Problems of a recipe's fields, said in one line."""

from collections.abc import Sequence
from typing import Any

from isomorph.errors import UserError
from isomorph.terminal_tables import count_of


def describe_value(field: str, problem: Any) -> str:
    """Return what pydantic says about the value of a field: what is allowed, and what was given."""
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] != "value_error":
        message = message[0].lower() + message[1:]
    if isinstance(problem["input"], dict):
        return f"{field}: {message}"
    return f"{field}: {message} (given {repr(problem['input'])[:80]})"


def invalid(title: str, problems: Sequence[str]) -> UserError:
    """Return the error with all problems."""
    return UserError(f"{title} has {count_of(len(problems), 'problem')}: {'; '.join(problems)}")
