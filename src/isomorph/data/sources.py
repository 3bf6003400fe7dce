"""Where images come from: one `open_source`, each source a list of labelled images with a transform to be set."""

import copy
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torchvision.datasets
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset

from isomorph.errors import UserError

Picture = Image.Image | bytes | Path
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}
COLUMNS = (("image", "img"), ("label", "fine_label"))
"""Names that parquet files give to the image and to its label."""
SPLITS = {"train": ("train",), "test": ("test", "val", "validation")}
"""The two splits, and the names that folders and files give them."""


class Source(Dataset[tuple[Any, int]]):
    """Labelled images of one split. `transform` (PIL image -> anything) is set by the loader.

    Raises: UserError naming the image when one cannot be read.
    """

    def __init__(self, pictures: Sequence[Picture], labels: Sequence[int], classes: Sequence[str]) -> None:
        self.pictures, self.labels, self.classes = pictures, list(labels), tuple(classes)
        self.ids: Sequence[int] = range(len(self.labels))
        self.shards: list[range] | None = None
        self.transform: Callable[[Image.Image], Any] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """One image in RGB, before the transform."""
        picture = self.pictures[index]
        try:
            if isinstance(picture, Image.Image):
                return picture.convert("RGB")
            with Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture) as opened:
                return opened.convert("RGB")
        except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            name = picture if isinstance(picture, Path) else f"image {index}"
            raise UserError(f"cannot read {name}: {first_line(error)}; remove or replace it") from None

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.image(index)
        return (image if self.transform is None else self.transform(image)), self.labels[index]

    def subset(self, indices: Sequence[int]) -> "Source":
        """The given images, in the given order; `ids` keeps their places in the whole source."""
        part = copy.copy(self)
        part.pictures, part.labels = [self.pictures[i] for i in indices], [self.labels[i] for i in indices]
        part.ids = [self.ids[i] for i in indices]
        return part


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def class_fraction(source: Source, fraction: float, seed: int | None = 0) -> Source:
    """The same fraction of every class, at least one image each, in the source's order.

    A seeded draw; with seed None the first images of each class (of sorted files, as ConViT's code takes them).

    Raises: UserError when the fraction is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise UserError(f"fraction {fraction} is not in (0, 1]")
    labels, rng = np.asarray(source.labels), None if seed is None else np.random.default_rng(seed)
    kept = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members if rng is None else rng.permutation(members)
        kept.append(members[: max(1, round(fraction * len(members)))])
    return source.subset(np.sort(np.concatenate(kept)).tolist())


def first_classes(source: Source, number: int) -> Source:
    """The images of the first classes only.

    Raises: UserError when the source has fewer.
    """
    if not 0 < number <= len(source.classes):
        raise UserError(f"{number} classes are not between 1 and the {len(source.classes)} that the data has")
    part = source.subset([i for i, label in enumerate(source.labels) if label < number])
    part.classes = source.classes[:number]
    return part


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
    return cifar("cifar10", split, root)


def cifar100(split: str, root: Path) -> Source:
    """CIFAR-100, fine labels, from `root/cifar100/{train,test}-*.parquet`, else as torchvision keeps it.

    Raises: UserError when neither is there.
    """
    return cifar("cifar100", split, root)


def cifar(name: str, split: str, root: Path) -> Source:
    """Either CIFAR, from Hugging Face's files or torchvision's."""
    files = sorted((root / name).glob(f"{split}-*.parquet"))
    if files:
        return parquet(files)
    kind = getattr(torchvision.datasets, name.upper())
    try:
        data = kind(str(root), train=split == "train", download=os.environ.get("ISOMORPH_DOWNLOAD") == "1")
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"no {name} in {root} ({first_line(error)}); give data.root (or ISOMORPH_DATA) a folder that holds "
            f"{name}/{split}-*.parquet, or set ISOMORPH_DOWNLOAD=1 to let torchvision download it there"
        ) from None
    return Source([Image.fromarray(image) for image in data.data], data.targets, data.classes)


def parquet(files: Sequence[Path]) -> Source:
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
    present = [[name for name in names if name in table.column_names] for names in COLUMNS]
    if not all(present):
        raise UserError(f"{files[0].parent} has columns {', '.join(table.column_names)}; it needs image and label")
    pictures, label = (names[0] for names in present)
    labels = table[label].to_pylist()
    about = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    described = about.get("info", {}).get("features", {}).get(label, {})
    classes = described.get("names") or [str(i) for i in range(max(labels) + 1)]
    return Source([row["bytes"] for row in table[pictures].to_pylist()], labels, classes)


def imagefolder(split: str, root: Path) -> Source:
    """One folder a class, in `root/train` and `root/test` (or val, validation); to test, in `root` itself too.

    Classes are numbered as in train, where there is one.

    Raises: UserError when a folder is missing, holds no images, or has a class that train lacks.
    """
    if not root.is_dir():
        raise UserError(f"no folder {root}; give data.root the folder that holds train/ and val/")
    tops = {name: [root / folder for folder in folders if (root / folder).is_dir()] for name, folders in SPLITS.items()}
    if not tops[split] and (any(tops.values()) or split == "train"):
        raise UserError(f"{root} has no folder {' or '.join(SPLITS[split])} for the {split} split")
    top = tops[split][0] if tops[split] else root
    classes = class_folders(tops["train"][0] if tops["train"] else top)
    unknown = sorted(set(class_folders(top)) - set(classes))
    if unknown:
        raise UserError(f"{top} has classes that {tops['train'][0]} lacks: {', '.join(unknown[:5])}")
    found = [(path, i) for i, name in enumerate(classes) for path in images_below(top / name)]
    if not found:
        kinds = ", ".join(sorted(SUFFIXES))
        raise UserError(f"no images in {top}; it must hold one folder per class with {kinds} files")
    return Source([path for path, _ in found], [label for _, label in found], classes)


def class_folders(top: Path) -> list[str]:
    return sorted(folder.name for folder in top.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def images_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


SOURCES: dict[str, Callable[[str, Path], Source]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "imagefolder": imagefolder,
}


def open_source(name: str, split: str, root: str | Path | None = None) -> Source:
    """Opens the `train` or `test` split of a source; `root` defaults to $ISOMORPH_DATA, else ./data.

    Raises: UserError for an unknown source or split, or missing data.
    """
    if name not in SOURCES:
        raise UserError(f"data source {name!r} is unknown; choose one of {', '.join(SOURCES)}")
    if split not in SPLITS:
        raise UserError(f"split {split!r} is unknown; choose 'train' or 'test'")
    return SOURCES[name](split, Path(root or os.environ.get("ISOMORPH_DATA", "data")).expanduser())
