"""Images in one folder per class."""

import os
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from isomorph.data.formats.naming import (
    IMAGE_SUFFIXES,
    SPLIT_NAMES,
    SPLITS,
    ImageFiles,
    check_folder,
    check_known_classes,
    check_not_nested,
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


def imagefolder(split: str, root: Path, test_fraction: float | None = None) -> Source:
    """Open images in one folder per class, in `root/train` and `root/test` (or val, validation), in any spelling.

    Without train/, the class folders of `root` itself hold the test images. `test_fraction` splits a folder that has no
    test images of its own: about this fraction of every class is for testing (`split_classes`), the rest for training.
    Classes are numbered as in train, if it exists, in the order of their names. A link to a folder is followed. Warns
    about files that are left out, and images that are reached twice.

    Raises: UserError when a folder is missing, holds no images, has a class that train lacks, or cannot be split.
    """
    check_folder(root, "train/ and val/, or one folder of images per class")
    tops = find_splits(root)
    train, top = tops["train"], tops[split]
    if test_fraction is not None:
        if tops["test"]:
            raise UserError(f"{root} has test images of its own, in {tops['test'].name}/; leave --split out")
        return split_classes(_open_classes(train or root, train or root), test_fraction)[split == "test"]
    if not top and (any(tops.values()) or split == "train"):
        todo = "make one, or give --split 0.2 to test on a fifth of the images of each class"
        raise UserError(
            f"{root} has no folder {SPLIT_NAMES[split]} with one folder per class, for the {split} split"
            + (f"; {todo}" if train or not tops["test"] else "")
        )
    return _open_classes(top or root, train or top or root)


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


def _class_folders(top: Path) -> dict[str, list[str]]:
    """Return the names of the classes in order, each with its folders: several if they differ in Unicode form only."""
    classes: dict[str, list[str]] = {}
    for folder in visible(top):
        classes.setdefault(composed(folder.name), []).append(folder.name)
    return dict(sorted(classes.items()))


def _open_classes(top: Path, train: Path) -> Source:
    """Open the class folders of `top`, numbered as those of `train`. Raises: UserError when there are no images."""
    classes, own = _class_folders(train), _class_folders(top)
    check_known_classes(top, own, train, classes)
    left_out, files = Counter[str](), array("Q")
    with os.scandir(top) as entries:
        left_out["next to the classes"] = sum(is_image_name(e.name) and not e.name.startswith(".") for e in entries)
    try:
        names = [
            sorted(
                (image for folder in own.get(name, ()) for image in _images_below(top, f"{folder}/", left_out, files)),
                key=lambda name: name.split("/"),
            )
            for name in classes
        ]
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    if not any(names):
        suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
        raise UserError(f"no images in {top}; it must hold one folder per class with {suffixes} files")
    check_not_nested(top, chain.from_iterable(names))
    report_left_out(top, left_out, len(files) - len(np.unique(files)))
    labels = np.repeat(np.arange(len(classes)), [len(images) for images in names])
    return Source(ImageFiles(top, chain.from_iterable(names)), labels, classes)


def _images_below(
    top: Path, below: str, left_out: Counter[str], files: "array[int]", above: frozenset[int] = frozenset()
) -> Iterator[str]:
    """Yield the names of the image files below a folder, in no order, and count the others.

    `files` receives a number for each image's file, whatever links lead to it; `above` are the folders around this one.
    """
    status = os.stat(top / below)
    place = status.st_dev << 48
    if status.st_ino ^ place in above:
        left_out["in a folder that links to itself"] += 1
        return
    with os.scandir(top / below) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                inside = above | {status.st_ino ^ place}
                yield from _images_below(top, f"{below}{entry.name}/", left_out, files, inside)
            elif is_image_name(entry.name):
                linked = entry.is_symlink() and entry.is_file()
                number = entry.stat().st_ino if linked else entry.inode()
                files.append((number ^ place) & 2**64 - 1)
                yield below + entry.name
            else:
                count_left_out(below + entry.name, left_out)
