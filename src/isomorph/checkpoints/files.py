"""Checkpoint files: written completely or not at all, and the headers of safetensors files."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from glob import escape
from pathlib import Path

from safetensors import SafetensorError, safe_open

from isomorph.errors import UserError


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files for this path whose processes were killed while they wrote."""
    for partial in path.parent.glob(f".{escape(path.name)}.*.partial") if os.name == "posix" else ():
        process = partial.suffixes[-2].removeprefix(".")
        if process.isdecimal() and not _is_running(int(process)):
            with suppress(OSError):  # of another user
                partial.unlink()


def _is_running(process: int) -> bool:
    """Return whether a process of this machine runs, by a signal that does nothing."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary file, flush it to disk and rename it, so that readers see the old or the new file.

    Raises: UserError when the file cannot be written; the old file is then unchanged.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError for a full disk
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"cannot write {path}: {reason}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """Check that a file can be written; its folder is created. Raises: UserError when it cannot be."""
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def read_header(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raises: UserError when it cannot be read."""
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}")
    try:
        with safe_open(str(path), framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file ({error}); it may be truncated") from None


def is_complete(path: Path) -> bool:
    """True if a safetensors file exists and is not truncated."""
    try:
        with safe_open(str(path), framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False
