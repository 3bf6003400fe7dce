"""Hugging Face data sets, from the hub or a folder: memory-mapped, or opened for streaming."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from isomorph.errors import UserError, first_line, optional_module
from isomorph.lab.data.formats.naming import (
    IMAGE_SUFFIXES,
    SPLIT_NAMES,
    SPLITS,
    check_known_classes,
    check_one_split,
    composed,
    named_for,
    number_classes,
    numbered_by_name,
    report_unnamed,
    split_words,
    visible,
)
from isomorph.lab.data.formats.parquet import label_columns, stored_classes
from isomorph.lab.data.sources import ImageLike, Source
from isomorph.terminal_tables import Row

_IMAGE_COLUMNS = ("image", "img", *sorted(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES))


@dataclass(frozen=True)
class TrainingClasses:
    """The names of the classes of a data set's training split, in order; `title` is the split's name in errors."""

    title: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetSplit:
    """One split of a data set as the `datasets` library opens it, and its columns of images and labels.

    `title` is its name in errors, `images` is the number of images if known. `more_labels` are further columns of
    labels, which must agree with the first.
    """

    title: str
    dataset: Any
    images: int | None = None
    training: TrainingClasses = TrainingClasses()
    image: str = ""
    label: str = ""
    more_labels: tuple[str, ...] = ()

    @property
    def label_columns(self) -> tuple[str, ...]:
        """All columns of labels."""
        return (self.label, *self.more_labels)

    def numbering(self) -> tuple[tuple[str, ...], np.ndarray]:
        """Return the classes as the training split numbers them, and the number of each stored label.

        Both are empty where the data set does not name its classes.

        Shape: -> (classes), (labels,)
        Raises: UserError when this split has a class that the training split lacks.
        """
        known = self.training.names
        names = tuple(_class_names(self.dataset.features, self.label) or known)
        if not known:
            known = names
        check_known_classes(self.title, names, self.training.title, known)
        return numbered_by_name(names, known)

    def check_same_labels(
        self, labels: Sequence[Sequence[Any]], name: Callable[[int], str]
    ) -> None:
        """Raise a UserError when the columns of labels give an image, called `name(i)`, labels of different classes.

        A negative number, and anything but a number, is not a label. Classes are compared by their names, where both
        columns have them.

        Shape: labels (columns, n)
        """
        first, *others = map(_numbers_of, labels)
        for column, values in zip(self.more_labels, others, strict=True):
            own = self._numbered_as_first(column, values)
            wrong = np.flatnonzero((own >= 0) & (first >= 0) & (own != first))
            if len(wrong):
                index = int(wrong[0])
                raise UserError(
                    f"{name(index)} has two labels, {first[index]} in column {self.label} and "
                    f"{values[index]} in column {column}; keep one of the columns"
                )

    def _numbered_as_first(self, column: str, labels: np.ndarray) -> np.ndarray:
        """Return the labels of a column as the first column numbers their classes; -1 for a class that it lacks."""
        names = _class_names(self.dataset.features, self.label)
        others = _class_names(self.dataset.features, column)
        if not names or not others or names == others:
            return labels
        numbers = np.array([names.index(name) if name in names else -1 for name in others])
        known = (labels >= 0) & (labels < len(others))
        return np.where(known, numbers[np.where(known, labels, 0)], -1)

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
        row = self.split.dataset[range(len(self))[index]]
        return self.split.stored_image(row[self.split.image])

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
    Images are in a column image or img (jpg, png, webp and other suffixes), labels in label, fine_label or labels
    (cls). Classes are numbered as in the training split, by their names. The `datasets` library downloads hub data to
    its cache and converts parquet data to a memory-mapped copy there (as large again), from which images are read. If
    the test split has no labels (all -1), the validation split is used.

    Raises: UserError when the package, the network, the data set, its split or a column is missing, a class is not
    one of the training split's, or two columns of labels do not agree.
    """
    opened = open_dataset_split(split, root)
    labels = _read_labels(opened, opened.label)
    if not len(labels):
        raise UserError(f"{opened.title} has no images")
    classes, numbers = opened.numbering()
    if not classes:
        largest = labels.max(initial=0)
        for other in SPLITS.keys() - {split}:
            for part in _matching_splits(other, root, streaming=False):
                largest = max(largest, _read_labels(part, part.label).max(initial=0))
        classes = tuple(number_classes(int(largest), opened.title))
        numbers = np.arange(len(classes))
    if labels.min() < 0 or labels.max() >= len(numbers):
        raise UserError(
            f"{opened.title} has labels {labels.min()} to {labels.max()}, but {len(numbers)} classes"
        )
    images = DatasetImages(opened)
    if opened.more_labels:
        columns = [_read_labels(opened, column).tolist() for column in opened.label_columns]
        opened.check_same_labels(columns, images.name)
    return Source(images, numbers[labels], classes)


def _class_names(features: Any, column: str) -> list[str]:
    if not features:
        return []
    names = getattr(features[column], "names", None)
    return [composed(name) for name in names or []]


def _numbers_of(labels: Sequence[Any]) -> np.ndarray:
    """Return labels that are numbers, -1 for others."""
    return np.array([label if isinstance(label, int) else -1 for label in labels])


def _read_labels(split: DatasetSplit, column: str) -> np.ndarray:
    with explain_dataset_errors(split.title):
        table = split.dataset.select_columns([column]).with_format("arrow")[:]
        labels = table.column(column).to_numpy()
    if labels.dtype.kind not in "iu":
        raise UserError(f"column {column} of {split.title} must hold whole numbers (class labels)")
    return labels


def open_dataset_split(split: str, root: Path, streaming: bool = False) -> DatasetSplit:
    """Return the first split with a matching name that has labels. Raises: UserError when there is none."""
    unlabelled = None
    if os.path.isdir(root):
        _check_names_of_files(root)
    for candidate in _matching_splits(split, root, streaming):
        with explain_dataset_errors(candidate.title):
            rows = candidate.dataset.select_columns([candidate.label])
            row: Row = next(iter(rows), {})
            first = row.get(candidate.label)
        if not isinstance(first, int) or first >= 0:
            return candidate
        unlabelled = candidate
    if unlabelled:
        raise UserError(
            f"{unlabelled.title} has no labels (they are {first}); use data whose labels are public"
        )
    naming = ""
    if os.path.isdir(root):
        naming = f"; parquet files must be named like {SPLITS[split][0]}-00000.parquet"
    raise UserError(f"{root.as_posix()} has no split {SPLIT_NAMES[split]}{naming}")


def _matching_splits(split: str, root: Path, streaming: bool) -> Iterator[DatasetSplit]:
    datasets = optional_module("datasets", "this source needs the package datasets", "data")
    find = _local_splits if os.path.isdir(root) else _hub_splits
    for candidate in find(split, root, streaming):
        with explain_dataset_errors(candidate.title):
            columns = list(candidate.dataset.features or next(iter(candidate.dataset), {}))
            images = [name for name in _IMAGE_COLUMNS if name in columns]
            labels = label_columns(columns)
            if not images or not labels:
                raise UserError(
                    f"{candidate.title} has columns {', '.join(columns)}; it must have image and label"
                )
            undecoded = candidate.dataset.cast_column(images[0], datasets.Image(decode=False))
        first, *others = labels
        more = tuple(name for name in others if _holds_numbers(candidate.dataset.features, name))
        yield replace(candidate, dataset=undecoded, image=images[0], label=first, more_labels=more)


def _holds_numbers(features: Any, column: str) -> bool:
    if not features:
        return False
    dtype = getattr(features[column], "dtype", None)
    return str(dtype).startswith(("int", "uint"))


def _hub_splits(split: str, root: Path, streaming: bool) -> Iterator[DatasetSplit]:
    from datasets import load_dataset

    name, _, config = root.as_posix().partition(":")
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise UserError(
            f"{root} is neither a folder nor a name on the hub; those are like timm/mini-imagenet"
        )
    with explain_dataset_errors(name):
        splits = load_dataset(name, config or None, streaming=streaming)
    training = _training_on_hub(name, splits)
    for path in named_for(list(map(Path, splits)), split):
        word = path.name
        sizes = splits[word].info.splits
        images = getattr(sizes[word], "num_examples", None) if sizes else None
        yield DatasetSplit(f"the {word} split of {name}", splits[word], images or None, training)


def _training_on_hub(name: str, splits: Mapping[str, Any]) -> TrainingClasses:
    named: list[Path] = []
    with suppress(UserError):  # several training splits, of which none is meant for certain
        named = named_for(list(map(Path, splits)), "train")
    if not named:
        return TrainingClasses()
    word = named[0].name
    features = splits[word].features
    columns = label_columns(features or ())
    if not columns:
        return TrainingClasses()
    return TrainingClasses(f"the {word} split of {name}", tuple(_class_names(features, columns[0])))


def _local_splits(split: str, root: Path, streaming: bool) -> Iterator[DatasetSplit]:
    from datasets import load_dataset
    from pyarrow.parquet import read_metadata

    training = _training_in_folder(root)
    for word in SPLITS[split]:
        title = f"the {word} split in {root}"
        files = parquet_files(root, word)
        if files:
            stored_classes(files)  # the same in every file, which the library does not check
            with explain_dataset_errors(title):
                listed = {word: [str(file) for file in files]}
                opened = load_dataset("parquet", data_files=listed, split=word, streaming=streaming)
                images = sum(read_metadata(file).num_rows for file in files)
            yield DatasetSplit(title, opened, images, training)


def _training_in_folder(root: Path) -> TrainingClasses:
    for word in SPLITS["train"]:
        files = parquet_files(root, word)
        if files:
            return TrainingClasses(f"the {word} split in {root}", tuple(stored_classes(files)))
    return TrainingClasses()


def parquet_files(root: Path, word: str) -> list[Path]:
    """Return the parquet files of a split, sorted; the split is named by the files or by their folder."""
    named = [path for path in _parquet_files_of_root(root) if word in split_words(path.stem)]
    if named:
        return named
    folders = [folder for folder in visible(root) if split_words(folder.name) == [word]]
    return [path for folder in folders for path in visible(folder, ".parquet")]


def _parquet_files_of_root(root: Path) -> list[Path]:
    return [*visible(root, ".parquet"), *visible(root / "data", ".parquet")]


def _check_names_of_files(root: Path) -> None:
    """Check that files are named for one split each, and warn of those that are named for none."""
    words = {path: split_words(path.stem) for path in _parquet_files_of_root(root)}
    if not any(words.values()):
        words = {}
        for folder in visible(root):
            for path in visible(folder, ".parquet"):
                words[path] = split_words(folder.name)
    check_one_split(words)
    report_unnamed(root, words)


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
        raise UserError(
            f"{first_line(error)}; check the name, or log in with `hf auth login` if it is gated"
        ) from None
    except (ConnectionError, HfHubHTTPError) as error:
        raise UserError(
            f"cannot reach {title}: {first_line(error)}; check the network, or give a folder"
        ) from None
    except (
        DatasetsError,
        *HfHubHTTPError.__bases__,
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
    ) as error:
        raise UserError(f"cannot read {title}: {first_line(error)}") from None
