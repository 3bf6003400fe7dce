"""The `isomorph` command line: run a command, print errors in one line."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from cyclopts import CycloptsError
from torch import OutOfMemoryError
from torch.distributed import DistError

from isomorph.cli import analyze, bench, compare, evaluate, listing, robustness, surgery, train  # noqa: F401 (each adds commands)
from isomorph.cli.app import app
from isomorph.errors import UserError
from isomorph.import_path import SafeChildProcesses
from isomorph.training import Stopped


def _strip_traceback(error: Exception) -> str:
    """Return the message without the traceback that a data loader's worker process wraps around it."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    from_worker = any(line.startswith("Original Traceback") for line in lines)
    return lines[-1].partition("UserError: ")[2] if from_worker else "\n".join(lines)


def _error_message(error: Exception) -> str:
    """Return the line to print for an error."""
    if isinstance(error, UserError | CycloptsError):
        return _strip_traceback(error)
    if isinstance(error, DistError) or "Connection closed by peer" in str(error):
        return "another process of this run has ended; its error message says why"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"cannot open {error.filename}: {error.strerror}"
    if isinstance(error, MemoryError | OutOfMemoryError) or "can't allocate memory" in str(error):
        return "out of memory; use smaller images or a smaller batch size"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _print_error(text: str) -> None:
    """Print an error to stderr. If stderr is closed, the exit code alone reports it."""
    with suppress(OSError):
        print(f"isomorph: {text}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; print an error in one line and exit with 2, or with 128 + its number for a signal.

    ISOMORPH_DEBUG=1 raises errors with their traceback instead.
    """
    try:
        with SafeChildProcesses():
            app(arguments)
    except Stopped as stopped:
        _print_error(str(stopped))
        sys.exit(128 + stopped.number)
    except (UserError, CycloptsError, OSError, RuntimeError, ValueError, AssertionError, MemoryError) as error:
        if os.environ.get("ISOMORPH_DEBUG"):
            raise
        _print_error(_error_message(error))
        sys.exit(2)
    except KeyboardInterrupt:
        _print_error("interrupted; a run resumes from its last checkpoint")
        sys.exit(130)
