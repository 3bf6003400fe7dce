"""The command line: parses, calls, prints."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from cyclopts import CycloptsError
from torch import OutOfMemoryError
from torch.distributed import DistError

from isomorph._recipe import Stopped
from isomorph.cli import analyze, bench, compare, evaluate, listing, robustness, surgery, train  # noqa: F401 (each adds commands)
from isomorph.cli.app import app
from isomorph.errors import UserError
from isomorph.import_path import SafeChildren


def _strip_traceback(error: Exception) -> str:
    """The message without the traceback that a worker process wraps around it."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    wrapped = any(line.startswith("Original Traceback") for line in lines)
    return lines[-1].partition("UserError: ")[2] if wrapped else "\n".join(lines)


def error_message(error: Exception) -> str:
    """One line for any error."""
    if isinstance(error, UserError | CycloptsError):
        return _strip_traceback(error)
    if isinstance(error, DistError) or "Connection closed by peer" in str(error):
        return "another process of this run has ended; the line that it left says why"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"cannot open {error.filename}: {error.strerror}"
    if isinstance(error, MemoryError | OutOfMemoryError) or "can't allocate memory" in str(error):
        return "there is not enough memory for this; give smaller sizes or batches"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _print_error(text: str) -> None:
    """Prints a line where there is still a terminal to read it; the exit code says the rest."""
    with suppress(OSError):
        print(f"isomorph: {text}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; a problem with the request is printed in a line and exits 2, a signal exits 128 + its number.

    ISOMORPH_DEBUG=1 lets errors through with their traceback.
    """
    try:
        with SafeChildren():
            app(arguments)
    except Stopped as stopped:
        _print_error(str(stopped))
        sys.exit(128 + stopped.number)
    except (UserError, CycloptsError, OSError, RuntimeError, ValueError, AssertionError, MemoryError) as error:
        if os.environ.get("ISOMORPH_DEBUG"):
            raise
        _print_error(error_message(error))
        sys.exit(2)
    except KeyboardInterrupt:
        _print_error("interrupted; a run resumes from its last checkpoint")
        sys.exit(130)
