"""Image folders and webdataset shards inside tar files, never unpacked."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from isomorph.data.formats.naming import (
    SPLITS,
    check_folder,
    check_known_classes,
    contains_word,
)
from isomorph.data.formats.tar_index import (
    ShardIndex,
    TarImages,
    UnlabelledError,
    index_shards,
)
from isomorph.data.sources import ImageSubset, Source, consecutive_ranges
from isomorph.errors import UserError

_CLASS_LIST_KEYS = ("classes", "class_names", "classnames", "names")
"""Keys under which a JSON file next to the shards may list the names of the classes."""


def tar(split: str, root: Path) -> Source:
    """Open images inside `root/train.tar` and `root/val.tar` (or test, validation), or inside one tar per class.

    Such a tar holds one folder per class, or one tar per class (like the file of ImageNet's training images). The tars
    of classes may also be `root/train/*.tar`. Classes are numbered as in train, if it exists. The source's shards are
    its classes, since the images of one class are stored together.

    Raises: UserError when a tar is missing, damaged, holds no class folders, or has a class that train lacks.
    """
    check_folder(root, "train.tar and val.tar")
    train, found = (_find_archives(root, SPLITS[name]) for name in ("train", split))
    if not found:
        either = " or ".join(f"{name}.tar" for name in SPLITS[split])
        raise UserError(f"{root} has no {either}, and no folder of that name with one tar per class")
    classes, paths = found.classes, found.member_paths
    order = sorted((i for i, (name, _) in enumerate(paths) if name), key=paths.__getitem__)
    if not order:
        raise UserError(f"{found.path} has no class folders with images; its members must be like cat/1.jpg")
    if train and split != "train":
        check_known_classes(found.path, classes, train.path, train.classes)
        classes = train.classes
    label_of = {name: i for i, name in enumerate(classes)}
    labels = np.asarray([label_of[paths[i][0]] for i in order])
    return Source(
        ImageSubset(TarImages(found.indices), np.asarray(order)),
        labels,
        classes,
        consecutive_ranges(np.bincount(labels)),
    )


@dataclass(frozen=True)
class _SplitArchives:
    """The tar files of a split: `path` itself, or one per class in the folder `path`."""

    path: Path
    files: list[Path]

    @property
    def has_file_per_class(self) -> bool:
        return self.path not in self.files

    @cached_property
    def indices(self) -> list[ShardIndex]:
        """The index of each tar."""
        return index_shards(self.files, "images")

    @cached_property
    def classes(self) -> list[str]:
        """Sorted names of the classes; with one tar per class the tars are not read for it, and may be empty."""
        if self.has_file_per_class:
            return sorted(path.stem for path in self.files)
        return sorted({name for name, _ in self.member_paths if name})

    @cached_property
    def member_paths(self) -> list[tuple[str, list[str]]]:
        """The class of every member and its path below the class; an empty class for one outside a class folder."""
        if self.has_file_per_class:
            pairs = zip(self.files, self.indices, strict=True)
            return [(path.stem, name.split("/")) for path, index in pairs for name in index.names]
        return _class_paths(self.indices[0].names)


def _find_archives(root: Path, names: Sequence[str]) -> _SplitArchives | None:
    """Return the tar files of a split, by the first of its names; tars without classes (of test images) come last."""
    candidates = [_SplitArchives(root / f"{name}.tar", [root / f"{name}.tar"]) for name in names]
    candidates += [_SplitArchives(root / name, sorted((root / name).glob("[!.]*.tar"))) for name in names]
    found = [archives for archives in candidates if archives.files and archives.files[0].is_file()]
    return next((archives for archives in found if archives.classes), found[0] if found else None)


def _class_paths(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return the class of every member of one tar and its path below the class.

    A single top folder named for a split (train/) is not a class.
    """
    parts = [name.split("/") for name in names]
    tops = {first for first, *_ in parts}
    if len(tops) == 1 and tops <= {*SPLITS["train"], *SPLITS["test"]}:
        parts = [below for _, *below in parts]
    return [(below[0] if len(below) > 1 else "", below[1:]) for below in parts]


def webdataset(split: str, root: Path) -> Source:
    """Open samples `key.jpg` (or jpeg, png, webp) + `key.cls` (or `key.json` with "label") in tar shards below `root`.

    A shard's split is the word train, test, val or validation in its name or its folder's; if no shard has such a word,
    all are test shards. Names of the classes come from `classnames.txt` (one per line) or a JSON file with a list of
    "classes" in `root`; without them the names are the numbers.

    Raises: UserError when shards are missing, damaged, compressed, or a sample has no label.
    """
    check_folder(root, "shards like train-0000.tar")
    found = _shards_by_split(root)
    if not found[split]:
        raise UserError(f"{root} has no shard for the {split} split; name them like {SPLITS[split][-1]}-0000.tar")
    indices = _index_labelled_shards(found[split])
    if not any(len(index.labels) for index in indices):
        raise UserError(
            f"no images in {found[split][0][0].parent}; shards must hold key.jpg (or jpeg, png, webp) + key.cls"
        )
    others = []
    with suppress(UnlabelledError):  # a split without labels adds no class
        others = [
            index for name in SPLITS if name != split and found[name] for index in _index_labelled_shards(found[name])
        ]
    largest = max(int(index.labels.max(initial=-1)) for index in [*indices, *others])
    classes = _listed_classes(root) or [str(i) for i in range(largest + 1)]
    if largest >= len(classes):
        raise UserError(f"{root} names {len(classes)} classes, but its shards have label {largest}; labels start at 0")
    labels = np.concatenate([index.labels for index in indices])
    return Source(TarImages(indices), labels, classes, consecutive_ranges(len(index.labels) for index in indices))


def _index_labelled_shards(choices: Sequence[Sequence[Path]]) -> list[ShardIndex]:
    """Return the indices of the first set of shards that has labels. Raises: UserError when none has."""
    for shards in choices[:-1]:
        with suppress(UnlabelledError):
            return index_shards(shards, "samples")
    return index_shards(choices[-1], "samples")


def _shards_by_split(root: Path) -> dict[str, list[list[Path]]]:
    """Return the shards below a folder by split: one sorted list for each of the split's names that shards have.

    Raises: UserError when all shards are compressed.
    """
    shards = sorted(path for path in root.rglob("*.tar") if not path.name.startswith("."))
    if not shards and (packed := [path for pattern in ("*.tar.*", "*.tgz") for path in sorted(root.rglob(pattern))]):
        raise UserError(f"{packed[0]} is compressed, so its members cannot be read in place; unpack it to a .tar")
    found: dict[str, list[list[Path]]] = {}
    for split, words in SPLITS.items():
        named = ([path for path in shards if _belongs_to_split(path.relative_to(root), word)] for word in words)
        found[split] = [paths for paths in named if paths]
    if shards and not any(found.values()):
        found["test"] = [shards]
    return found


def _belongs_to_split(path: Path, word: str) -> bool:
    return contains_word(path.name, word) or word in path.parts[:-1]


def _listed_classes(root: Path) -> list[str]:
    """Return the names of the classes from a file next to the shards; empty without one.

    Raises: UserError when a file cannot be read.
    """
    if (root / "classnames.txt").is_file():
        return [line.strip() for line in (root / "classnames.txt").read_text().splitlines() if line.strip()]
    for path in sorted(root.glob("*info*.json")):
        try:
            info = json.loads(path.read_text())
        except (ValueError, OSError):
            raise UserError(f"cannot read {path} as JSON; fix or remove it") from None
        names = [info[key] for key in _CLASS_LIST_KEYS if isinstance(info, dict) and isinstance(info.get(key), list)]
        if names:
            return [str(name) for name in names[0]]
    return []
