"""Names of checkpoints and of models on the hub (hf-hub:OWNER/NAME@REVISION), checked without torch."""

import errno
import os
import re
import tempfile
from pathlib import Path

from isomorph.errors import UserError

_PART = r"(?![.-])(?!\w*(?:--|\.\.))[A-Za-z0-9_.-]{1,96}(?<![.-])(?<!\.git)"
_REPOSITORY = re.compile(f"{_PART}/{_PART}")
HUB = ("hf-hub:", "hf_hub:")
# or any file that exists
CHECKPOINTS = (".safetensors", ".pth", ".pt", ".pth.tar", ".ckpt", ".bin")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_function(name: str) -> bool:
    """True for package.module:function, which builds a model of the user's own."""
    return bool(_FUNCTION.fullmatch(name)) and not name.startswith(HUB)


def check_repository(name: str) -> None:
    """Raise UserError unless this is OWNER/NAME with the letters that the hub allows."""
    if not _REPOSITORY.fullmatch(name):
        example = re.sub(r"[^A-Za-z0-9]+", "-", name.rpartition("/")[2]).strip("-") or "model"
        raise UserError(
            f"{name!r} is not a name for the hub; give OWNER/NAME, for example me/{example}"
        )


def require_writable(path: Path) -> None:
    """Check that a file can be written; its folder is created. Raises: UserError when it cannot be."""
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (FileExistsError, NotADirectoryError):
        raise UserError(
            f"cannot write {path}: a folder in its path is a file; give another path"
        ) from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


# found free by the command: it must not replace them, should another one write them first
NEW_PATHS: set[Path] = set()


def require_new(path: Path, overwrite: bool, option: str) -> None:
    """Raise UserError for a path that exists, unless it may be replaced; then and later, until it is written."""
    if overwrite:
        NEW_PATHS.discard(path.absolute())
        return
    if os.path.lexists(path):
        raise UserError(
            f"{option} {path} exists; give overwrite=True to replace it, or another name"
        )
    NEW_PATHS.add(path.absolute())


def must_be_new(path: Path) -> bool:
    """True for a path that the running command must not replace, or one in such a folder."""
    return not NEW_PATHS.isdisjoint((path.absolute(), path.absolute().parent))


def move_into_place(partial: Path, path: Path, new: bool = False) -> None:
    """Give a finished file or folder its name. Raises: UserError if it must be `new` and the name is taken, OSError."""
    try:
        if not new and not must_be_new(path):
            os.replace(partial, path)
        elif partial.is_dir():
            partial.rename(path)  # fails for a folder with files
        else:
            _link(partial, path)
            partial.unlink(missing_ok=True)
            NEW_PATHS.discard(path.absolute())
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        raise UserError(
            f"{path} exists now: another command wrote it; give overwrite=True, or another name"
        ) from None


def _link(partial: Path, path: Path) -> None:
    """Give a file a second name, which must be free, or on a disk without links its only one. Raises: OSError."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.replace(partial, path)
