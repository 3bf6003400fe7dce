"""Images in folders, one a class."""

import os
from collections.abc import Iterator, Sequence
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
from isomorph.data.sources import Source
from isomorph.errors import UserError


def imagefolder(split: str, root: Path) -> Source:
    """One folder a class, in `root/train` and `root/test` (or val, validation); to test, in `root` itself too.

    Classes are numbered as in train, where there is one.

    Raises: UserError when a folder is missing, holds no images, or has a class that train lacks.
    """
    check_folder(root, "train/ and val/")
    tops = {name: _folders_of_classes(root, folders) for name, folders in SPLITS.items()}
    if not tops[split] and (any(tops.values()) or split == "train"):
        raise UserError(
            f"{root} has no folder {' or '.join(SPLITS[split])} with one folder a class, for the {split} split"
        )
    top = tops[split][0] if tops[split] else root
    train = tops["train"][0] if tops["train"] else top
    classes = _class_folders(train)
    check_known_classes(top, _class_folders(top), train, classes)
    found = [[f"{name}/{image}" for image in _images_below(top / name)] for name in classes]
    if not any(found):
        kinds = ", ".join(sorted(IMAGE_SUFFIXES))
        raise UserError(f"no images in {top}; it must hold one folder per class with {kinds} files")
    labels = np.repeat(np.arange(len(classes)), [len(images) for images in found])
    return Source(ImageFiles(top, (image for images in found for image in images)), labels, classes)


def _folders_of_classes(root: Path, names: Sequence[str]) -> list[Path]:
    """The folders of these names that have folders in them: test images may come without classes, beside others."""
    return [root / name for name in names if (root / name).is_dir() and _class_folders(root / name)]


def _class_folders(top: Path) -> list[str]:
    return sorted(folder.name for folder in top.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def _images_below(folder: Path) -> list[str]:
    """Names of the image files in a folder and the folders in it, sorted folder by folder; none if it is missing."""
    return sorted(_names_below(str(folder)), key=lambda name: name.split("/"))


def _names_below(folder: str, prefix: str = "") -> Iterator[str]:
    """Names of the image files below a folder, in no order."""
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
