"""The small data sets: scikit-learn's digits, and CIFAR from the files that the hub or torchvision keep."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torchvision.datasets
from PIL import Image

from isomorph.data.sources import Source, first_line
from isomorph.errors import UserError

_PARQUET_COLUMNS = (("image", "img"), ("label", "fine_label"))
"""Names that parquet files give to the image and to its label."""


def digits(split: str, root: Path) -> Source:
    """The 1,797 handwritten digits (8 x 8) embedded in scikit-learn: 1,347 to train, 450 to test, a fixed draw."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    chosen = order[:1347] if split == "train" else order[1347:]
    pictures = [Image.fromarray((data.images[i] / 16 * 255).astype(np.uint8)) for i in chosen]
    return Source(pictures, data.target[chosen].tolist(), [str(i) for i in range(10)])


def cifar10(split: str, root: Path) -> Source:
    """CIFAR-10 from `root/cifar10/{train,test}-*.parquet` (Hugging Face convention), else as torchvision keeps it.

    Raises: UserError when neither is there.
    """
    return _open_cifar("cifar10", split, root)


def cifar100(split: str, root: Path) -> Source:
    """CIFAR-100, fine labels, from `root/cifar100/{train,test}-*.parquet`, else as torchvision keeps it.

    Raises: UserError when neither is there.
    """
    return _open_cifar("cifar100", split, root)


def _open_cifar(name: str, split: str, root: Path) -> Source:
    """Either CIFAR, from Hugging Face's files or torchvision's."""
    files = sorted((root / name).glob(f"{split}-*.parquet"))
    if files:
        return _read_parquet(files)
    kind = getattr(torchvision.datasets, name.upper())
    try:
        data = kind(str(root), train=split == "train", download=os.environ.get("ISOMORPH_DOWNLOAD") == "1")
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"no {name} in {root} ({first_line(error)}); give data.root (or ISOMORPH_DATA) a folder that holds "
            f"{name}/{split}-*.parquet, or set ISOMORPH_DOWNLOAD=1 to let torchvision download it there"
        ) from None
    return Source([Image.fromarray(image) for image in data.data], data.targets, data.classes)


def _read_parquet(files: Sequence[Path]) -> Source:
    """Rows of `image` (or `img`) `{bytes, path}` and `label` (or `fine_label`), as Hugging Face datasets write them."""
    try:
        from pyarrow import ArrowException, concat_tables
        from pyarrow.parquet import read_table
    except ImportError:
        raise UserError("reading parquet files needs pyarrow; pip install 'isomorph[data]'") from None
    try:
        table = concat_tables([read_table(file) for file in files])
    except (ArrowException, OSError) as error:
        raise UserError(f"cannot read {files[0].parent}: {first_line(error)}") from None
    present = [[name for name in names if name in table.column_names] for names in _PARQUET_COLUMNS]
    if not all(present):
        raise UserError(f"{files[0].parent} has columns {', '.join(table.column_names)}; it needs image and label")
    pictures, label = (names[0] for names in present)
    labels = table[label].to_pylist()
    about = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    described = about.get("info", {}).get("features", {}).get(label, {})
    classes = described.get("names") or [str(i) for i in range(max(labels) + 1)]
    return Source([row["bytes"] for row in table[pictures].to_pylist()], labels, classes)
