"""Small data sets: scikit-learn's digits, and CIFAR from the files of the Hugging Face hub or of torchvision."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torchvision.datasets
from PIL import Image

from isomorph.errors import UserError, first_line, optional_module
from isomorph.lab.data.formats.naming import (
    check_known_classes,
    number_classes,
    numbered_by_name,
    visible,
)
from isomorph.lab.data.formats.parquet import label_columns, parquet_reader, stored_classes
from isomorph.lab.data.sources import Source


def digits(split: str, root: Path) -> Source:
    """Open scikit-learn's 1,797 handwritten digits (8 x 8): a fixed random split of 1,347 to train and 450 to test."""
    data = optional_module(
        "sklearn.datasets", "digits are images of scikit-learn", "demo"
    ).load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    chosen = order[:1347] if split == "train" else order[1347:]
    pixels = (data.images[chosen] / 16 * 255).astype(np.uint8)
    labels = data.target[chosen].tolist()
    return Source(list(map(Image.fromarray, pixels)), labels, map(str, range(10)))


def cifar(name: Literal["cifar10", "cifar100"], split: str, root: Path) -> Source:
    """Open CIFAR (labels are the fine ones) from `root/NAME/{train,test}-*.parquet`, else torchvision's files.

    Raises: UserError when `root` has neither.
    """
    files = _parquet_files(root / name, split)
    if files:
        return _read_parquet(files, _parquet_files(root / name, "train"))
    dataset = getattr(torchvision.datasets, name.upper())
    download = os.environ.get("ISOMORPH_DOWNLOAD") == "1"
    try:
        data = dataset(str(root), train=split == "train", download=download)
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"there is no {name} in {root} ({first_line(error)}); set data.root (or ISOMORPH_DATA) to a folder with "
            f"{name}/{split}-*.parquet, or set ISOMORPH_DOWNLOAD=1 to let torchvision download it there"
        ) from None
    return Source(data.data, data.targets, data.classes)


def _parquet_files(folder: Path, split: str) -> list[Path]:
    return [path for path in visible(folder, ".parquet") if path.name.startswith(f"{split}-")]


def _read_parquet(files: Sequence[Path], train: Sequence[Path]) -> Source:
    """Read the images of a split; its classes are numbered by name as those of the files of the training split."""
    folder = files[0].parent
    names = stored_classes(files)
    known = stored_classes(train)
    with parquet_reader(folder) as parquet:
        from pyarrow import concat_tables

        table = concat_tables([parquet.read_table(file) for file in files])
    images_in = [name for name in ("image", "img") if name in table.column_names]
    label = next(iter(label_columns(table.column_names)), None)
    if not images_in or label is None:
        raise UserError(
            f"{folder} has columns {', '.join(table.column_names)}; it must have image and label"
        )
    labels = table[label].to_pylist()
    images = [row and row["bytes"] for row in table[images_in[0]].to_pylist()]
    numbered = all(isinstance(label, int) and label >= 0 for label in labels)
    if not labels or not all(images) or not numbered:
        raise UserError(
            f"{folder} has images without bytes, or without a label that is a number from 0"
        )
    if not names and not known:
        return Source(images, labels, number_classes(max(labels), folder))
    known = known or names
    names = names or known
    check_known_classes(files[0], names, train[0] if train else files[0], known)
    classes, numbers = numbered_by_name(names, known)
    if max(labels) >= len(numbers):
        raise UserError(
            f"{folder} has label {max(labels)}, but {len(numbers)} classes; labels start at 0"
        )
    return Source(images, numbers[labels], classes)
