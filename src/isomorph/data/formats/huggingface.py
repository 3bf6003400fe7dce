"""Hugging Face data sets, from the hub or a folder: memory-mapped, or opened for streaming."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from isomorph.data.formats.naming import SPLIT_NAMES, SPLITS, composed, named_for, number_classes, split_words, visible
from isomorph.data.sources import ImageLike, Source
from isomorph.errors import UserError, first_line, optional_module

_COLUMN_NAMES = {
    "image": ("image", "img", "jpg", "jpeg", "png", "webp"),
    "label": ("label", "fine_label", "labels", "cls"),
}


@dataclass(frozen=True)
class DatasetSplit:
    """One split of a data set as the `datasets` library opens it, and its columns of images and labels.

    `title` is its name in errors, `images` is the number of images if known.
    """

    title: str
    dataset: Any
    images: int | None = None
    image: str = ""
    label: str = ""

    @property
    def names(self) -> list[str]:
        """Names of the classes; empty where the data set has none."""
        features = self.dataset.features
        return [composed(name) for name in getattr(features[self.label], "names", None) or []] if features else []

    def stored_image(self, cell: Any) -> ImageLike:
        """Return the bytes of the image in a cell. Raises: OSError for none."""
        if not isinstance(cell, Mapping) or cell.get("bytes") is None:
            raise OSError("the data set has no bytes of it")
        return cell["bytes"]


class DatasetImages(Sequence[ImageLike]):
    """The images of a memory-mapped data set."""

    def __init__(self, split: DatasetSplit) -> None:
        self.split = replace(split, dataset=split.dataset.select_columns([split.image]))

    def __len__(self) -> int:
        return len(self.split.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.split.stored_image(self.split.dataset[range(len(self))[index]][self.split.image])

    def name(self, index: int) -> str:
        return f"image {index} of {self.split.title}"

    @cached_property
    def _paths(self) -> Any:
        from pyarrow.compute import struct_field

        return struct_field(self.split.dataset.data.column(self.split.image), "path")

    def file_name(self, index: int) -> str | None:
        """Return the path that the data set stores with an image, if any, in a column of its own."""
        return self._paths[index].as_py()


def huggingface(split: str, root: Path) -> Source:
    """Open a data set by its name on the hub (`owner/name` or `owner/name:config`), or in a folder.

    The folder holds parquet files (`train-*.parquet`, also in `data/`, or any in `train/`).
    Images are in a column image or img (jpg, png, webp), labels in label, fine_label or labels (cls). The `datasets`
    library downloads hub data to its cache and converts parquet data to a memory-mapped copy there (as large again),
    from which images are read. If the test split has no labels (all -1), the validation split is used.

    Raises: UserError when the package, the network, the data set, its split or a column is missing.
    """
    found = open_split(split, root)
    labels = _read_labels(found)
    if not len(labels):
        raise UserError(f"{found.title} has no images")
    classes = found.names
    if not classes:
        splits = [found, *(other for name in SPLITS if name != split for other in _matching_splits(name, root, False))]
        classes = number_classes(max(int(_read_labels(each).max(initial=0)) for each in splits), found.title)
    if labels.min() < 0 or labels.max() >= len(classes):
        raise UserError(f"{found.title} has labels {labels.min()} to {labels.max()}, but {len(classes)} classes")
    return Source(DatasetImages(found), labels, classes)


def _read_labels(split: DatasetSplit) -> np.ndarray:
    with explain_dataset_errors(split.title):
        table = split.dataset.select_columns([split.label]).with_format("arrow")[:]
        labels = table.column(split.label).to_numpy()
    if labels.dtype.kind not in "iu":
        raise UserError(f"column {split.label} of {split.title} must hold whole numbers (class labels)")
    return labels


def open_split(split: str, root: Path, streaming: bool = False) -> DatasetSplit:
    """Return the first split with a matching name that has labels. Raises: UserError when there is none."""
    unlabelled = None
    for candidate in _matching_splits(split, root, streaming):
        with explain_dataset_errors(candidate.title):
            first = next((row[candidate.label] for row in candidate.dataset.select_columns([candidate.label])), None)
        if not isinstance(first, int) or first >= 0:
            return candidate
        unlabelled = candidate
    if unlabelled:
        raise UserError(f"{unlabelled.title} has no labels (they are {first}); use data whose labels are public")
    naming = f"; parquet files must be named like {SPLITS[split][0]}-00000.parquet" if os.path.isdir(root) else ""
    raise UserError(f"{root.as_posix()} has no split {SPLIT_NAMES[split]}{naming}")


def _matching_splits(split: str, root: Path, streaming: bool) -> Iterator[DatasetSplit]:
    datasets = optional_module("datasets", "this source needs the package datasets", "data")
    candidates = (_local_splits if os.path.isdir(root) else _hub_splits)(split, root, streaming)
    for candidate in candidates:
        with explain_dataset_errors(candidate.title):
            columns = list(candidate.dataset.features or next(iter(candidate.dataset), {}))
            chosen = {
                kind: next((name for name in names if name in columns), "") for kind, names in _COLUMN_NAMES.items()
            }
            if not all(chosen.values()):
                raise UserError(f"{candidate.title} has columns {', '.join(columns)}; it must have image and label")
            undecoded = candidate.dataset.cast_column(chosen["image"], datasets.Image(decode=False))
        yield replace(candidate, dataset=undecoded, image=chosen["image"], label=chosen["label"])


def _hub_splits(split: str, root: Path, streaming: bool) -> Iterator[DatasetSplit]:
    from datasets import load_dataset

    name, _, config = root.as_posix().partition(":")
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise UserError(f"{root} is neither a folder nor a name on the hub; those are like timm/mini-imagenet")
    with explain_dataset_errors(name):
        splits = load_dataset(name, config or None, streaming=streaming)
    for word in (path.name for path in named_for([Path(each) for each in splits], split)):
        info = (splits[word].info.splits or {word: None})[word]
        images = getattr(info, "num_examples", None) or None
        yield DatasetSplit(f"the {word} split of {name}", splits[word], images)


def _local_splits(split: str, root: Path, streaming: bool) -> Iterator[DatasetSplit]:
    from datasets import load_dataset
    from pyarrow.parquet import read_metadata

    for word in SPLITS[split]:
        title, files = f"the {word} split in {root}", parquet_files(root, word)
        if files:
            with explain_dataset_errors(title):
                listed = {word: [str(file) for file in files]}
                opened = load_dataset("parquet", data_files=listed, split=word, streaming=streaming)
                images = sum(read_metadata(file).num_rows for file in files)
            yield DatasetSplit(title, opened, images)


def parquet_files(root: Path, word: str) -> list[Path]:
    """Return the parquet files of a split, sorted; the split is named by the files or by their folder."""
    files = [path for folder in (root, root / "data") for path in visible(folder, ".parquet")]
    folders = [folder for folder in visible(root) if split_words(folder.name) == [word]]
    named = [path for path in files if word in split_words(path.stem)]
    return named or [path for folder in folders for path in visible(folder, ".parquet")]


@contextmanager
def explain_dataset_errors(title: str) -> Iterator[None]:
    """Turn exceptions of the `datasets` library and the network into a UserError of one line."""
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except UserError:
        raise
    except DatasetNotFoundError as error:
        raise UserError(f"{first_line(error)}; check the name, or log in with `hf auth login` if it is gated") from None
    except (ConnectionError, HfHubHTTPError) as error:
        raise UserError(f"cannot reach {title}: {first_line(error)}; check the network, or give a folder") from None
    except (DatasetsError, *HfHubHTTPError.__bases__, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise UserError(f"cannot read {title}: {first_line(error)}") from None
