"""What Ctrl-C does in isomorph's command line: end it with one line and exit code 130."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

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


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, so that a command can remove its temporary files."""
    _handle_interrupt(_raise)


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
