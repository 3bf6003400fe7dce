"""The table of sources by name, and `open_source`."""

import os
from collections.abc import Callable
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


def open_source(name: str, split: str, root: str | Path | None = None) -> Source:
    """Open the `train` or `test` split of a source; `root` defaults to $ISOMORPH_DATA, else ./data.

    - `digits`: part of scikit-learn, needs no root
    - `cifar10`, `cifar100`: `root/cifar10/{train,test}-*.parquet`, or the files that torchvision downloads
    - `imagefolder`: `root/{train,val}/class/image`
    - `tar`: the same inside `root/{train,val}.tar`, or one tar per class in `root/{train,val}/`; read in place
    - `webdataset`: shards `root/**/*{train,val}*.tar` of key.jpg + key.cls; read in place
    - `huggingface`: a name on the hub (`owner/name`, `owner/name:config`), or a folder of parquet files or one written
      by `save_to_disk`

    The test split may be named test, val or validation; the first that exists is used. Images are read when they are
    indexed.

    Raises: UserError for an unknown source or split, or missing data.

    >>> source = iso.data.open_source("digits", "train")
    >>> len(source), len(source.classes)
    (1347, 10)
    """
    if name not in SOURCES:
        raise UserError(f"data source {name!r} is unknown; choose one of {', '.join(SOURCES)}")
    if split not in SPLITS:
        raise UserError(f"split {split!r} is unknown; choose 'train' or 'test'")
    return SOURCES[name](split, Path(root or os.environ.get("ISOMORPH_DATA", "data")).expanduser())
