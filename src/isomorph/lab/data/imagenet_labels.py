"""ImageNet's labels: wnids, the classes of ImageNet-A and ImageNet-R, ReaL's labels, and a source's by its names."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from timm.data import ImageNetInfo

from isomorph.errors import UserError
from isomorph.lab.data.sources import Source, image_name, renumbered, with_changes

# written by benchmarks/imagenet_labels.py
LABEL_FILE = Path(__file__).with_name("imagenet_labels.npz")
NUM_CLASSES = 1000
_WNID = re.compile(r"n\d{8}")
_NUMBER = re.compile(r"\d+")
_NAMING_HINT = "name classes by wnid (n01440764) or by label number (0 to 999)"
_IMAGE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")


@dataclass(frozen=True)
class ImageNetLabels:
    """The 1000 wnids in label order, the classes of each smaller suite, and ReaL's labels of the 50,000 val images.

    Shape: subsets, each (200,) int64, ascending; real (50000, 9) int64, padded with -1
    Source: timm (wnids); Hendrycks et al., natural-adv-examples and imagenet-r (subsets); Beyer et al. (2020),
    reassessed-imagenet (real)
    """

    wnids: tuple[str, ...]
    subsets: dict[str, np.ndarray]
    real: np.ndarray

    @cached_property
    def label_of(self) -> dict[str, int]:
        """The label of each wnid."""
        return {wnid: label for label, wnid in enumerate(self.wnids)}


@lru_cache(maxsize=1)
def imagenet_labels() -> ImageNetLabels:
    """Return the labels; their file is read once."""
    with np.load(LABEL_FILE, allow_pickle=False) as file:
        wnids = tuple(file["wnids"].astype(str).tolist())
        subsets = {
            "imagenet-a": file["imagenet_a"].astype(np.int64),
            "imagenet-r": file["imagenet_r"].astype(np.int64),
        }
        counts = file["real_counts"]
        real = np.full((len(counts), int(counts.max())), -1, np.int64)
        is_label = np.arange(real.shape[1]) < counts[:, None]
        real[is_label] = file["real"]
        return ImageNetLabels(wnids, subsets, real)


def imagenet_classes(
    source: Source, suite: str, class_indices: np.ndarray | None, title: str
) -> np.ndarray:
    """Return the ImageNet label (0 to 999) of every class of a source; -1 for a class without images.

    Class names may be wnids; label numbers (or, for a suite of 200 classes that are all present, indices among those);
    or ImageNet's English names in label order, as on the Hugging Face hub.

    Shape: class_indices (k,) labels of the suite's classes, None for all; -> (len(source.classes),)
    Raises: UserError for a class that the suite does not have.
    """
    present = np.unique(source.labels[source.labels >= 0])
    names = {int(index): source.classes[index] for index in present}
    labels = np.full(len(source.classes), -1)
    if not names:
        raise UserError(f"{title} has no images")
    if all(map(_NUMBER.fullmatch, names.values())):
        known = list(map(int, names.values()))
        if class_indices is not None and sorted(known) == list(range(len(class_indices))):
            known = class_indices[known].tolist()  # a complete 0 to 199
    elif _has_english_names(source.classes):
        known = list(names)
    else:
        known = [_label_of_wnid(name, title) for name in names.values()]
    labels[list(names)] = known
    hint = _NAMING_HINT
    allowed = set(range(len(imagenet_labels().wnids)))
    if class_indices is not None:
        hint = f"check that it is {suite}"
        allowed = set(class_indices.tolist())
    unknown = [
        name for name, label in zip(names.values(), known, strict=True) if label not in allowed
    ]
    if unknown:
        raise UserError(
            f"{title} has {len(unknown)} classes that are not among the {len(allowed)} of {suite}, "
            f"for example {unknown[0]}; {hint}"
        )
    return labels


def with_imagenet_labels(source: Source, title: str) -> Source:
    """Replace the labels by ImageNet-1k's, matched by class name. Raises: UserError for another class."""
    numbers = imagenet_classes(source, "ImageNet-1k", None, title)
    labels = renumbered(source.labels, numbers)  # (n,)
    return with_changes(source, labels=labels, classes=imagenet_labels().wnids)


def _label_of_wnid(name: str, title: str) -> int:
    label = imagenet_labels().label_of.get(name)
    if label is not None:
        return label
    if _WNID.fullmatch(name):
        raise UserError(
            f"{title} has class {name!r}, which ImageNet-1k does not have; remove it, or choose "
            "its suite"
        )
    raise UserError(f"{title} has class {name!r}; {_NAMING_HINT}")


def _has_english_names(classes: Sequence[str]) -> bool:
    """True for ImageNet's 1000 English names in label order, up to 2 %; single names are ambiguous (two are crane)."""
    if len(classes) != len(imagenet_labels().wnids):
        return False
    equal = 0
    descriptions = ImageNetInfo("imagenet-1k").label_descriptions()
    for name, description in zip(classes, descriptions, strict=True):
        first = description.split(",")[0].lower()
        equal += name.lower().startswith(first)
    return equal >= 0.98 * len(classes)


def real_labels(source: Source, title: str) -> np.ndarray:
    """Return ReaL's labels of every image, found by the number in its file name.

    Shape: -> (n, 9), padded with -1; a row of -1 only is an image that ReaL leaves out
    Source: Beyer et al. (2020)
    Raises: UserError when a name has no such number, or two images have the same name.
    """
    names = [image_name(source.images, i) for i in range(len(source))]
    indices = np.asarray([_image_index(name, title) for name in names], np.int64)
    values, counts = np.unique(indices, return_counts=True)
    if len(values) < len(indices):
        number = values[counts > 1][0] + 1
        raise UserError(f"{title} has image ILSVRC2012_val_{number:08d} twice; remove one")
    return imagenet_labels().real[indices]


def _image_index(name: str | None, title: str) -> int:
    """Return the index (from 0) of an image among the 50,000 by its name."""
    match = _IMAGE_NAME.search(name or "")
    number = int(match[1]) if match else 0
    if not 1 <= number <= len(imagenet_labels().real):
        given = f"has an image named {name}" if name else "has images without names"
        raise UserError(
            f"the suite real needs file names like ILSVRC2012_val_00000001.JPEG, but {title} {given}; "
            "restore the original names, or leave real out"
        )
    return number - 1
