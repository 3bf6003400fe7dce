"""Small data sets: scikit-learn's digits, and CIFAR from the files of the Hugging Face hub or of torchvision."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torchvision.datasets
from PIL import Image

from isomorph.data.formats.naming import number_classes, visible
from isomorph.data.sources import Source
from isomorph.errors import UserError, first_line, optional_module

_PARQUET_COLUMNS = (("image", "img"), ("label", "fine_label"))


def digits(split: str, root: Path) -> Source:
    """Open scikit-learn's 1,797 handwritten digits (8 x 8): a fixed random split of 1,347 to train and 450 to test."""
    data = optional_module("sklearn.datasets", "digits are images of scikit-learn", "demo").load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    chosen = order[:1347] if split == "train" else order[1347:]
    images = [Image.fromarray((data.images[i] / 16 * 255).astype(np.uint8)) for i in chosen]
    return Source(images, data.target[chosen].tolist(), [str(i) for i in range(10)])


def cifar(name: Literal["cifar10", "cifar100"], split: str, root: Path) -> Source:
    """Open CIFAR (labels are the fine ones) from `root/NAME/{train,test}-*.parquet`, else torchvision's files.

    Raises: UserError when `root` has neither.
    """
    files = [path for path in visible(root / name, ".parquet") if path.name.startswith(f"{split}-")]
    if files:
        return _read_parquet(files)
    dataset = getattr(torchvision.datasets, name.upper())
    try:
        data = dataset(str(root), train=split == "train", download=os.environ.get("ISOMORPH_DOWNLOAD") == "1")
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"there is no {name} in {root} ({first_line(error)}); set data.root (or ISOMORPH_DATA) to a folder with "
            f"{name}/{split}-*.parquet, or set ISOMORPH_DOWNLOAD=1 to let torchvision download it there"
        ) from None
    return Source(data.data, data.targets, data.classes)


def _read_parquet(files: Sequence[Path]) -> Source:
    needs = "reading parquet files needs pyarrow"
    pyarrow, parquet = (optional_module(name, needs, "data") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        table = pyarrow.concat_tables([parquet.read_table(file) for file in files])
        metadata = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    except (pyarrow.ArrowException, OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {files[0].parent}: {first_line(error)}") from None
    columns = [[name for name in names if name in table.column_names] for names in _PARQUET_COLUMNS]
    if not all(columns):
        raise UserError(f"{files[0].parent} has columns {', '.join(table.column_names)}; it must have image and label")
    image, label = (names[0] for names in columns)
    labels = table[label].to_pylist()
    feature = metadata.get("info", {}).get("features", {}).get(label, {})
    images = [row and row["bytes"] for row in table[image].to_pylist()]
    if not labels or not all(images) or not all(isinstance(each, int) and each >= 0 for each in labels):
        raise UserError(f"{files[0].parent} has images without bytes, or without a label that is a number from 0")
    return Source(images, labels, feature.get("names") or number_classes(max(labels), files[0].parent))
