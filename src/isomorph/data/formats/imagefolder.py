"""Images in one folder per class."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from isomorph.data.formats.naming import (
    IMAGE_SUFFIXES,
    SPLITS,
    ImageFiles,
    check_folder,
    check_known_classes,
    is_image_name,
)
from isomorph.data.sources import Source, split_classes
from isomorph.errors import UserError


def imagefolder(split: str, root: Path, test_fraction: float | None = None) -> Source:
    """Open images in one folder per class, in `root/train` and `root/test` (or val, validation).

    Without train/, the class folders of `root` itself hold the test images. `test_fraction` splits a folder that has no
    test images of its own: about this fraction of every class is for testing (`split_classes`), the rest for training.
    Classes are numbered as in train, if it exists, in the order of their names.

    Raises: UserError when a folder is missing, holds no images, has a class that train lacks, or cannot be split.
    """
    check_folder(root, "train/ and val/, or one folder of images per class")
    tops = {name: _folders_of_classes(root, folders) for name, folders in SPLITS.items()}
    if test_fraction is not None:
        return _split_folder(split, root, tops, test_fraction)
    if not tops[split] and (any(tops.values()) or split == "train"):
        raise UserError(_describe_missing_split(split, root, bool(tops["train"] or not any(tops.values()))))
    top = tops[split][0] if tops[split] else root
    train = tops["train"][0] if tops["train"] else top
    return _open_classes(top, train)


def _open_classes(top: Path, train: Path) -> Source:
    """Open the class folders of `top`, numbered as those of `train`. Raises: UserError when there are no images."""
    classes = _class_folders(train)
    check_known_classes(top, _class_folders(top), train, classes)
    files = [[f"{name}/{image}" for image in _images_below(top / name)] for name in classes]
    if not any(files):
        suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
        raise UserError(f"no images in {top}; it must hold one folder per class with {suffixes} files")
    labels = np.repeat(np.arange(len(classes)), [len(names) for names in files])
    return Source(ImageFiles(top, chain.from_iterable(files)), labels, classes)


def _split_folder(split: str, root: Path, tops: Mapping[str, Sequence[Path]], fraction: float) -> Source:
    """Open the training or the test part of a folder of classes. Raises: UserError when it has a test split already."""
    if tops["test"]:
        raise UserError(f"{root} has test images of its own, in {tops['test'][0].name}/; leave --split out")
    top = tops["train"][0] if tops["train"] else root
    return split_classes(_open_classes(top, top), fraction)[split == "test"]


def _describe_missing_split(split: str, root: Path, can_split: bool) -> str:
    """Return the message for a folder without the images of a split."""
    missing = f"{root} has no folder {' or '.join(SPLITS[split])} with one folder per class, for the {split} split"
    todo = "; make one, or give --split 0.2 to test on a fifth of the images of each class"
    return missing + (todo if can_split else "")


def _folders_of_classes(root: Path, names: Sequence[str]) -> list[Path]:
    """Return the folders of these names that contain folders; a folder of test images without classes is left out."""
    return [root / name for name in names if (root / name).is_dir() and _class_folders(root / name)]


def _class_folders(top: Path) -> list[str]:
    return sorted(folder.name for folder in top.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def _images_below(folder: Path) -> list[str]:
    """Return the names of the image files below a folder, sorted folder by folder; none if the folder is missing."""
    return sorted(_names_below(str(folder)), key=lambda name: name.split("/"))


def _names_below(folder: str, prefix: str = "") -> Iterator[str]:
    """Yield the names of the image files below a folder, in no order."""
    if not os.path.isdir(folder):
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _names_below(entry.path, f"{prefix}{entry.name}/")
            elif is_image_name(entry.name):
                yield prefix + entry.name
