"""Run a command and print errors in one line."""

import os
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from cyclopts import CycloptsError

from isomorph.checkpoints.paths import NEW_PATHS
from isomorph.cli import (  # noqa: F401 (add commands)
    analyze,
    evaluate,
    export,
    listing,
    port,
    robustness,
    sample,
    surgery,
    table,
    train,
)
from isomorph.cli.messages import explain_parse_error, explain_shape_error, name_options
from isomorph.cli.options import app
from isomorph.cli.output import COMMAND
from isomorph.errors import DataWarning, Stopped, UserError, is_out_of_memory
from isomorph.process import (
    INTERRUPTED,
    SafeChildProcesses,
    ignore_interrupts,
    is_main_process,
    was_interrupted,
)
from isomorph.terminal_tables import say

_ANOTHER_ENDED = "another process of this run has ended; its error message says why"
# exit status when nobody reads the output, as of other programs before `| head`
_SIGPIPE = 128 + 13
_PATIENCE = 2.0  # seconds in which torchrun ends a process after another one has failed
_PYTHON_SHOWS = warnings.showwarning


def _error_message(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, CycloptsError):
        return explain_parse_error(error)
    if isinstance(error, UserError):
        explained = explain_shape_error(f"{error.__cause__} {text}")
        if not explained and "Original Traceback" in text:  # of a data loader's worker process
            return str(error).strip().splitlines()[-1].partition(": ")[2]
        return explained or text
    if type(error).__name__.startswith("Dist") or "gloo/transport" in text:
        return _ANOTHER_ENDED
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"cannot open {error.filename}: {error.strerror}"
    if is_out_of_memory(error):
        return "out of memory; use smaller images or a smaller batch size"
    return explain_shape_error(text) or f"{type(error).__name__}: {text[:300]}"


def _print_error(text: str) -> None:
    """Print an error to stderr. If stderr is closed, the exit code alone reports it."""
    with suppress(OSError):
        say(f"isomorph: {' '.join(text.split())}", sys.stderr)


def _show_warning(message: Warning | str, category: type[Warning], *place: object) -> None:
    """Print a warning about the data in a line, and others as Python does."""
    if not issubclass(category, DataWarning):
        _PYTHON_SHOWS(message, category, *place)  # type: ignore[arg-type]
    elif is_main_process():
        _print_error(name_options(str(message), COMMAND[0]))


def _flush() -> None:
    with suppress(AttributeError, ValueError):  # no stdout, or a closed one
        sys.stdout.flush()


def _end(status: int) -> NoReturn:
    """Exit; at once if this is one of several processes, so that torchrun ends the others, which wait for it.

    Output that nobody reads any more is dropped, else Python's own flush at exit fails too.
    """
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if os.environ.get("WORLD_SIZE", "1") != "1":
        os._exit(status)
    sys.exit(status)


def _end_with_error(text: str, status: int) -> NoReturn:
    """Print an error and exit; of several processes the others wait, and are ended by torchrun before they print it."""
    if not is_main_process() or text == _ANOTHER_ENDED:
        time.sleep(_PATIENCE)
    _print_error(text)
    _end(status)


def _end_interrupted(command: str) -> NoReturn:
    ignore_interrupts()  # torchrun sends another one
    message = "interrupted"
    if command == "train":
        message += "; the same command resumes from the last checkpoint, if there is one"
    if is_main_process():
        _print_error(message)
    sys.exit(INTERRUPTED)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command, by default that of this process; see `isomorph.cli.main`."""
    tokens = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    try:
        with SafeChildProcesses(), warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            NEW_PATHS.clear()
            COMMAND[:] = tokens
            app(tokens)
    except Stopped as stopped:
        if is_main_process():
            _print_error(str(stopped))
        sys.exit(128 + stopped.number)
    except KeyboardInterrupt:
        _end_interrupted(tokens[0])
    except BrokenPipeError:
        _end(_SIGPIPE)
    except SystemExit as ended:
        # rich ends a help page so when nobody reads it
        if isinstance(ended.__context__, BrokenPipeError):
            _end(_SIGPIPE)
        try:
            _flush()  # all output is written before the exit, so that a reader that is gone is noticed
        except BrokenPipeError:
            _end(_SIGPIPE)
        raise
    except (
        UserError,
        CycloptsError,
        OSError,
        RuntimeError,
        ValueError,
        AssertionError,
        MemoryError,
    ) as error:
        if was_interrupted():
            _end_interrupted(tokens[0])
        if os.environ.get("ISOMORPH_DEBUG"):
            raise
        _end_with_error(
            name_options(_error_message(error), tokens[0]), getattr(error, "exit_status", 2)
        )
