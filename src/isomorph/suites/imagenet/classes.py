"""From the names of a source's classes to ImageNet's labels: by name, never by the place in a list alone."""

import copy
import re
from collections.abc import Iterable, Sequence

import numpy as np
from timm.data import ImageNetInfo

from isomorph.data.imagenet_labels import imagenet_labels
from isomorph.data.sources import Source
from isomorph.errors import UserError

_WNID = re.compile(r"n\d{8}")
_NUMBER = re.compile(r"\d+")
_NAMING_HINT = "classes must be called by wnid (n01440764) or by the number of their label, 0 to 999"


def imagenet_classes(source: Source, suite: str, kept: np.ndarray | None, title: str) -> np.ndarray:
    """The label among ImageNet's 1000 of every class of a source; -1 for a class without images.

    Names may be wnids; numbers, which are labels (or, where a suite keeps 200 classes and all are there, places among
    these); or ImageNet's English names in label order, as the hub has them.

    Shape: kept (k,) labels of the suite's classes, None for all; -> (len(source.classes),)
    Raises: UserError naming a class that is none of the suite's.
    """
    names = {int(place): source.classes[place] for place in np.unique(source.labels)}
    labels = np.full(len(source.classes), -1)
    if not names:
        raise UserError(f"{title} has no images")
    if all(_NUMBER.fullmatch(name) for name in names.values()):
        found = _labels_from_numbers(names.values(), kept)
    elif _has_english_names(source.classes):
        found = list(names)
    else:
        found = [_label_of_wnid(name, title) for name in names.values()]
    labels[list(names)] = found
    _check_classes(dict(zip(names.values(), found, strict=True)), suite, kept, title)
    return labels


def with_imagenet_labels(source: Source, title: str) -> Source:
    """The same images with ImageNet-1k's 1000 labels in place of the source's own, by the names of its classes.

    Raises: UserError naming a class that ImageNet-1k does not have.
    """
    named = copy.copy(source)
    named.labels = imagenet_classes(source, "ImageNet-1k", None, title)[source.labels]  # (n,)
    named.classes = imagenet_labels().wnids
    return named


def _labels_from_numbers(names: Iterable[str], kept: np.ndarray | None) -> list[int]:
    """Labels from names like 7 or 0007; 0 to 199, complete, are places among the kept."""
    numbers = [int(name) for name in names]
    if kept is not None and sorted(numbers) == list(range(len(kept))):
        return kept[numbers].tolist()
    return numbers


def _label_of_wnid(name: str, title: str) -> int:
    """The label of a wnid. Raises: UserError for another name, or a wnid that ImageNet-1k does not have."""
    label = imagenet_labels().number.get(name)
    if label is None and _WNID.fullmatch(name):
        raise UserError(
            f"{title} has class {name}, which is none of ImageNet-1k's 1000; remove it or give its own suite"
        )
    if label is None:
        raise UserError(f"{title} has class {name!r}; {_NAMING_HINT}")
    return label


def _has_english_names(classes: Sequence[str]) -> bool:
    """Whether these are ImageNet's 1000 names in label order ("tench, Tinca tinca", ...); a few may be spelt anew.

    Two classes are called crane, so that a name alone does not always tell: the whole list does.
    """
    if len(classes) != len(imagenet_labels().wnids):
        return False
    known = (name.split(",")[0].lower() for name in ImageNetInfo("imagenet-1k").label_descriptions())
    return sum(name.lower().startswith(first) for name, first in zip(classes, known, strict=True)) >= 0.98 * len(
        classes
    )


def _check_classes(found: dict[str, int], suite: str, kept: np.ndarray | None, title: str) -> None:
    """Raises: UserError naming a class that is not one of the suite's."""
    known = set(range(len(imagenet_labels().wnids)) if kept is None else kept.tolist())
    strangers = [name for name, label in found.items() if label not in known]
    if strangers:
        hint = _NAMING_HINT if kept is None else f"is this {suite}?"
        raise UserError(
            f"{title} has {len(strangers)} classes that are not among the {len(known)} of {suite}, the first of them "
            f"{strangers[0]}; {hint}"
        )
