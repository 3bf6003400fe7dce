"""How data sets name things: splits, image files, classes; and long lists of names held in little memory."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isomorph.errors import UserError

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}
SPLITS = {"train": ("train",), "test": ("test", "val", "validation")}
"""The two splits, and the names that folders and files give them, the first found taken."""


class PackedStrings(Sequence[str]):
    """A list of strings as one block of bytes: a million file names without a million objects."""

    def __init__(self, block: np.ndarray, ends: np.ndarray) -> None:
        self.block, self.ends = block, ends

    @classmethod
    def of(cls, names: Iterable[str]) -> "PackedStrings":
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        start = self.ends[index - 1] if index else 0
        return self.block[start : self.ends[index]].tobytes().decode("utf-8", "surrogateescape")


class ImageFiles(Sequence[Path]):
    """The paths of image files, by their names below a folder."""

    def __init__(self, top: Path, names: Iterable[str]) -> None:
        self.top, self.below = top, PackedStrings.of(names)

    def __len__(self) -> int:
        return len(self.below)

    def __getitem__(self, index: Any) -> Any:
        return self.top / self.below[index]

    def member(self, index: int) -> str:
        """The name of a file below the folder."""
        return self.below[index]


def is_image_name(name: str) -> bool:
    return name[name.rfind(".") :].lower() in IMAGE_SUFFIXES


def contains_word(name: str, words: str | Sequence[str]) -> bool:
    """Whether a file's name has one of these words, by itself: val in `imagenet-val-01.tar`, not in `interval.tar`."""
    either = "|".join([words] if isinstance(words, str) else words)
    return re.search(rf"(?<![a-z])({either})(?![a-z])", name.lower()) is not None


def check_folder(root: Path, holds: str) -> None:
    """Raises: UserError when the folder of the data is not there."""
    if not root.is_dir():
        raise UserError(f"no folder {root}; give data.root the folder that holds {holds}")


def check_known_classes(place: object, found: Iterable[str], train: object, known: Sequence[str]) -> None:
    """Raises: UserError when the test split has a class that train lacks."""
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise UserError(f"{place} has classes that {train} lacks: {', '.join(unknown[:5])}")
