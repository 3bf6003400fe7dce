"""The test suites for ImageNet-1k models: their folders, their classes and labels, and ReaL's several labels."""

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from timm.data import ImageNetInfo

from isomorph.data.imagenet_labels import imagenet_labels
from isomorph.data.sources import Source, image_name
from isomorph.errors import UserError
from isomorph.evaluation.suites.locate import FLAT, SuiteLocation, find_suite, open_location
from isomorph.evaluation.suites.test_set import Scoring, TestSet

T = TypeVar("T")
U = TypeVar("U")
_WNID, _NUMBER = re.compile(r"n\d{8}"), re.compile(r"\d+")
_NAMING_HINT = "name classes by wnid (n01440764) or by label number (0 to 999)"
_IMAGE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")


def imagenet_classes(source: Source, suite: str, class_indices: np.ndarray | None, title: str) -> np.ndarray:
    """Return the ImageNet label (0 to 999) of every class of a source; -1 for a class without images.

    Class names may be wnids; label numbers (or, for a suite of 200 classes that are all present, indices among those);
    or ImageNet's English names in label order, as on the Hugging Face hub.

    Shape: class_indices (k,) labels of the suite's classes, None for all; -> (len(source.classes),)
    Raises: UserError for a class that the suite does not have.
    """
    names = {int(index): source.classes[index] for index in np.unique(source.labels)}
    labels = np.full(len(source.classes), -1)
    if not names:
        raise UserError(f"{title} has no images")
    if all(_NUMBER.fullmatch(name) for name in names.values()):
        found = _labels_from_numbers(names.values(), class_indices)
    elif _has_english_names(source.classes):
        found = list(names)
    else:
        found = [_label_of_wnid(name, title) for name in names.values()]
    labels[list(names)] = found
    _check_classes(dict(zip(names.values(), found, strict=True)), suite, class_indices, title)
    return labels


def with_imagenet_labels(source: Source, title: str) -> Source:
    """Return the same images with ImageNet-1k's 1000 labels instead of the source's own, matched by class name.

    Raises: UserError for a class that ImageNet-1k does not have.
    """
    relabelled = copy.copy(source)
    relabelled.labels = imagenet_classes(source, "ImageNet-1k", None, title)[source.labels]  # (n,)
    relabelled.classes = imagenet_labels().wnids
    return relabelled


def _labels_from_numbers(names: Iterable[str], class_indices: np.ndarray | None) -> list[int]:
    """Return labels from names like 7 or 0007; a complete 0 to 199 are indices among `class_indices`."""
    numbers = [int(name) for name in names]
    if class_indices is not None and sorted(numbers) == list(range(len(class_indices))):
        return class_indices[numbers].tolist()
    return numbers


def _label_of_wnid(name: str, title: str) -> int:
    """Return the label of a wnid. Raises: UserError for another name, or a wnid that ImageNet-1k does not have."""
    label = imagenet_labels().label_of.get(name)
    if label is None and _WNID.fullmatch(name):
        raise UserError(f"{title} has class {name}, which ImageNet-1k does not have; remove it, or choose its suite")
    if label is None:
        raise UserError(f"{title} has class {name!r}; {_NAMING_HINT}")
    return label


def _has_english_names(classes: Sequence[str]) -> bool:
    """True if these are ImageNet's 1000 English names ("tench, Tinca tinca", ...) in label order, up to 2 % of them.

    The whole list is compared because single names are ambiguous: two classes are called crane.
    """
    if len(classes) != len(imagenet_labels().wnids):
        return False
    english = (name.split(",")[0].lower() for name in ImageNetInfo("imagenet-1k").label_descriptions())
    equal = sum(name.lower().startswith(first) for name, first in zip(classes, english, strict=True))
    return equal >= 0.98 * len(classes)


def _check_classes(labels: dict[str, int], suite: str, class_indices: np.ndarray | None, title: str) -> None:
    """Raise UserError if a class, given by name and label, is not one of the suite's."""
    allowed = set(range(len(imagenet_labels().wnids)) if class_indices is None else class_indices.tolist())
    unknown = [name for name, label in labels.items() if label not in allowed]
    if unknown:
        hint = _NAMING_HINT if class_indices is None else f"check that it is {suite}"
        raise UserError(
            f"{title} has {len(unknown)} classes that are not among the {len(allowed)} of {suite}, for example "
            f"{unknown[0]}; {hint}"
        )


def real_labels(source: Source, title: str) -> np.ndarray:
    """Return ReaL's labels of every image, found by the number in its file name.

    Shape: -> (n, 9), padded with -1; a row of -1 only is an image that ReaL leaves out
    Source: Beyer et al. (2020)
    Raises: UserError when a name has no such number, or two images have the same name.
    """
    indices = np.asarray([_image_index(image_name(source.images, i), title) for i in range(len(source))], np.int64)
    values, counts = np.unique(indices, return_counts=True)
    if len(values) < len(indices):
        raise UserError(f"{title} has image ILSVRC2012_val_{values[counts > 1][0] + 1:08d} twice; remove one")
    return imagenet_labels().real[indices]


def _image_index(name: str | None, title: str) -> int:
    """Return the index (from 0) of an image among the 50,000 by its name. Raises: UserError for another name."""
    match = _IMAGE_NAME.search(name or "")
    number = int(match[1]) if match else 0
    if not 1 <= number <= len(imagenet_labels().real):
        found = f"has an image named {name}" if name else "has images without names"
        raise UserError(
            f"the suite real needs file names like ILSVRC2012_val_00000001.JPEG, but {title} {found}; "
            "restore the original names, or leave real out"
        )
    return number - 1


@dataclass(frozen=True)
class Suite:
    """A named test suite: the usual names of its folder, its number of images, and if it is scored by ReaL's labels."""

    name: str
    folders: tuple[str, ...]
    images: int
    multilabel: bool = False

    @property
    def class_indices(self) -> np.ndarray | None:
        """ImageNet labels of the suite's classes; None for all 1000."""
        return imagenet_labels().subsets.get(self.name)


_IMAGENET_FOLDERS = ("imagenet", "imagenet-val", "imagenet-1k", "ILSVRC2012", ".")
_V2_FOLDERS = {
    "imagenet-v2-matched-frequency": ("imagenetv2-matched-frequency-format-val", "imagenetv2-matched-frequency"),
    "imagenet-v2-threshold-0.7": ("imagenetv2-threshold0.7-format-val", "imagenetv2-threshold0.7"),
    "imagenet-v2-top-images": ("imagenetv2-top-images-format-val", "imagenetv2-top-images"),
}
"""Folders in the archives of the three test sets of ImageNet-V2."""
_SKETCH_FOLDERS = ("imagenet-sketch", "sketch", "ImageNet-Sketch")
SUITES = {
    suite.name: suite
    for suite in (
        Suite("imagenet", _IMAGENET_FOLDERS, 50_000),
        Suite("real", _IMAGENET_FOLDERS, 50_000, multilabel=True),
        Suite("imagenet-v2", ("imagenet-v2", *_V2_FOLDERS["imagenet-v2-matched-frequency"]), 10_000),
        *(Suite(name, (name, *folders), 10_000) for name, folders in _V2_FOLDERS.items()),
        Suite("imagenet-a", ("imagenet-a",), 7_500),
        Suite("imagenet-r", ("imagenet-r",), 30_000),
        Suite("imagenet-sketch", _SKETCH_FOLDERS, 50_889),
    )
}
"""Suites by name."""
NUM_CLASSES = 1000


def open_suites(
    wanted: Sequence[str], root: str | Path | None = None, form: str | None = None, partial: bool = False
) -> list[TestSet]:
    """Open test suites by name. Suites with the same images (imagenet, real) share a test set.

    `wanted` holds `NAME`, which is searched in `root` (by default $ISOMORPH_DATA, else ./data), or `NAME=FOLDER`; one
    string may hold several with commas. `form` is the format of the folders (imagefolder, tar, webdataset,
    huggingface), by default detected for each. `partial` accepts missing images and classes.

    Raises: UserError for an unknown suite, a missing folder, classes of another suite, or missing images.

    >>> from pathlib import Path
    >>> from PIL import Image
    >>> folder = Path("data/imagenet-sketch/n01440764")
    >>> folder.mkdir(parents=True)
    >>> Image.new("RGB", (32, 32)).save(folder / "1.png")
    >>> test_set, = iso.evaluation.open_suites(["imagenet-sketch"], root="data", partial=True)
    >>> test_set.title, len(test_set.source)
    ('imagenet-sketch', 1)
    """
    return open_located(find_suites(wanted, root, form), partial)


def find_suites(
    wanted: Sequence[str], root: str | Path | None = None, form: str | None = None
) -> dict[SuiteLocation, list[Suite]]:
    """Find the folders of suites without opening them.

    Raises: UserError with a line for every unknown suite and missing folder.
    """

    def locate(pair: tuple[str, str]) -> tuple[SuiteLocation, Suite]:
        name, folder = pair
        if name not in SUITES:
            raise UserError(f"suite {name!r} is unknown; choose from {', '.join(SUITES)}")
        return find_suite(name, folder, SUITES[name].folders, root, form), SUITES[name]

    locations: dict[SuiteLocation, list[Suite]] = {}
    for location, suite in _map_collecting_errors(locate, _parse_suites(wanted)):
        locations.setdefault(location, []).append(suite)
    return locations


def open_located(locations: Mapping[SuiteLocation, Sequence[Suite]], partial: bool = False) -> list[TestSet]:
    """Open the suites found by `find_suites`. Raises: UserError for classes of another suite, or missing images."""
    return _map_collecting_errors(lambda pair: _open_test_set(*pair, partial), locations.items())


def _map_collecting_errors(function: Callable[[T], U], items: Iterable[T]) -> list[U]:
    """Apply a function to every item. Raises: UserError with the messages of all failures, one per line."""
    results, problems = [], []
    for item in items:
        try:
            results.append(function(item))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return results


def _parse_suites(wanted: Sequence[str]) -> list[tuple[str, str]]:
    """Return the names and folders (or "") of suites. imagenet and real share a folder if only one of them has one.

    Raises: UserError for a suite that is given twice.
    """
    pairs = [item.strip().partition("=")[::2] for text in wanted for item in text.split(",")]
    folders = dict(pairs)
    if len(folders) < len(pairs):
        raise UserError("a suite is given twice; give each once")
    validation = folders.get("imagenet") or folders.get("real", "")
    return [(name, folder or (validation if name in ("imagenet", "real") else "")) for name, folder in pairs]


def _open_test_set(location: SuiteLocation, suites: Sequence[Suite], partial: bool) -> TestSet:
    """Open the images of a location, with the scoring of each suite."""
    source = open_location(location)
    return TestSet(source, _map_collecting_errors(lambda s: _build_scoring(s, source, location, partial), suites))


def _build_scoring(suite: Suite, source: Source, location: SuiteLocation, partial: bool) -> Scoring:
    """Return the scoring of a source by a suite. Raises: UserError for images of another suite, or missing ones."""
    wnids = imagenet_labels().wnids
    if suite.multilabel:
        labels = real_labels(source, location.title)
        _check_complete(suite, len(source), suite.images, "images", location, partial)
        return Scoring(suite.name, labels, wnids, num_classes=NUM_CLASSES)
    if location.form == FLAT:
        raise UserError(
            f"{location.title} has all images in one folder, which only the suite real can use; {suite.name} needs a "
            "folder per class"
        )
    labels = imagenet_classes(source, suite.name, suite.class_indices, location.title)[source.labels]  # (n,)
    indices = np.arange(NUM_CLASSES) if suite.class_indices is None else suite.class_indices
    _check_complete(suite, len(np.unique(labels)), len(indices), "classes", location, partial)
    _check_complete(suite, len(source), suite.images, "images", location, partial)
    classes = [wnids[index] for index in indices]
    return Scoring(suite.name, np.searchsorted(indices, labels), classes, suite.class_indices, NUM_CLASSES)


def _check_complete(suite: Suite, count: int, expected: int, noun: str, location: SuiteLocation, partial: bool) -> None:
    """Raise UserError if there are more images or classes than the suite has or, unless `partial`, fewer."""
    if count > expected or (count < expected and not partial):
        hint = "; to evaluate on a part of it, give --partial (partial=True)" if count < expected else ""
        raise UserError(f"{location.title} has {count:,} {noun}, {suite.name} has {expected:,}{hint}")
