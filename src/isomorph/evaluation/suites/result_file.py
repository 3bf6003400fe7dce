"""Files of results that grow line by line, so that a measurement that was stopped resumes where it was."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from isomorph.errors import UserError

PARSE_ERRORS = (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError)
"""Errors raised while parsing a file that is not a result file."""
Line = dict[str, Any]
T = TypeVar("T")


class ResultFile:
    """A file of JSON lines: the first identifies the measurement, each of the others is a finished part of it.

    `resume` takes the identity and the parts that an existing file holds, and raises UserError if they are of another
    measurement. Every line is on disk before the next part begins; an incomplete last line, which a killed process
    leaves, is cut off. Without a path nothing is written.

    Raises: UserError when the file is not a result file of this kind, or cannot be written.
    """

    def __init__(
        self, path: Path | None, kind: str, identity: Mapping[str, Any], resume: Callable[[Line, list[Line]], None]
    ) -> None:
        self.path = path
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            (saved, lines), complete = read_result_file(path, kind, lambda saved, lines: (saved, lines))
            try:
                resume(saved, lines)
            except UserError:
                raise
            except PARSE_ERRORS as error:
                raise _not_a_result(path, kind) from error
            os.truncate(path, complete)
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; give another file") from None
        self.add({"kind": kind, **identity})

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line and flush it to disk. Raises: UserError when the file cannot be written."""
        if self.path is None:
            return
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; give another file") from None


def read_result_file(path: Path, kind: str, parse: Callable[[Line, list[Line]], T]) -> tuple[T, int]:
    """Return what `parse` makes of the identity and the other lines, and the number of bytes in complete lines.

    Raises: UserError when the file cannot be read, is not of this kind, or is damaged before its last line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    complete = content.rfind(b"\n") + 1
    try:
        first, *others = [json.loads(line) for line in content[:complete].splitlines()]
        if first.pop("kind") != kind:
            raise ValueError
        return parse(first, others), complete
    except PARSE_ERRORS as error:
        raise _not_a_result(path, kind) from error


def _not_a_result(path: Path, kind: str) -> UserError:
    return UserError(f"{path} is not a result file of {kind}, or is damaged")
