"""Run a command and print errors in one line."""

import os
import select
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from cyclopts import CycloptsError

from isomorph.checkpoints.paths import NEW_PATHS
from isomorph.cli import (  # noqa: F401 (add commands)
    analyze,
    evaluate,
    export,
    listing,
    robustness,
    sample,
    surgery,
    table,
    train,
)
from isomorph.cli.messages import explain_parse_error, explain_shape_error, name_options
from isomorph.cli.options import app, join_sizes, place_model
from isomorph.errors import DataWarning, Stopped, UserError, is_out_of_memory
from isomorph.process import INTERRUPTED, SafeChildProcesses, ignore_interrupts, was_interrupted
from isomorph.terminal_tables import say


def _strip_traceback(error: Exception) -> str:
    """Return the message without the traceback that a data loader's worker process wraps around it."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    from_worker = any(line.startswith("Original Traceback") for line in lines)
    return lines[-1].partition(": ")[2] if from_worker else "\n".join(lines)  # after the name of the exception


_ANOTHER_ENDED = "another process of this run has ended; its error message says why"
SIGPIPE_STATUS = 128 + 13
"""Exit status when nobody reads the output, as of other programs before `| head`."""
_PATIENCE = 2.0
"""Seconds in which torchrun ends a process after another one has failed."""


def _error_message(error: Exception) -> str:
    """Return the line to print for an error."""
    text = " ".join(str(error).split())
    if isinstance(error, CycloptsError):
        return explain_parse_error(error)
    if isinstance(error, UserError):
        return explain_shape_error(f"{error.__cause__} {text}") or _strip_traceback(error)
    if type(error).__name__.startswith("Dist") or "Connection closed by peer" in text:
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
    elif _is_main_process():
        _print_error(str(message))


_PYTHON_SHOWS = warnings.showwarning


def _is_main_process() -> bool:
    """True for the first of the processes that torchrun started, and for a process by itself."""
    rank = os.environ.get("RANK", "")
    return not (rank.isdecimal() and int(rank))


def _nobody_reads() -> bool:
    """Return whether the reader of the output is gone, as after `| head`; the rest of the output is then dropped."""
    with suppress(AttributeError, OSError):  # no poll on Windows, no file number of a replaced stdout
        output, pipe = sys.stdout.fileno(), select.poll()
        pipe.register(output, 0)
        if any(events & (select.POLLERR | select.POLLHUP) for _, events in pipe.poll(0)):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # else Python's own flush at exit fails too
            return True
    return False


def _end_with_error(text: str, status: int) -> NoReturn:
    """Print an error and exit with a status.

    Of several processes, the one that found the error prints it and exits at once, so that torchrun ends the others:
    they wait for that before they print anything.
    """
    if not _is_main_process() or text == _ANOTHER_ENDED:
        time.sleep(_PATIENCE)
    _print_error(text)
    _nobody_reads()
    _end(status)


def _end(status: int) -> NoReturn:
    """Exit at once if this is one of several processes, so that torchrun ends the others, which wait for it."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


@contextmanager
def _output_written() -> Iterator[None]:
    """Context at whose end all output is written, so that a reader that is gone is noticed here, not at exit.

    An error goes first: its message matters more.
    """
    ended = None
    try:
        yield
    except SystemExit as raised:
        ended = raised
    with suppress(AttributeError, ValueError):  # no stdout, or a closed one
        sys.stdout.flush()
    if ended:
        raise ended


def _end_interrupted(command: str) -> NoReturn:
    """End the process after Ctrl-C, with a line on what is left of the command's work."""
    ignore_interrupts()  # torchrun sends another one
    if _is_main_process():
        _print_error(f"interrupted{_AFTERWARDS.get(command, '')}")
    _nobody_reads()
    sys.exit(INTERRUPTED)


_AFTERWARDS = {
    "export": "; no file was written",
    "fuse": "; no file was written",
    "prune": "; no file was written",
    "push": "; the repository on the hub has all files of this command, or none",
    "quantize": "; no file was written",
    "recast": "; no file was written",
    "revert": "; no file was written",
    "sample": "; no file was written",
    "robustness": "; with --out, the same command resumes",
    "train": "; the same command resumes from the last checkpoint, if there is one",
}
"""What to know after Ctrl-C, by command."""


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command, by default that of this process; see `isomorph.cli.main`."""
    tokens = place_model(join_sizes(sys.argv[1:] if arguments is None else arguments) or ["--help"])
    try:
        if tokens[0] == "train" and {"--help", "-h"} & {*tokens}:
            train.describe_recipe(tokens[1:])
        with SafeChildProcesses(), _output_written(), warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            NEW_PATHS.clear()
            app(tokens)
    except Stopped as stopped:
        _print_error(str(stopped))
        _nobody_reads()
        sys.exit(128 + stopped.number)
    except KeyboardInterrupt:
        _end_interrupted(tokens[0])
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich ends a help page so when nobody reads it
            _end(SIGPIPE_STATUS)
        raise
    except (UserError, CycloptsError, OSError, RuntimeError, ValueError, AssertionError, MemoryError) as error:
        if was_interrupted():
            _end_interrupted(tokens[0])
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            _end(SIGPIPE_STATUS)
        if os.environ.get("ISOMORPH_DEBUG"):
            raise
        _end_with_error(name_options(_error_message(error), tokens[0]), getattr(error, "exit_status", 2))
