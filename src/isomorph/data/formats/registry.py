"""The table of sources by name, and `open_source`."""

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from isomorph.data.formats.builtin import cifar10, cifar100, digits
from isomorph.data.formats.huggingface import huggingface
from isomorph.data.formats.imagefolder import imagefolder
from isomorph.data.formats.naming import SPLITS
from isomorph.data.formats.tar import tar, webdataset
from isomorph.data.sources import Source
from isomorph.errors import UserError

SOURCES: dict[str, Callable[[str, Path], Source]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "imagefolder": imagefolder,
    "tar": tar,
    "webdataset": webdataset,
    "huggingface": huggingface,
}


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
    - `huggingface`: a name on the hub (`owner/name`, `owner/name:config`), or a folder of parquet files or one written
      by `save_to_disk`

    The test split may be named test, val or validation; the first that exists is used. `test_fraction` splits a folder
    of class folders that has no such split. Images are read when they are indexed.

    Raises: UserError for an unknown source or split, or missing data.

    >>> source = iso.data.open_source("digits", "train")
    >>> len(source), len(source.classes)
    (1347, 10)
    """
    if split not in SPLITS:
        raise UserError(f"split {split!r} is unknown; choose 'train' or 'test'")
    if str(name) not in SOURCES:
        if root is not None:
            raise UserError(f"{name} is a folder of its own, or not a data source; leave the root {root} out")
        name, root = locate_folder(name)
    folder = data_root(root)
    if test_fraction is None:
        return SOURCES[str(name)](split, folder)
    if name != "imagefolder":
        raise UserError(f"--split divides a folder of images; {name} has a test split of its own, leave --split out")
    return imagefolder(split, folder, test_fraction)


def data_root(root: str | Path | None) -> Path:
    """Return the folder of the data: the given one, else $ISOMORPH_DATA, else ./data."""
    return Path(root or os.environ.get("ISOMORPH_DATA", "data")).expanduser()


def locate_folder(folder: str | Path) -> tuple[str, Path]:
    """Return the format of a folder of images, and its path. Raises: UserError when there is no such folder."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        near = [entry for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
        close = get_close_matches(str(folder), [*SOURCES, *map(str, near)], n=1)
        hint = f"did you mean {close[0]}?" if close else f"give a folder of images, or one of {', '.join(SOURCES)}"
        raise UserError(f"data source {str(folder)!r} is unknown, and there is no folder of that name; {hint}")
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if not entry.name.startswith(".")]
    if any(f"{word}.tar" in names for words in SPLITS.values() for word in words):
        return "tar", path
    by_suffix = {".tar": "webdataset", ".parquet": "huggingface", "dataset_dict.json": "huggingface"}
    found = (form for end, form in by_suffix.items() if any(name.endswith(end) for name in names))
    return next(found, "imagefolder"), path
