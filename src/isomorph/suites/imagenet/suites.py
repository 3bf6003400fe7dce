"""The test sets for models of ImageNet-1k: where each lies, whose classes it has, how its answers are judged."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from isomorph.data.imagenet_labels import imagenet_labels
from isomorph.data.sources import Source
from isomorph.errors import UserError
from isomorph.suites.imagenet.classes import imagenet_classes
from isomorph.suites.imagenet.locate import (
    FLAT,
    SuiteLocation,
    find_suite,
    open_location,
)
from isomorph.suites.imagenet.real import real_labels
from isomorph.suites.test_set import Scoring, TestSet

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Suite:
    """A test set by name: the folders that usually hold it, how many images it has, whether ReaL's labels judge it."""

    name: str
    folders: tuple[str, ...]
    images: int
    sets: bool = False

    @property
    def kept(self) -> np.ndarray | None:
        """Labels of the classes that the logits are reduced to; None for all 1000."""
        return imagenet_labels().kept.get(self.name)


_IMAGENET_FOLDERS = ("imagenet", "imagenet-val", "imagenet-1k", "ILSVRC2012", ".")
_V2_FOLDERS = {
    "imagenet-v2-matched-frequency": ("imagenetv2-matched-frequency-format-val", "imagenetv2-matched-frequency"),
    "imagenet-v2-threshold-0.7": ("imagenetv2-threshold0.7-format-val", "imagenetv2-threshold0.7"),
    "imagenet-v2-top-images": ("imagenetv2-top-images-format-val", "imagenetv2-top-images"),
}
"""The three test sets of ImageNet-V2 and the folders that their archives unpack to."""
_SKETCH_FOLDERS = ("imagenet-sketch", "sketch", "ImageNet-Sketch")
SUITES = {
    suite.name: suite
    for suite in (
        Suite("imagenet", _IMAGENET_FOLDERS, 50_000),
        Suite("real", _IMAGENET_FOLDERS, 50_000, sets=True),
        Suite("imagenet-v2", ("imagenet-v2", *_V2_FOLDERS["imagenet-v2-matched-frequency"]), 10_000),
        *(Suite(name, (name, *folders), 10_000) for name, folders in _V2_FOLDERS.items()),
        Suite("imagenet-a", ("imagenet-a",), 7_500),
        Suite("imagenet-r", ("imagenet-r",), 30_000),
        Suite("imagenet-sketch", _SKETCH_FOLDERS, 50_889),
    )
}
NUM_CLASSES = 1000


def open_suites(
    wanted: Sequence[str], root: str | Path | None = None, form: str | None = None, partial: bool = False
) -> list[TestSet]:
    """Opens suites: `NAME`, looked for in `root`, or `NAME=FOLDER`; several may be in one string, with commas between.

    Suites on the same images (imagenet, real) share one pass of the model. `form` is a kind of source (imagefolder,
    tar, webdataset, huggingface), by default found out folder by folder; `partial` allows a part of the images.

    Raises: UserError for an unknown suite, a missing folder, classes that are not the suite's, or missing images.
    """
    return open_located(find_suites(wanted, root, form), partial)


def find_suites(
    wanted: Sequence[str], root: str | Path | None = None, form: str | None = None
) -> dict[SuiteLocation, list[Suite]]:
    """Where the suites lie, nothing opened yet.

    Raises: UserError for unknown suites or missing folders, a line each.
    """

    def located(pair: tuple[str, str]) -> tuple[SuiteLocation, Suite]:
        name, folder = pair
        if name not in SUITES:
            raise UserError(f"suite {name!r} is unknown; choose from {', '.join(SUITES)}")
        return find_suite(name, folder, SUITES[name].folders, root, form), SUITES[name]

    places: dict[SuiteLocation, list[Suite]] = {}
    for place, suite in _map_collecting_errors(located, _parse_suites(wanted)):
        places.setdefault(place, []).append(suite)
    return places


def _map_collecting_errors(work: Callable[[T], U], items: Iterable[T]) -> list[U]:
    """What the work gives of every item. Raises: UserError with what is wrong with all of them, a line each."""
    found, problems = [], []
    for item in items:
        try:
            found.append(work(item))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return found


def open_located(places: Mapping[SuiteLocation, Sequence[Suite]], partial: bool = False) -> list[TestSet]:
    """Opens what `find_suites` found. Raises: UserError for classes that are not the suite's, or missing images."""
    return _map_collecting_errors(lambda found: _open_test_set(*found, partial), places.items())


def _parse_suites(wanted: Sequence[str]) -> list[tuple[str, str]]:
    """Names and folders (or "") of the suites asked for; imagenet and real have one folder if only one says so.

    Raises: UserError for a repeated one.
    """
    pairs = [item.strip().partition("=")[::2] for given in wanted for item in given.split(",")]
    folders = dict(pairs)
    if len(folders) < len(pairs):
        raise UserError("a suite is named twice; name each once")
    of_val = folders.get("imagenet") or folders.get("real", "")
    return [(name, folder or (of_val if name in ("imagenet", "real") else "")) for name, folder in pairs]


def _open_test_set(place: SuiteLocation, suites: Sequence[Suite], partial: bool) -> TestSet:
    """The images of a place, with the view that each suite has of them."""
    source = open_location(place)
    return TestSet(source, _map_collecting_errors(lambda suite: _build_scoring(suite, source, place, partial), suites))


def _build_scoring(suite: Suite, source: Source, place: SuiteLocation, partial: bool) -> Scoring:
    """How a suite judges a source. Raises: UserError when the source is not the suite's images, or only a part."""
    labels = imagenet_labels()
    if suite.sets:
        answers = real_labels(source, place.title)
        _check_complete(suite, len(source), suite.images, "images", place, partial)
        return Scoring(suite.name, answers, labels.wnids, outputs=NUM_CLASSES)
    if place.form == FLAT:
        raise UserError(
            f"{place.title} has its images in one folder, which only real can judge (by their names); "
            f"{suite.name} needs a folder a class"
        )
    found = imagenet_classes(source, suite.name, suite.kept, place.title)[source.labels]  # (n,)
    kept = np.arange(NUM_CLASSES) if suite.kept is None else suite.kept
    _check_complete(suite, len(np.unique(found)), len(kept), "classes", place, partial)
    _check_complete(suite, len(source), suite.images, "images", place, partial)
    classes = [labels.wnids[label] for label in kept]
    return Scoring(suite.name, np.searchsorted(kept, found), classes, suite.kept, NUM_CLASSES)


def _check_complete(suite: Suite, found: int, expected: int, what: str, place: SuiteLocation, partial: bool) -> None:
    """Raises: UserError when there are more than the suite has, or, where a part will not do, fewer."""
    if found > expected or (found < expected and not partial):
        part = "; to evaluate on a part all the same: --partial (partial=True)" if found < expected else ""
        raise UserError(f"{place.title} has {found:,} {what}, {suite.name} has {expected:,}{part}")
