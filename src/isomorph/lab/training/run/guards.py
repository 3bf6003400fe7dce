"""What keeps a run safe: a lock on its folder, and signals that end it with its state saved."""

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from isomorph.checkpoints.files import remove_partial_files
from isomorph.errors import UserError
from isomorph.lab.distributed import Runtime
from isomorph.lab.training.run.snapshot import restore_replaced

# Signals that stop a run; SIGHUP means that the terminal or connection was closed.
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@contextmanager
def lock_folder(folder: Path, runtime: Runtime) -> Iterator[str]:
    """Create and lock a folder; remove the folders created if they are still empty at the end.

    The leading process creates the folder and locks it (flock), for all processes of its run. The operating system
    releases the lock when the process ends. Yields a warning if the file system has no locks (some NFS mounts).

    Raises: UserError, in all processes, when another run holds the lock or the folder cannot be created.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    handle, warning = runtime.on_main(lambda: _create_and_lock(folder))
    try:
        yield warning
    finally:
        if runtime.is_main:
            for path in new:
                with suppress(OSError):  # not empty: the run has written files
                    path.rmdir()
            os.close(handle)


def _create_and_lock(folder: Path) -> tuple[int, str]:
    held = UserError(
        f"another process trains in {folder}; wait until it ends, or give `out` another folder"
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (NotADirectoryError, FileExistsError):
        raise UserError(f"{folder} is a file or inside one; give `out` a folder") from None
    except OSError as error:
        raise UserError(
            f"cannot write {folder}: {error.strerror}; give `out` another folder"
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise held from None
    except OSError:
        restore_replaced(folder)
        return handle, f"the file system of {folder} has no locks; do not start a second run in it"
    if not folder.exists():  # removed meanwhile by another run, which failed to start
        os.close(handle)
        raise held
    restore_replaced(folder)
    remove_partial_files(folder)
    return handle, ""


class Diverged(UserError):
    """The loss or the weights are not finite; the last snapshot is unchanged.

    >>> issubclass(iso.training.Diverged, iso.UserError)
    True
    """


class StopRequest:
    """The number of the signal that asks the run to stop, or 0."""

    number = 0


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Record SIGTERM, SIGHUP and the first Ctrl-C instead of ending the process; a second Ctrl-C ends it.

    Ignored signals stay ignored. Does nothing outside the main thread.
    """
    request = StopRequest()
    before: dict[int, Any] = {}

    def record(number: int, frame: FrameType | None) -> None:
        request.number = number
        # schedulers send SIGTERM twice: to the processes, and through torchrun
        if number == signal.SIGINT:
            signal.signal(number, before[number])

    # only the main thread can set handlers
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        before = {
            number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN
        }
    for number in before:
        signal.signal(number, record)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
