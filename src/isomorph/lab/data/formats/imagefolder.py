"""Images in one folder per class, and how the images of classes are numbered and ordered, in folders and tar files."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from isomorph.errors import UserError
from isomorph.lab.data.formats.naming import (
    IMAGE_SUFFIXES,
    SPLIT_NAMES,
    SPLITS,
    ImageFiles,
    ambiguous_split,
    check_folder,
    check_known_classes,
    composed,
    count_left_out,
    is_hidden,
    is_image_name,
    named_for,
    names_a_split,
    names_only_a_split,
    report_left_out,
    split_words,
    visible,
)
from isomorph.lab.data.sources import Source, split_classes


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
    again = len(names) - loose - len(last)
    lost = Counter({"next to the classes": loose, "stored again later": again})
    report_left_out(top, left_out + lost)
    ordered = sorted(last, key=lambda name: (_class_of(name), name.replace("/", "\0")))
    label_of = {name: label for label, name in enumerate(classes)}
    indices = [last[name] for name in ordered]
    labels = [label_of[_class_of(name)] for name in ordered]
    return np.array(indices), np.array(labels)


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
    train = tops["train"]
    top = tops[split]
    if test_fraction is not None:
        if tops["test"]:
            raise UserError(
                f"{root} has test images of its own, in {tops['test'].name}/; leave `test_fraction` out"
            )
        folder = train or root
        training, testing = split_classes(_open_classes(folder, folder, trains=True), test_fraction)
        return testing if split == "test" else training
    has_splits = any(tops.values())
    if has_splits:
        _report_outside(root)
    if not top and (has_splits or split == "train"):
        todo = ""
        if train or not tops["test"]:
            todo = "; make one, or give test_fraction=0.2 to test on a fifth of the images of each class"
        missing = f"{root} has no folder {SPLIT_NAMES[split]} with one folder per class, for the {split} split"
        raise UserError(missing + todo)
    return _open_classes(top or root, train or top or root, trains=split == "train")


def _report_outside(root: Path) -> None:
    """Warn about images next to the folders of the splits, unless they are in one folder without classes."""
    others = _folders_without_split(root)
    if len(others) == 1 and _depth_of_images(others[0]) == 0:
        return
    outside = 0
    for folder in others:
        outside += sum(1 for _ in _names_of_images(folder, Counter()))
    report_left_out(root, {"in folders that are not named for a split": outside})


def find_splits(root: Path) -> dict[str, Path | None]:
    """Return the folder of each split that has folders in it; one of test images without classes is left out.

    A folder of the same kind inside it, and nothing else, as in `seg_train/seg_train`, takes its place. A name with
    a word of a split may also be that of a class: where other folders hold images too, `test_tube` is one.

    Raises: UserError for several folders of a split, or when names do not tell whether they are of splits or classes.
    """
    folders = [folder for folder in visible(root) if names_a_split(folder.name) and visible(folder)]
    splits = {split: _innermost_named(folders, split) for split in SPLITS}
    others = _folders_without_split(root) if folders else []
    if not others or _share_a_class(splits) or _is_extra_folder(folders, others):
        return splits
    if _are_classes(folders, others):
        return dict.fromkeys(SPLITS)
    raise ambiguous_split(root, f"{folders[0].name}/", f"{others[0].name}/")


def _innermost_named(folders: Sequence[Path], split: str) -> Path | None:
    named = named_for(folders, split)
    if not named:
        return None
    folder = named[0]
    inside = visible(folder)
    while len(inside) == 1 and split_words(inside[0].name) and visible(inside[0]):
        folder = inside[0]
        inside = visible(folder)
    return folder


def _folders_without_split(root: Path) -> list[Path]:
    """Return the folders that hold images and are not named for one split."""
    unnamed = [folder for folder in visible(root) if not names_a_split(folder.name)]
    return [folder for folder in unnamed if _depth_of_images(folder) is not None]


def _share_a_class(splits: Mapping[str, Path | None]) -> bool:
    """True if there are folders of both splits, and a class is in both."""
    train = splits["train"]
    test = splits["test"]
    return bool(train and test and set(_class_names(train)) & set(_class_names(test)))


def _is_extra_folder(folders: Sequence[Path], others: Sequence[Path]) -> bool:
    """True for one folder of images without folders, next to folders whose names are those of splits alone."""
    if not all(names_only_a_split(folder.name) for folder in folders):
        return False
    return len(others) == 1 and _depth_of_images(others[0]) == 0


def _are_classes(folders: Sequence[Path], others: Sequence[Path]) -> bool:
    """True if the names say more than a split, and several other folders hold images as deep."""
    if any(names_only_a_split(folder.name) for folder in folders):
        return False
    depths = {_depth_of_images(folder) for folder in [*folders, *others]}
    return len(others) > 1 and len(depths) == 1


def _depth_of_images(folder: Path) -> int | None:
    """Return the number of folders between a folder and the first image found below it; None without images."""
    name = next(_names_of_images(folder, Counter()), None)
    if name is None:
        return None
    return name.count("/")


def _class_names(top: Path) -> list[str]:
    return sorted({composed(folder.name) for folder in visible(top)})


def _open_classes(top: Path, train: Path, trains: bool) -> Source:
    """Number the class folders of `top` as those of `train`."""
    classes = _class_names(train)
    check_known_classes(top, _class_names(top), train, classes)
    left_out = Counter[str]()
    names = list(_names_of_images(top, left_out))
    order, labels = sort_by_class(top, names, classes, left_out)
    if not len(order):
        suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
        raise UserError(
            f"no images in {top}; it must hold one folder per class with {suffixes} files"
        )
    empty = set(range(len(classes))) - set(labels.tolist())
    if trains and empty:
        raise UserError(
            f"{train / classes[min(empty)]} has no images; add some, or remove the folder"
        )
    return Source(ImageFiles(top, (names[i] for i in order)), labels, classes)


def _names_of_images(top: Path, left_out: Counter[str]) -> Iterator[str]:
    """Yield the names of the image files below a folder, in no order. Raises: UserError for one that cannot be read."""
    try:
        yield from _images_below(top, "", left_out)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None


def _images_below(
    top: Path, below: str, left_out: Counter[str], above: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Yield the names of the image files below a folder, in no order; `above` are the folders around it."""
    place = os.path.realpath(top / below)
    if place in above:
        left_out["in a folder that links to itself"] += 1
        return
    with os.scandir(top / below) as entries:
        for entry in entries:
            if is_hidden(entry.name):
                continue
            if entry.is_dir():
                yield from _images_below(top, f"{below}{entry.name}/", left_out, above | {place})
            elif is_image_name(entry.name):
                yield below + entry.name
            else:
                count_left_out(below + entry.name, left_out)
