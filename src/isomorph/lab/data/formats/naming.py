"""Names in data sets: of splits, image files and classes, in folders and lists; many of them in little memory."""

import os
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isomorph.errors import DataWarning, UserError, first_line
from isomorph.terminal_tables import count_of

# Those that torchvision's ImageFolder reads.
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"}
_NOT_IMAGES = {
    ".txt",
    ".md",
    ".cls",
    ".csv",
    ".json",
    ".xml",
    ".yaml",
    ".yml",
    ".html",
    ".pdf",
    ".db",
    ".ini",
    ".log",
}
# The two splits, and the words that name them, alone or in a longer name; the first that exists is used.
SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "val", "valid", "validation", "eval", "evaluation"),
}
_SPLIT_WORDS = {*SPLITS["train"], *SPLITS["test"]}
SPLIT_NAMES = {"train": "train", "test": "test, val or validation"}
MAX_UNNAMED_CLASSES = (
    1_000_000  # labels from this number on are taken for mistakes where no list names the classes
)


class PackedStrings(Sequence[str]):
    """A list of strings stored as one block of bytes: a million file names without a million objects."""

    def __init__(self, block: np.ndarray, ends: np.ndarray) -> None:
        self.block = block
        self.ends = ends

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
        self.top = top
        self.names = PackedStrings.of(names)

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


def count_left_out(name: str, left_out: Counter[str]) -> None:
    """Count a file that is not read, by its ending, unless it is a text or a table for certain, or a README."""
    suffix = os.path.splitext(name)[1].lower() or "no ending"
    if suffix not in _NOT_IMAGES and ("/" in name or suffix != "no ending"):
        left_out[suffix] += 1


def image_files(folder: Path) -> list[Path]:
    """Return the image files in a folder and the folders in it, sorted, without hidden ones."""
    paths = []
    for path in sorted(folder.rglob("*")):
        if is_hidden(*path.relative_to(folder).parts) or path.is_dir():
            continue
        if is_image_name(path.name):
            paths.append(path)
    return paths


def is_hidden(*names: str) -> bool:
    """True if a name, of the parts of a path, begins with a dot or is one that macOS adds to archives."""
    return any(name.startswith((".", "__MACOSX")) for name in names)


def read_text(path: Path) -> str:
    """Return the text of a file. Raises: UserError when it cannot be read, or is not text in UTF-8."""
    try:
        return path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} as text in UTF-8: {first_line(error)}") from None


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, without empty ones. Raises: as `read_text`."""
    return list(filter(None, map(str.strip, read_text(path).split("\n"))))


def composed(name: str) -> str:
    """Return a name in the composed Unicode form: an accent that was stored as a letter of its own joins its letter."""
    return unicodedata.normalize("NFC", name)


def split_words(name: str) -> list[str]:
    """Return the words in a name that stand for splits, in any case.

    >>> from isomorph.lab.data.formats.naming import split_words
    >>> [split_words(name) for name in ("imagenet-VAL-01", "TrainingSet", "interval")]
    [['val'], ['training'], []]
    """
    return [word for word in _words(name) if word in _SPLIT_WORDS]


def names_a_split(name: str) -> bool:
    """True if one word of a name stands for a split."""
    return len(split_words(name)) == 1


def names_only_a_split(name: str) -> bool:
    """True if a name for a split has no other words: `train`, `TestSet`, `val2017`, not `seg_train`."""
    others = [word for word in _words(name) if word]
    return names_a_split(name) and len(others) == 1


def _words(name: str) -> list[str]:
    """Return the words of a name in lower case, without `set` at their ends."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", composed(name))
    return [word.lower().removesuffix("set") for word in words]


def ambiguous_split(root: Path, named: str, other: str) -> UserError:
    """Return the error for a folder of which one entry is named for a split, and another holds images too."""
    return UserError(
        f"{root} has {named}, named for a split, and images in {other}, which is not; "
        f"move all classes into a folder train or val, or rename {named} if it is a class"
    )


def named_for(paths: Collection[Path], split: str) -> list[Path]:
    """Return the files or folders named for a split, one per word. Raises: UserError for several of one word."""
    chosen = []
    for word in SPLITS[split]:
        named = sorted(path for path in paths if split_words(path.stem) == [word])
        named = _nearest_spelling(named, word)
        if len(named) > 1:
            several = ", ".join(path.name for path in named)
            raise UserError(
                f"{named[0].parent} has {several} for the {split} split; rename the one to use to {word}"
            )
        chosen += named
    return chosen


def _nearest_spelling(paths: list[Path], word: str) -> list[Path]:
    """Return the paths whose name is the word; else those that are it in another case; else all."""
    exact = [path for path in paths if path.stem == word]
    in_any_case = [path for path in paths if path.stem.lower() == word]
    return exact or in_any_case or paths


def visible(folder: str | Path, suffix: str = "/") -> list[Path]:
    """Return the folders in a folder, or the files with a suffix, sorted, without hidden ones; none if it is missing.

    Raises: UserError when the folder cannot be read.
    """
    if not os.path.isdir(folder):
        return []
    try:
        with os.scandir(folder) as entries:
            return sorted(
                Path(folder, entry.name) for entry in entries if _is_visible(entry, suffix)
            )
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}") from None


def _is_visible(entry: os.DirEntry[str], suffix: str) -> bool:
    if is_hidden(entry.name):
        return False
    if suffix == "/":
        return entry.is_dir()
    return entry.name.endswith(suffix) and entry.is_file()


def find_folder(root: Path, names: Iterable[str]) -> Path | None:
    """Return the first of these folders below a folder that exists, in any case; a name may have several parts."""
    for name in names:
        folder: Path | None = root
        for part in name.split("/"):
            folder = _folder_inside(folder, part) if folder else None
        if folder:
            return folder
    return None


def _folder_inside(folder: Path, name: str) -> Path | None:
    """Return the folder of a name, else the first of that name in another case or Unicode form."""
    inside = visible(folder)
    for path in inside:
        if path.name == name:
            return path
    for path in inside:
        if composed(path.name).lower() == name.lower():
            return path
    return None


def check_folder(root: Path, holds: str) -> None:
    """Raise a UserError when the folder of the data does not exist."""
    if not os.path.isdir(root):
        raise UserError(
            f"there is no folder {root}; data.root must be the folder that holds {holds}"
        )


def report_left_out(where: object, left_out: Mapping[str, int]) -> None:
    """Warn about files that are not read, by suffix or reason."""
    total = sum(left_out.values())
    if total:
        most = Counter(left_out).most_common(5)
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in most if count)
        warnings.warn(
            f"{count_of(total, 'file')} in {where} left out ({reasons})", DataWarning, stacklevel=2
        )


def check_one_split(words: Mapping[Path, Sequence[str]]) -> None:
    """Raise a UserError for a file whose words name both splits."""
    for path, named in words.items():
        if len({word in SPLITS["train"] for word in named}) > 1:
            raise UserError(
                f"{path} is named for training and for testing; name its folder and file for one "
                "of them"
            )


def report_unnamed(root: Path, words: Mapping[Path, Sequence[str]]) -> None:
    """Warn about files without a word for a split, where others have one.

    Raises: UserError when most have none, so that a file that has one may be that of a class: test_tube, training_shoe.
    """
    named = [path for path, names in words.items() if names]
    unnamed = len(words) - len(named)
    if not named:
        return
    if unnamed > len(named):
        others = count_of(unnamed, "file")
        raise UserError(
            f"{root} has {named[0].relative_to(root)}, named for a split, and {others} that are not; "
            "put train, val or test in the name of every file, or of its folder"
        )
    report_left_out(root, {"without train, val or test in the name": unnamed})


def check_known_classes(
    test: object, classes: Iterable[str], train: object, known: Iterable[str]
) -> None:
    """Raise a UserError when the classes of a test split include one that train lacks."""
    unknown = sorted(set(classes) - set(known))
    if unknown:
        raise UserError(f"{test} has classes that {train} lacks: {', '.join(unknown[:5])}")


def numbered_by_name(
    names: Sequence[str], known: Sequence[str]
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the classes, in the order of the known ones, and the number among them of each of the names.

    Known names that are equal are one class. All names must be known.

    Shape: -> (classes), (len(names),)

    >>> from isomorph.lab.data.formats.naming import numbered_by_name
    >>> numbered_by_name(["bee", "ant"], ["ant", "bee", "cat"])
    (('ant', 'bee', 'cat'), array([1, 0]))
    """
    classes = tuple(dict.fromkeys(known))
    number_of = {name: number for number, name in enumerate(classes)}
    return classes, np.array([number_of[name] for name in names], np.int64)


def number_classes(largest: int, where: object) -> list[str]:
    """Return the numbers up to the largest label as names of classes. Raises: UserError for one that is too large."""
    if largest >= MAX_UNNAMED_CLASSES:
        raise UserError(
            f"{where} has label {largest}; labels are numbers of classes, counted from 0"
        )
    return [str(number) for number in range(largest + 1)]
