"""Names in data sets: of splits, image files and classes; and long lists of names in little memory."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isomorph.errors import UserError

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}
SPLITS = {"train": ("train",), "test": ("test", "val", "validation")}
"""The two splits, and the names that folders and files have for them; the first that exists is used."""


class PackedStrings(Sequence[str]):
    """A list of strings stored as one block of bytes: a million file names without a million objects."""

    def __init__(self, block: np.ndarray, ends: np.ndarray) -> None:
        self.block, self.ends = block, ends

    @classmethod
    def of(cls, names: Iterable[str]) -> "PackedStrings":
        """Pack an iterable of strings."""
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
        self.top, self.names = top, PackedStrings.of(names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        return self.top / self.names[index]

    def file_name(self, index: int) -> str:
        """Return the name of a file below the folder."""
        return self.names[index]


def is_image_name(name: str) -> bool:
    """True if a file name ends like an image's."""
    return name[name.rfind(".") :].lower() in IMAGE_SUFFIXES


def contains_word(name: str, words: str | Sequence[str]) -> bool:
    """True if a file's name has one of these words by itself: val in `imagenet-val-01.tar`, not in `interval.tar`."""
    either = "|".join([words] if isinstance(words, str) else words)
    return re.search(rf"(?<![a-z])({either})(?![a-z])", name.lower()) is not None


def check_folder(root: Path, holds: str) -> None:
    """Raise a UserError when the folder of the data does not exist."""
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; data.root must be the folder that holds {holds}")


def check_known_classes(test: object, classes: Iterable[str], train: object, known: Sequence[str]) -> None:
    """Raise a UserError when the classes of a test split include one that train lacks."""
    unknown = sorted(set(classes) - set(known))
    if unknown:
        raise UserError(f"{test} has classes that {train} lacks: {', '.join(unknown[:5])}")
