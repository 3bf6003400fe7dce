"""Files that a command will write: whether it can is known before hours of work."""

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
