"""Images in one folder per class, and how the images of classes are numbered and ordered, in folders and tar files."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from isomorph.data.formats.naming import (
    IMAGE_SUFFIXES,
    SPLIT_NAMES,
    SPLITS,
    ImageFiles,
    check_folder,
    composed,
    count_left_out,
    is_image_name,
    named_for,
    report_left_out,
    split_words,
    visible,
)
from isomorph.data.sources import Source, split_classes
from isomorph.errors import UserError


def check_known_classes(test: Path, classes: Iterable[str], train: Path, known: Iterable[str]) -> None:
    """Raise a UserError when the classes of a test split include one that train lacks."""
    if unknown := sorted(set(classes) - set(known)):
        raise UserError(f"{test} has classes that {train} lacks: {', '.join(unknown[:5])}")


def sort_by_class(
    top: Path, names: Sequence[str], classes: Sequence[str], left_out: Counter[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of images in the order of their classes and paths, and their labels.

    `names` are like class/folder/image. Those without a class are left out, and of equal ones the last counts, as in
    unpacking a tar. Warns of these, and of files that were `left_out` before.

    Shape: -> (n,), (n,)
    """
    last = {name: index for index, name in enumerate(names) if "/" in name}
    if not last:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    loose = sum("/" not in name for name in names)
    lost = Counter({"next to the classes": loose, "stored again later": len(names) - loose - len(last)})
    report_left_out(top, left_out + lost)
    ordered = sorted(last, key=lambda name: (_class_of(name), name.replace("/", "\0")))
    label_of = {name: label for label, name in enumerate(classes)}
    return np.array([last[name] for name in ordered]), np.array([label_of[_class_of(name)] for name in ordered])


def _class_of(name: str) -> str:
    return composed(name.partition("/")[0])


def imagefolder(split: str, root: Path, test_fraction: float | None = None) -> Source:
    """Open images in one folder per class, in `root/train` and `root/test` (or val, validation), in any spelling.

    Without train/, the class folders of `root` itself hold the test images. `test_fraction` splits a folder that has no
    test images of its own: about this fraction of every class is for testing (`split_classes`), the rest for training.
    Classes are numbered as in train, if it exists, in the order of their names. A link to a folder is followed. Warns
    about files that are left out.

    Raises: UserError when a folder is missing, holds no images, has a class that train lacks, or cannot be split.
    """
    check_folder(root, "train/ and val/, or one folder of images per class")
    tops = find_splits(root)
    train, top = tops["train"], tops[split]
    if test_fraction is not None:
        if tops["test"]:
            raise UserError(f"{root} has test images of its own, in {tops['test'].name}/; leave --split out")
        return split_classes(_open_classes(train or root, train or root, trains=True), test_fraction)[split == "test"]
    if not top and (any(tops.values()) or split == "train"):
        todo = "make one, or give --split 0.2 to test on a fifth of the images of each class"
        raise UserError(
            f"{root} has no folder {SPLIT_NAMES[split]} with one folder per class, for the {split} split"
            + (f"; {todo}" if train or not tops["test"] else "")
        )
    return _open_classes(top or root, train or top or root, trains=split == "train")


def find_splits(root: Path) -> dict[str, Path | None]:
    """Return the folder of each split that has folders in it; one of test images without classes is left out.

    A folder of the same kind inside it, and nothing else, as in `seg_train/seg_train`, takes its place.
    """
    folders = [folder for folder in visible(root) if split_words(folder.name) and visible(folder)]
    found = {split: named_for(folders, split) for split in SPLITS}
    return {split: _innermost(named[0]) if named else None for split, named in found.items()}


def _innermost(folder: Path) -> Path:
    inside = visible(folder)
    return _innermost(inside[0]) if len(inside) == 1 and split_words(inside[0].name) and visible(inside[0]) else folder


def _class_names(top: Path) -> list[str]:
    return sorted({composed(folder.name) for folder in visible(top)})


def _open_classes(top: Path, train: Path, trains: bool) -> Source:
    """Number the class folders of `top` as those of `train`."""
    classes = _class_names(train)
    check_known_classes(top, _class_names(top), train, classes)
    left_out = Counter[str]()
    try:
        names = list(_images_below(top, "", left_out))
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    order, labels = sort_by_class(top, names, classes, left_out)
    if not len(order):
        suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
        raise UserError(f"no images in {top}; it must hold one folder per class with {suffixes} files")
    if trains and (empty := set(range(len(classes))) - set(labels.tolist())):
        raise UserError(f"{train / classes[min(empty)]} has no images; add some, or remove the folder")
    return Source(ImageFiles(top, (names[i] for i in order)), labels, classes)


def _images_below(top: Path, below: str, left_out: Counter[str], above: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the names of the image files below a folder, in no order; `above` are the folders around it."""
    place = os.path.realpath(top / below)
    if place in above:
        left_out["in a folder that links to itself"] += 1
        return
    with os.scandir(top / below) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _images_below(top, f"{below}{entry.name}/", left_out, above | {place})
            elif is_image_name(entry.name):
                yield below + entry.name
            else:
                count_left_out(below + entry.name, left_out)
