"""The table of sources by name, `open_source`, and the format of a folder by its content."""

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from isomorph.errors import UserError, did_you_mean
from isomorph.lab.data.formats.builtin import cifar, digits
from isomorph.lab.data.formats.huggingface import huggingface
from isomorph.lab.data.formats.imagefolder import find_splits, imagefolder
from isomorph.lab.data.formats.naming import SPLITS, is_image_name, split_words, visible
from isomorph.lab.data.formats.tar import first_names, tar, webdataset
from isomorph.lab.data.sources import Source

SOURCES: dict[str, Callable[[str, Path], Source]] = {
    "digits": digits,
    "cifar10": partial(cifar, "cifar10"),
    "cifar100": partial(cifar, "cifar100"),
    "imagefolder": imagefolder,
    "tar": tar,
    "webdataset": webdataset,
    "huggingface": huggingface,
}
# wnids and label numbers: names that are of classes for certain
CLASS_NAME = re.compile(r"n\d{8}|\d{1,4}")


def open_source(
    name: str | Path, split: str, root: str | Path | None = None, test_fraction: float | None = None
) -> Source:
    """Open the `train` or `test` split of a source; `root` defaults to $ISOMORPH_DATA, else ./data.

    - a folder: images in one folder per class, in `train/` and `val/`, or all of them for testing; tar files or parquet
      files likewise
    - `digits`: part of scikit-learn, needs no root
    - `cifar10`, `cifar100`: `root/cifar10/{train,test}-*.parquet`, or the files that torchvision downloads
    - `imagefolder`: `root/{train,val}/class/image`, or `root/class/image`
    - `tar`: the same inside `root/{train,val}.tar`, or one tar per class in `root/{train,val}/`; read in place
    - `webdataset`: shards `root/**/*{train,val}*.tar` of key.jpg + key.cls; read in place
    - `huggingface`: a name on the hub (`owner/name`, `owner/name:config`), or a folder of parquet files

    A split is found by the words train or training, and test, testing, val, valid, validation, eval or evaluation, in
    any case and also as part of a name (`Training_Set`); the first that exists is used. Classes of the test split are
    numbered as in train, by their names. `test_fraction` splits a folder of class folders that has no test split.
    Images are read when they are indexed, turned as their EXIF data says, and class names that differ in Unicode form
    only are one. A warning says which files are left out.

    Raises: UserError for an unknown source or split, missing data, a class that train lacks, an image with two labels,
    or a name that may be that of a split or of a class.

    >>> source = iso.data.open_source("digits", "train")
    >>> len(source), len(source.classes)
    (1347, 10)
    """
    if split not in SPLITS:
        raise UserError(f"split {split!r} is unknown; choose 'train' or 'test'")
    if str(name) not in SOURCES:
        if root is not None:
            raise UserError(
                f"{name} is a folder of its own, or not a data source; leave the root {root} out"
            )
        name, root = locate_folder(name)
    folder = data_root(root)
    if test_fraction is None:
        return SOURCES[str(name)](split, folder)
    if name != "imagefolder":
        raise UserError(
            f"`test_fraction` divides a folder of images; {name} has a test split of its own, leave `test_fraction` out"
        )
    return imagefolder(split, folder, test_fraction)


def data_root(root: str | Path | None) -> Path:
    """Return the folder of the data: the given one, else $ISOMORPH_DATA, else ./data."""
    return Path(root or os.environ.get("ISOMORPH_DATA", "data")).expanduser()


def locate_folder(folder: str | Path) -> tuple[str, Path]:
    """Return the format of a folder of images, and its path. Raises: UserError when there is no such folder."""
    path = Path(folder).expanduser()
    if not os.path.isdir(path):
        neighbours = map(str, visible(path.parent))
        otherwise = f"give a folder of images, or one of {', '.join(SOURCES)}"
        hint = did_you_mean(str(folder), [*SOURCES, *neighbours], otherwise)
        raise UserError(
            f"data source {str(folder)!r} is unknown, and there is no folder of that name; {hint}"
        )
    return detect_format(path), path


def detect_format(path: Path) -> str:
    """Return the format of a folder by its content, or that of its folders of the test split."""
    inside = visible(path)
    folders = [path, *(folder for folder in inside if split_words(folder.name))]
    entries = [entry for folder in folders for entry in visible(folder)]
    if any(CLASS_NAME.fullmatch(entry.name) for entry in entries):
        return "imagefolder"
    tars = [tar for folder in folders for tar in visible(folder, ".tar")]
    if tars and _are_tars_of_classes(tars, path):
        return "tar"
    if tars:
        return "webdataset"
    shards = any(visible(folder, ".tar") for folder in inside)
    if shards and not any(find_splits(path).values()):
        return "webdataset"
    if any(visible(folder, ".parquet") for folder in [*folders, path / "data"]):
        return "huggingface"
    return "imagefolder"


def _are_tars_of_classes(tars: Sequence[Path], path: Path) -> bool:
    """Return True for tars that hold folders of classes, or one class each; False for shards of a webdataset."""
    names = first_names(tars[0])
    if any(name.endswith((".cls", ".json")) for name in names):
        return False
    if any("/" in name and is_image_name(name) for name in names):
        return True
    return any(file.parent != path or CLASS_NAME.fullmatch(file.stem) for file in tars)
