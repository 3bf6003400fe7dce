"""This process and those that it starts: memory, import path, and what Ctrl-C does, set before torch is loaded.

It imports no package.
"""

import ctypes
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt, from glibc's malloc.h
# bytes up to which memory is kept; older glibc accepts at most the second
_MMAP_LIMITS = (2**30, 2**25)
_SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"


def is_main_process() -> bool:
    """True if this is the first, or the only, of the processes that a launcher such as torchrun has started."""
    rank = os.environ.get("RANK", "")
    return not (rank.isdecimal() and int(rank))


def returns_freed_memory() -> bool:
    """True if the C library is glibc and the environment leaves it at its default, to return large freed blocks."""
    is_set = any(f"MALLOC_{name}_THRESHOLD_" in os.environ for name in ("TRIM", "MMAP"))
    return platform.libc_ver()[0] == "glibc" and not is_set


def keep_freed_memory() -> bool:
    """Keep freed memory in the process, so that the next training step does not ask the system for it again.

    By default glibc returns large freed blocks to the system, and every step of a training loop on a CPU pays for new,
    zeroed pages. Call this once, before the first large tensor. Blocks of up to 1 GiB are kept, so the process stays
    as large as it has been at its peak. isomorph's commands call it; nothing changes on other systems than Linux with
    glibc, on GPU memory, or where the environment sets MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_.

    Returns True if freed memory is kept from now on, False if nothing was changed.

    >>> iso.keep_freed_memory() in (True, False)
    True
    """
    if not returns_freed_memory():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1)) and any(
        mallopt(_MMAP_THRESHOLD, limit) for limit in _MMAP_LIMITS
    )


@contextmanager
def replaced_attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Give an attribute of a library's module another value within the block, where no argument does it."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class SafeChildProcesses:
    """Context manager in which child processes start without the working folder on their import path.

    PYTHONPATH still applies to them.
    """

    def __enter__(self) -> None:
        self.before = os.environ.get(_SAFE_PATH_VARIABLE)
        os.environ[_SAFE_PATH_VARIABLE] = "1"

    def __exit__(self, *error: object) -> None:
        if self.before is None:
            os.environ.pop(_SAFE_PATH_VARIABLE, None)
        else:
            os.environ[_SAFE_PATH_VARIABLE] = self.before


INTERRUPTED = 128 + signal.SIGINT  # exit code of a command that Ctrl-C has ended

_pressed = False


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the process at once.

    For the time in which modules are imported: KeyboardInterrupt there may be lost in an import of C code, or become
    another error.
    """
    global _pressed
    _pressed = False
    _set_handler(_exit)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, so that a command can remove its temporary files."""
    _set_handler(_raise)


def ignore_interrupts() -> None:
    """Let further Ctrl-C do nothing, while a process ends."""
    _set_handler(signal.SIG_IGN)


@contextmanager
def handler_kept(number: int = signal.SIGINT) -> Iterator[None]:
    """Context that restores the handler of a signal at its end."""
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if before is not None:
            _set_handler(before, number)


def was_interrupted() -> bool:
    """Return True if Ctrl-C has raised KeyboardInterrupt, even if another error is what arrived."""
    return _pressed


def _set_handler(handler: signal.Handlers | object, number: int = signal.SIGINT) -> None:
    """Set the handler of a signal, unless the process was started to ignore it; only the main thread may."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)  # type: ignore[arg-type]


def _exit(number: int, frame: FrameType | None) -> None:
    with suppress(OSError, ValueError, RuntimeError):
        sys.stdout.flush()
    os.write(2, b"isomorph: interrupted\n")
    os._exit(INTERRUPTED)


def _raise(number: int, frame: FrameType | None) -> None:
    global _pressed
    _pressed = True
    raise KeyboardInterrupt
