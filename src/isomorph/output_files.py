"""Check before a long computation that its result can be written."""

import tempfile
from pathlib import Path

from isomorph.errors import UserError


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
