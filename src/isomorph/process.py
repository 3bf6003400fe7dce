"""This process and those that it starts: their memory and import path, set before torch is loaded.

It imports only modules of the standard library.
"""

import ctypes
import os
import platform
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, from glibc's malloc.h."""
_MMAP_LIMITS = (2**30, 2**25)
"""Sizes in bytes up to which memory is kept; older versions of glibc accept at most the second."""
_SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"


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
    if platform.libc_ver()[0] != "glibc":
        return False
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1)) and any(mallopt(_MMAP_THRESHOLD, limit) for limit in _MMAP_LIMITS)


def child_import_path() -> list[str]:
    """Return the import path for a child process: this one's, with an interactive session's working folder last."""
    named = [path for path in sys.path if path]
    return named if len(named) == len(sys.path) else [*named, os.getcwd()]


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
