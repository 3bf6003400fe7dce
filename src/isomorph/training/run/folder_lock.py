"""A lock that keeps a second run out of a run's folder."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from isomorph.distributed import Runtime
from isomorph.errors import UserError

ATTEMPTS = 100
"""Attempts to create a folder that other runs, which failed to start, remove in between."""


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
