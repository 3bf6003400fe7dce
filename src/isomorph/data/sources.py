"""Where images come from: one `open_source`, each source a list of labelled images with a transform to be set."""

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset

from isomorph.errors import UserError

Picture = Image.Image | bytes | Path
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}
SPLITS = {"train": ("train",), "test": ("test", "val", "validation")}
"""The two splits, and the names that folders and files give them."""


class Source(Dataset[tuple[Any, int]]):
    """Labelled images of one split. `transform` (PIL image -> anything) is set by the loader.

    Raises: UserError naming the image when one cannot be read.
    """

    def __init__(self, pictures: Sequence[Picture], labels: Sequence[int], classes: Sequence[str]) -> None:
        self.pictures, self.labels, self.classes = pictures, list(labels), tuple(classes)
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
        """The given images, in the given order."""
        return Source([self.pictures[i] for i in indices], [self.labels[i] for i in indices], self.classes)


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def class_fraction(source: Source, fraction: float, seed: int = 0) -> Source:
    """A seeded draw of the same fraction of every class, at least one image each, in the source's order.

    Raises: UserError when the fraction is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise UserError(f"fraction {fraction} is not in (0, 1]")
    labels, rng = np.asarray(source.labels), np.random.default_rng(seed)
    kept = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        kept.append(rng.permutation(members)[: max(1, round(fraction * len(members)))])
    return source.subset(np.sort(np.concatenate(kept)).tolist())


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
    files = sorted((root / "cifar10").glob(f"{split}-*.parquet"))
    if files:
        return parquet(files, CIFAR10)
    from torchvision.datasets import CIFAR10 as TorchvisionCIFAR10

    try:
        data = TorchvisionCIFAR10(
            str(root), train=split == "train", download=os.environ.get("ISOMORPH_DOWNLOAD") == "1"
        )
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"no cifar10 in {root} ({first_line(error)}); give data.root (or ISOMORPH_DATA) a folder that holds "
            f"cifar10/{split}-*.parquet, or set ISOMORPH_DOWNLOAD=1 to let torchvision download it there"
        ) from None
    return Source([Image.fromarray(image) for image in data.data], data.targets, CIFAR10)


def parquet(files: Sequence[Path], classes: Sequence[str]) -> Source:
    """Rows of `image {bytes, path}` and `label`, as Hugging Face datasets write them."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError:
        raise UserError("reading parquet files needs pyarrow; pip install 'isomorph[data]'") from None
    try:
        tables = [read_table(file, columns=["image", "label"]) for file in files]
    except (ArrowException, OSError) as error:
        raise UserError(f"cannot read {files[0].parent}: {first_line(error)}") from None
    pictures = [row["bytes"] for table in tables for row in table["image"].to_pylist()]
    return Source(pictures, [label for table in tables for label in table["label"].to_pylist()], classes)


def imagefolder(split: str, root: Path) -> Source:
    """One folder a class, in `root/train` and `root/test` (or val, validation), or in `root` itself.

    Raises: UserError when the folder is missing or holds no class with images.
    """
    if not root.is_dir():
        raise UserError(f"no folder {root}; give data.root the folder that holds train/ and val/")
    named = [root / name for name in SPLITS[split] if (root / name).is_dir()]
    if not named and any((root / name).is_dir() for names in SPLITS.values() for name in names):
        raise UserError(f"{root} has no folder {' or '.join(SPLITS[split])} for the {split} split")
    top = named[0] if named else root
    classes = sorted(folder.name for folder in top.iterdir() if folder.is_dir())
    found = [(path, i) for i, name in enumerate(classes) for path in images_below(top / name)]
    if not found:
        raise UserError(
            f"no images in {top}; it must hold one folder per class with {', '.join(sorted(SUFFIXES))} files"
        )
    return Source([path for path, _ in found], [label for _, label in found], classes)


def images_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


SOURCES: dict[str, Callable[[str, Path], Source]] = {"digits": digits, "cifar10": cifar10, "imagefolder": imagefolder}


def open_source(name: str, split: str, root: str | Path | None = None) -> Source:
    """Opens the `train` or `test` split of a source; `root` defaults to $ISOMORPH_DATA, else ./data.

    Raises: UserError for an unknown source or split, or missing data.
    """
    if name not in SOURCES:
        raise UserError(f"data source {name!r} is unknown; choose one of {', '.join(SOURCES)}")
    if split not in SPLITS:
        raise UserError(f"split {split!r} is unknown; choose 'train' or 'test'")
    return SOURCES[name](split, Path(root or os.environ.get("ISOMORPH_DATA", "data")).expanduser())
