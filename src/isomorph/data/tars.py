"""Image folders and webdataset shards inside tar files, never unpacked."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isomorph.data.names import SPLITS, refuse_no_folder, refuse_unknown_classes, says
from isomorph.data.shards import Index, Members, images, index_shards, samples
from isomorph.data.sources import Chosen, Source, runs
from isomorph.errors import UserError

LISTS = ("classes", "class_names", "classnames", "names")
"""Where a JSON file beside the shards may list the names of the classes."""


def tar(split: str, root: Path) -> Source:
    """A folder of images inside `root/train.tar` and `root/val.tar` (or test, validation), or one tar a class.

    Such a tar holds one folder a class, or one tar a class (as ImageNet's training images come); `root/train/*.tar` may
    be these too. Classes are numbered as in train, where there is one. The source's shards are its classes: the images
    of one lie together.

    Raises: UserError when a tar is missing, damaged, holds no class folders, or has a class that train lacks.
    """
    refuse_no_folder(root, "train.tar and val.tar")
    train, found = (archives(root, SPLITS[name]) for name in ("train", split))
    if not found:
        either = " or ".join(f"{name}.tar" for name in SPLITS[split])
        raise UserError(f"{root} has no {either}, nor a folder of such a name that holds one tar per class")
    indices = index_shards(found.paths, images)
    placed = class_paths(found, indices)
    classes = sorted({name for name, _ in placed if name})
    if not classes:
        raise UserError(f"{found.place} has no class folders with images; its members must be like cat/1.jpg")
    if train and split != "train":
        known = class_names(train)
        refuse_unknown_classes(found.place, classes, train.place, known)
        classes = known
    order = sorted((i for i, (name, _) in enumerate(placed) if name), key=placed.__getitem__)
    number = {name: i for i, name in enumerate(classes)}
    labels = np.asarray([number[placed[i][0]] for i in order])
    return Source(Chosen(Members(indices), np.asarray(order)), labels, classes, runs(np.bincount(labels)))


@dataclass(frozen=True)
class Archives:
    """The tar files of a split: `place` itself, or one a class in the folder `place`."""

    place: Path
    paths: list[Path]

    @property
    def one_a_class(self) -> bool:
        return self.place not in self.paths


def archives(root: Path, names: Sequence[str]) -> Archives | None:
    """The tar files of the split of the first name found."""
    for name in names:
        if (root / f"{name}.tar").is_file():
            return Archives(root / f"{name}.tar", [root / f"{name}.tar"])
        if inside := sorted((root / name).glob("[!.]*.tar")):
            return Archives(root / name, inside)
    return None


def class_names(found: Archives) -> list[str]:
    """Sorted names of the classes in these tars; one tar a class need not be read for it."""
    if found.one_a_class:
        return [path.stem for path in found.paths]
    return sorted({name for name, _ in class_paths(found, index_shards(found.paths, images)) if name})


def class_paths(found: Archives, indices: Sequence[Index]) -> list[tuple[str, list[str]]]:
    """Class of every member and its path below the class; no class for one outside a class folder.

    A folder around all of a tar's members that is named for a split is no class.
    """
    if found.one_a_class:
        pairs = zip(found.paths, indices, strict=True)
        return [(path.stem, name.split("/")) for path, index in pairs for name in index.names]
    parts = [name.split("/") for name in indices[0].names]
    tops = {first for first, *_ in parts}
    if len(tops) == 1 and tops <= {*SPLITS["train"], *SPLITS["test"]}:
        parts = [below for _, *below in parts]
    return [(below[0] if len(below) > 1 else "", below[1:]) for below in parts]


def webdataset(split: str, root: Path) -> Source:
    """Samples `key.jpg` (or jpeg, png, webp) + `key.cls`, or + `key.json` with "label", in tar shards below `root`.

    A shard's split is the word train, test, val or validation in its name or in its folder's; where none has such a
    word, all are to test. Names of the classes come from `classnames.txt` (one a line) or a JSON file with a list of
    "classes" in `root`, else classes are called by number.

    Raises: UserError when shards are missing, damaged, compressed, or a sample has no label.
    """
    refuse_no_folder(root, "shards like train-0000.tar")
    found = split_shards(root)
    if not found[split]:
        raise UserError(f"{root} has no shard for the {split} split; name them like {SPLITS[split][-1]}-0000.tar")
    indices = {name: index_shards(paths, samples) for name, paths in found.items() if name == split or paths}
    if not any(len(index.labels) for index in indices[split]):
        raise UserError(
            f"no images in {found[split][0].parent}; shards must hold key.jpg (or jpeg, png, webp) + key.cls"
        )
    largest = max(int(index.labels.max(initial=-1)) for kept in indices.values() for index in kept)
    classes = listed_classes(root) or [str(i) for i in range(largest + 1)]
    if largest >= len(classes):
        raise UserError(f"{root} names {len(classes)} classes, but its shards have label {largest}; labels start at 0")
    labels = np.concatenate([index.labels for index in indices[split]])
    return Source(Members(indices[split]), labels, classes, runs(len(index.labels) for index in indices[split]))


def split_shards(root: Path) -> dict[str, list[Path]]:
    """The shards below a folder by split, sorted.

    Raises: UserError when all there is is compressed.
    """
    shards = sorted(path for path in root.rglob("*.tar") if not path.name.startswith("."))
    if not shards and (packed := [path for kind in ("*.tar.*", "*.tgz") for path in sorted(root.rglob(kind))]):
        raise UserError(f"{packed[0]} is compressed, so its members cannot be read in place; unpack it to a .tar")
    found: dict[str, list[Path]] = {}
    for split, words in SPLITS.items():
        named = ([path for path in shards if of_split(path.relative_to(root), word)] for word in words)
        found[split] = next(filter(None, named), [])
    if not any(found.values()):
        found["test"] = shards
    return found


def of_split(path: Path, word: str) -> bool:
    return says(path.name, word) or word in path.parts[:-1]


def listed_classes(root: Path) -> list[str]:
    """The names of the classes as files beside the shards list them; none where no file does.

    Raises: UserError when a file cannot be read.
    """
    if (root / "classnames.txt").is_file():
        return [line.strip() for line in (root / "classnames.txt").read_text().splitlines() if line.strip()]
    for path in sorted(root.glob("*info*.json")):
        try:
            about = json.loads(path.read_text())
        except (ValueError, OSError):
            raise UserError(f"cannot read {path} as JSON; mend or remove it") from None
        names = [about[key] for key in LISTS if isinstance(about, dict) and isinstance(about.get(key), list)]
        if names:
            return [str(name) for name in names[0]]
    return []
