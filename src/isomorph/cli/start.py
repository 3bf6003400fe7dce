"""The start of a command: Ctrl-C ends it with one line and exit code 130, and torch waits until it is parsed."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import isomorph as iso
from isomorph.errors import UserError
from isomorph.process import keep_freed_memory

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command that Ctrl-C has ended."""

_pressed = False


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the process at once.

    For the time in which modules are imported: KeyboardInterrupt there may be lost in an import of C code, or become
    another error.
    """
    global _pressed
    _pressed = False
    _handle_interrupt(_exit)


def ignore_interrupts() -> None:
    """Let further Ctrl-C do nothing, while a process ends."""
    _handle_interrupt(signal.SIG_IGN)


@contextmanager
def handler_kept() -> Iterator[None]:
    """Context that restores the handler of SIGINT at its end."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is not None:
            _handle_interrupt(before)


def was_interrupted() -> bool:
    """Return True if Ctrl-C has raised KeyboardInterrupt, even if another error is what arrived."""
    return _pressed


def _handle_interrupt(handler: signal.Handlers | object) -> None:
    """Set the handler of SIGINT, unless the process was started to ignore it; only the main thread may."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]


def _exit(number: int, frame: FrameType | None) -> None:
    """End the process without running any other code."""
    with suppress(OSError, ValueError, RuntimeError):
        sys.stdout.flush()
    os.write(2, b"isomorph: interrupted\n")
    os._exit(INTERRUPTED)


def _raise(number: int, frame: FrameType | None) -> None:
    """Note the interrupt and raise it."""
    global _pressed
    _pressed = True
    raise KeyboardInterrupt


@contextmanager
def loading() -> Iterator[None]:
    """Context for the imports of what a command computes with: torch, timm and the packages of isomorph.

    Modules of `isomorph.cli` import none of these at their top, so that help, lists and errors in the command line are
    printed at once. Ctrl-C ends the process while modules are imported, and raises KeyboardInterrupt afterwards.

    Raises: UserError if torch, torchvision, timm or a package that they need cannot be imported; an ImportError of a
        module of isomorph, which is no user's mistake, stays as it is.
    """
    exit_on_interrupt()
    keep_freed_memory()
    try:
        iso.prepare()
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "isomorph":
            raise
        raise UserError(" ".join(str(error).split())) from error
    finally:
        _handle_interrupt(_raise)
