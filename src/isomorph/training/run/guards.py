"""What keeps a run safe: a lock on its folder, signals that end it with its state saved, and a watch on the loss."""

import fcntl
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from isomorph.distributed import Runtime
from isomorph.errors import Stopped, UserError

ATTEMPTS = 100
"""Attempts to create a folder that other runs, which failed to start, remove in between."""

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that stop a run; SIGHUP means that the terminal or connection was closed."""

LOSS_WINDOW = 10
"""Steps over which the loss is averaged: the first ones, then every later group of as many."""

NOT_FINITE = "the loss is not finite"


@contextmanager
def lock_folder(folder: Path, runtime: Runtime) -> Iterator[str]:
    """Create and lock a folder; remove the folders created if they are still empty at the end.

    The leading process creates the folder and locks it (flock), for all processes of its run. The operating system
    releases the lock when the process ends. Yields a warning if the file system has no locks (some NFS mounts).

    Raises: UserError, in all processes, when another run holds the lock or the folder cannot be created.
    """
    handle, created, warning, problem = -1, list[Path](), "", ""
    if runtime.is_main:
        try:
            handle, created, warning = _create_and_lock(folder)
        except UserError as error:
            problem = str(error)
    try:
        if problem := runtime.gather(problem)[0]:
            raise UserError(problem)
        yield warning
    finally:
        for path in reversed(created):
            with suppress(OSError):  # not empty: the run has written files
                path.rmdir()
        if handle >= 0:
            os.close(handle)


def _create_and_lock(folder: Path) -> tuple[int, list[Path], str]:
    """Create and lock a folder; return the handle that holds the lock, the folders created, and a warning.

    Raises: UserError when another process holds the lock, or the folder cannot be created.
    """
    created: list[Path] = []
    reason = "another process keeps removing it"
    for _ in range(ATTEMPTS):
        try:
            created += _create_folders(folder)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError as error:
            reason = error.strerror or reason
            continue
        except (NotADirectoryError, FileExistsError):
            raise UserError(f"{folder} is a file or inside one; give `out` a folder") from None
        except OSError as error:
            raise UserError(f"cannot write {folder}: {error.strerror}; give `out` another folder") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise UserError(
                f"another process trains in {folder}; wait until it ends, or give `out` another folder"
            ) from None
        except OSError:
            return handle, created, f"the file system of {folder} has no locks; do not start a second run in it"
        if _is_same_folder(folder, handle):
            return handle, created, ""
        os.close(handle)
    raise UserError(f"cannot write {folder}: {reason}; give `out` another folder")


def _create_folders(folder: Path) -> list[Path]:
    """Create a folder and its parents; return those that did not exist, the outermost first."""
    created = []
    for path in reversed([path for path in (folder, *folder.parents) if not path.is_dir()]):
        try:
            path.mkdir()
            created.append(path)
        except FileExistsError:  # another process has created it, or it is a file
            if not path.is_dir():
                raise
    return created


def _is_same_folder(folder: Path, handle: int) -> bool:
    """Return True if the path is still the opened folder; a run that failed to start may have removed it."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(handle))
    except OSError:
        return False


class Diverged(UserError):
    """The loss or the weights are not finite, or the loss is far above its start; the last snapshot is unchanged.

    >>> issubclass(iso.training.Diverged, iso.UserError)
    True
    """


class StopRequest:
    """The number of the signal that asks the run to stop, or 0."""

    number = 0


Handler = Callable[[int, FrameType | None], None]


@contextmanager
def _handle_signals(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Install a handler for these signals; a SIGHUP that is ignored (nohup) stays so.

    Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    previous = {number: signal.getsignal(number) for number in numbers}
    if previous.get(signal.SIGHUP) is signal.SIG_IGN:
        del previous[signal.SIGHUP]
    for number in previous:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Record SIGTERM, SIGHUP and the first Ctrl-C instead of ending the process; a second Ctrl-C ends it."""
    request = StopRequest()
    interrupt = signal.getsignal(signal.SIGINT)

    def record(number: int, frame: FrameType | None) -> None:
        request.number = number
        if number == signal.SIGINT:  # schedulers send SIGTERM twice: to the processes, and through torchrun
            signal.signal(signal.SIGINT, interrupt)

    with _handle_signals(SIGNALS, record):
        yield request


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raise Stopped on SIGTERM and SIGHUP, before anything is written; Ctrl-C raises KeyboardInterrupt already."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name} before the first step; nothing was written", number)

    with _handle_signals((signal.SIGTERM, signal.SIGHUP), stop):
        yield


class LossGuard:
    """Detects a mean loss that is not finite, or more than `factor` times the first one (at least 1).

    `first` is the first mean loss, None until it is known; snapshots save it.
    """

    def __init__(self, factor: float | None, first: float | None = None) -> None:
        self.factor, self.first = factor, first

    def problem(self, loss: float) -> str:
        """Return the problem with the mean loss of the latest steps, or an empty string."""
        if not math.isfinite(loss):
            return NOT_FINITE
        if self.first is None:
            self.first = max(loss, 1.0)
        if self.factor is not None and loss > self.factor * self.first:
            return f"the loss is {loss:.3g}, more than divergence {self.factor:g} times the loss at the start"
        return ""
