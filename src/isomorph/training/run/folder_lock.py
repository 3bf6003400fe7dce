"""One run at a time in a folder: made and locked before anything is read or decided there."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from isomorph.distributed import Runtime
from isomorph.errors import UserError

ATTEMPTS = 100
"""How often a folder is made again when another start, which failed, has removed it in between."""


@contextmanager
def lock_folder(folder: Path, runtime: Runtime) -> Iterator[str]:
    """Keeps other runs out of a folder; one that it had to make, and that has stayed empty, is removed at the end.

    The leading process makes the folder and locks it (flock), for all processes of its run. The lock ends with the
    process, however that ends. Yields a sentence where the file system has no such locks (some NFS mounts).

    Raises: UserError, in all processes, when another run is there or the folder cannot be made.
    """
    handle, made, said, problem = -1, list[Path](), "", ""
    if runtime.leads:
        try:
            handle, made, said = _create_and_lock(folder)
        except UserError as error:
            problem = str(error)
    try:
        if problem := runtime.gathered(problem)[0]:
            raise UserError(problem)
        yield said
    finally:
        for path in reversed(made):
            with suppress(OSError):  # not empty: the run has begun
                path.rmdir()
        if handle >= 0:
            os.close(handle)


def _create_and_lock(folder: Path) -> tuple[int, list[Path], str]:
    """Makes and locks a folder: the handle that holds the lock, the folders made for it, and what is to be said.

    Raises: UserError when another process holds it, or it cannot be made.
    """
    made: list[Path] = []
    reason = "it is removed as often as it is made"
    for _ in range(ATTEMPTS):
        try:
            made += _create_folders(folder)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError as error:
            reason = error.strerror or reason
            continue
        except (NotADirectoryError, FileExistsError):
            raise UserError(f"{folder} is a file, or lies in one; give `out` a folder") from None
        except OSError as error:
            raise UserError(f"cannot write {folder}: {error.strerror}; give `out` another folder") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise UserError(f"another process trains in {folder}; wait for it, or give `out` another folder") from None
        except OSError:
            return handle, made, f"the file system of {folder} has no locks: start no second run in it"
        if _is_same_folder(folder, handle):
            return handle, made, ""
        os.close(handle)
    raise UserError(f"cannot write {folder}: {reason}; give `out` another folder")


def _create_folders(folder: Path) -> list[Path]:
    """Makes a folder and those above it; returns those that were not there, the outermost first."""
    made = []
    for path in reversed([path for path in (folder, *folder.parents) if not path.is_dir()]):
        try:
            path.mkdir()
            made.append(path)
        except FileExistsError:  # made by another process since, or a file
            if not path.is_dir():
                raise
    return made


def _is_same_folder(folder: Path, handle: int) -> bool:
    """Whether a name still leads to the folder that was opened: a start that failed may have removed it."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(handle))
    except OSError:
        return False
