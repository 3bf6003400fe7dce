"""ImageNet's test suites: their folders, their labels, and the accuracy of a model on them."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from isomorph.errors import UserError
from isomorph.lab.data.formats.naming import SPLITS, visible
from isomorph.lab.data.formats.registry import CLASS_NAME, data_root, detect_format, open_source
from isomorph.lab.data.imagenet_labels import (
    NUM_CLASSES,
    imagenet_classes,
    imagenet_labels,
    real_labels,
)
from isomorph.lab.data.sources import Source
from isomorph.lab.evaluation.model_data import Scoring, Sweep, TestSet, check_num_classes, run_sweep
from isomorph.terminal_tables import Rows

_FORMS = ("imagefolder", "tar", "webdataset", "huggingface")
Location = tuple[Path, str]


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

    @property
    def scored_images(self) -> int:
        """Images that count towards its accuracy: ReaL leaves those without a label out."""
        if not self.multilabel:
            return self.images
        return int((imagenet_labels().real >= 0).any(1).sum())

    def find(self, folder: str, root: str | Path | None, form: str | None) -> Location:
        """Return where the suite is: `folder`, or a usual name in `root`. Raises: UserError when it is missing."""
        if form is not None and form not in _FORMS:
            raise UserError(f"suites are read as {', '.join(_FORMS)}, not {form!r}")
        if folder:
            path = Path(folder).expanduser()
            if os.path.isdir(path):
                return path, form or detect_format(path)
            if os.path.exists(path) or not re.fullmatch(r"\w[\w.-]*/[\w.-]+(:\w+)?", folder):
                raise UserError(
                    f"no folder {folder}; give {self.name}=FOLDER the folder of {self.name}"
                )
            return path, form or "huggingface"
        top = data_root(root)
        for name in self.folders:
            path = top / name
            if os.path.isdir(path) and (name != "." or _holds_images(top)):
                return path, form or detect_format(path)
        searched = ", ".join(name for name in self.folders if name != ".")
        raise UserError(
            f"no folder of {self.name} in {top} (searched {searched}); give "
            f"suite={self.name}=FOLDER or another `root`"
        )

    def scoring(self, source: Source, title: str, partial: bool) -> Scoring:
        """Return the scoring of a source by the suite. Raises: UserError for images of another one, or missing ones."""
        wnids = imagenet_labels().wnids
        if self.multilabel:
            labels = real_labels(source, title)
            scoring = Scoring(self.name, labels, wnids, num_classes=NUM_CLASSES)
        else:
            indices = self.class_indices
            if indices is None:
                indices = np.arange(NUM_CLASSES)
            numbers = imagenet_classes(source, self.name, self.class_indices, title)
            labels = numbers[source.labels]  # (n,)
            self._check_complete(len(np.unique(labels)), len(indices), "classes", title, partial)
            classes = [wnids[index] for index in indices]
            positions = np.searchsorted(indices, labels)
            scoring = Scoring(self.name, positions, classes, self.class_indices, NUM_CLASSES)
        self._check_complete(len(source), self.images, "images", title, partial)
        return scoring

    def _check_complete(
        self, count: int, expected: int, noun: str, title: str, partial: bool
    ) -> None:
        if count == expected or (count < expected and partial):
            return
        hint = "; to evaluate on a part of it, give partial=True" if count < expected else ""
        raise UserError(f"{title} has {count:,} {noun}, {self.name} has {expected:,}{hint}")


def _holds_images(folder: Path) -> bool:
    """Return True for a folder with a test split or with folders of classes."""
    inside = visible(folder)
    split = any(path.stem.lower() in SPLITS["test"] for path in (*inside, *visible(folder, ".tar")))
    return split or any(CLASS_NAME.fullmatch(path.name) for path in inside)


_IMAGENET_FOLDERS = ("imagenet", "imagenet-val", "imagenet-1k", "ILSVRC2012", ".")
_V2_MATCHED = ("imagenetv2-matched-frequency-format-val", "imagenetv2-matched-frequency")
_V2_THRESHOLD = ("imagenetv2-threshold0.7-format-val", "imagenetv2-threshold0.7")
_V2_TOP = ("imagenetv2-top-images-format-val", "imagenetv2-top-images")
_SKETCH_FOLDERS = ("imagenet-sketch", "sketch", "ImageNet-Sketch")
_SUITES = (
    Suite("imagenet", _IMAGENET_FOLDERS, 50_000),
    Suite("real", _IMAGENET_FOLDERS, 50_000, multilabel=True),
    Suite("imagenet-v2", ("imagenet-v2", *_V2_MATCHED), 10_000),
    Suite("imagenet-v2-matched-frequency", ("imagenet-v2-matched-frequency", *_V2_MATCHED), 10_000),
    Suite("imagenet-v2-threshold-0.7", ("imagenet-v2-threshold-0.7", *_V2_THRESHOLD), 10_000),
    Suite("imagenet-v2-top-images", ("imagenet-v2-top-images", *_V2_TOP), 10_000),
    Suite("imagenet-a", ("imagenet-a",), 7_500),
    Suite("imagenet-r", ("imagenet-r",), 30_000),
    Suite("imagenet-sketch", _SKETCH_FOLDERS, 50_889),
)
SUITES = {suite.name: suite for suite in _SUITES}


def open_suites(
    wanted: Sequence[str],
    root: str | Path | None = None,
    form: str | None = None,
    partial: bool = False,
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
    wanted: Sequence[str], root: str | Path | None, form: str | None
) -> dict[Location, list[Suite]]:
    """Find the folders of suites; imagenet and real share one. Raises: UserError if unknown, missing, or doubled."""
    folders: dict[str, str] = {}
    for text in wanted:
        for item in text.split(","):
            name, _, folder = item.strip().partition("=")
            if name in folders:
                raise UserError("a suite is given twice; give each once")
            folders[name] = folder
    validation = folders.get("imagenet") or folders.get("real", "")
    locations: dict[Location, list[Suite]] = {}
    for name, folder in folders.items():
        if name not in SUITES:
            raise UserError(f"suite {name!r} is unknown; choose from {', '.join(SUITES)}")
        if name in ("imagenet", "real"):
            folder = folder or validation
        location = SUITES[name].find(folder, root, form)
        locations.setdefault(location, []).append(SUITES[name])
    return locations


def open_located(
    locations: Mapping[Location, Sequence[Suite]], partial: bool = False
) -> list[TestSet]:
    """Open the suites found by `find_suites`. Raises: UserError for classes of another suite, or missing images."""
    test_sets = []
    for (path, form), suites in locations.items():
        source = open_source(form, "test", path)
        scorings = [suite.scoring(source, path.as_posix(), partial) for suite in suites]
        test_sets.append(TestSet(source, scorings))
    return test_sets


def evaluate_suites(
    model: nn.Module,
    suites: str | Sequence[str],
    root: str | Path | None = None,
    form: str | None = None,
    partial: bool = False,
    sweep: Sweep | None = None,
    batch_size: int = 100,
    workers: int = 0,
) -> Rows:
    """Evaluate a model on ImageNet test suites: a row of metrics for every suite and point of the sweep.

    `suites`, `root`, `form`, `partial`: as in `open_suites`. The model stays on its device; `workers` processes
    load the images.

    Raises: UserError when the model has not ImageNet-1k's 1000 classes, and as `open_suites`.

    >>> from pathlib import Path
    >>> from PIL import Image
    >>> folder = Path("data/imagenet/val/n01440764")
    >>> folder.mkdir(parents=True)
    >>> Image.new("RGB", (32, 32)).save(folder / "1.png")
    >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    >>> sweep = iso.evaluation.Sweep(sizes=[(32, 32)])
    >>> rows = iso.evaluation.evaluate_suites(model, "imagenet", root="data", partial=True, sweep=sweep)
    >>> [(row["suite"], row["images"]) for row in rows]
    [('imagenet', 1)]
    """
    check_num_classes(getattr(model, "num_classes", None), NUM_CLASSES)
    if isinstance(suites, str):
        suites = [suites]
    test_sets = open_suites(suites, root, form, partial)
    return run_sweep(model, test_sets, sweep or Sweep(), batch_size, workers)[0]
