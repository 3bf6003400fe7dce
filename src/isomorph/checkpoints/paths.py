"""Names of checkpoints, checked without torch: files to write, and models on the Hugging Face hub.

On the hub a model is OWNER/NAME, as a model of a command hf-hub:OWNER/NAME@REVISION.
"""

import re
import tempfile
from pathlib import Path, PurePath
from typing import NamedTuple

from isomorph.errors import UserError

_PART = r"(?![.-])(?!\w*(?:--|\.\.))[A-Za-z0-9_.-]{1,96}(?<![.-])"
_REPOSITORY = re.compile(f"{_PART}/{_PART}")
_MODEL = re.compile(r"hf[-_]hub:([^@]*)(?:@(.+))?")


HUB = ("hf-hub:", "hf_hub:")
"""Prefixes of models on the hub."""


class HubModel(NamedTuple):
    """A model on the hub: its repository as OWNER/NAME, and a branch, tag or commit, None for the latest of main."""

    repository: str
    revision: str | None = None


def parse_hub_name(name: str | PurePath) -> HubModel | None:
    """Return the model that hf-hub:OWNER/NAME or hf-hub:OWNER/NAME@REVISION names; None for another name.

    timm's registry names have no owner: hf-hub:resnet18 is one too, and the hub says that it has no such model.
    """
    match = _MODEL.fullmatch(name.as_posix() if isinstance(name, PurePath) else name)
    return HubModel(match[1], match[2]) if match else None


def check_repository(name: str) -> None:
    """Raise UserError unless this is OWNER/NAME with the letters that the hub allows."""
    if not _REPOSITORY.fullmatch(name):
        example = re.sub(r"[^A-Za-z0-9]+", "-", name.rpartition("/")[2]).strip("-") or "model"
        raise UserError(f"{name!r} is not a name for the hub; give OWNER/NAME, for example me/{example}")


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
