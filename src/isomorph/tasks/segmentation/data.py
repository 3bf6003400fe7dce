"""The training and test images of a run, and their loaders."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from isomorph.data.formats.registry import data_root
from isomorph.data.loaders import IsolatedDataLoader, ignore_stop_signals, train_loader
from isomorph.data.sampler import TrainSampler
from isomorph.data.sources import drawn_fraction, drawn_once, hash_to_unit
from isomorph.distributed import Runtime
from isomorph.errors import UserError
from isomorph.tasks.segmentation.augment import TestTransform, TrainTransform
from isomorph.tasks.segmentation.fields import SegmentationPart
from isomorph.tasks.segmentation.formats import FORMATS, open_masks, whole_folder
from isomorph.tasks.segmentation.pairs import MAX_CLASSES, MaskedImages, spaced_numbers
from isomorph.training.recipe.recipe import Recipe


def open_pairs(recipe: Recipe) -> tuple[MaskedImages, MaskedImages]:
    """Return the training and the test images of a recipe, checked.

    Raises: UserError for a file that is missing or damaged, a mask of another size than its image, or an unknown value.
    """
    data = recipe.data
    train, test = open_splits(data.source, data_root(data.root), data.split)
    test = drawn_once(test, data.test_images)
    train = drawn_fraction(train, data.fraction, recipe.seed if data.draw == "seeded" else None)
    train.check(data.unreadable)
    test.check()
    return train, test


def open_splits(source: str, root: Path, fraction: float | None) -> tuple[MaskedImages, MaskedImages]:
    """Return training and test images; without test images of its own, a `fraction` of the training images.

    Raises: UserError without training images, or without test images and a fraction.
    """
    train, test = (open_masks(source, split, root) for split in ("train", "test"))
    if train is None:
        raise UserError(
            f"{root} has no training images in the folders of the data source {source}; give the folder that has them"
        )
    if test is not None:
        if fraction is not None:
            raise UserError(f"{root} has test images of its own; leave data.split out")
        return train, test
    if fraction is None:
        raise UserError(
            f"{root} has no test images; give --data.split, the fraction of the images to test on, like 0.2"
        )
    places = np.array([hash_to_unit(path.name) for path in train.images])
    held_out = places < fraction
    if held_out.all() or not held_out.any():
        raise UserError(f"data.split {fraction:g} leaves no image on one side of {len(train)}; give another fraction")
    parts = [train.subset(np.flatnonzero(chosen)) for chosen in (~held_out, held_out)]
    for part in parts:
        part.split = (fraction, len(train))
    return parts[0], parts[1]


def _left_out(source: str, root: Path, fraction: float, images: int | None) -> MaskedImages | None:
    """Return the part that training left out of a folder; None for another folder, by its number of images."""
    with suppress(UserError):  # of a folder that cannot be split
        part = open_splits(source, root, fraction)[1]
        if images is None or part.split == (fraction, images):
            return part
    return None


def open_test_pairs(
    source: str, root: Path, fraction: float | None, max_images: int | None, images: int | None = None
) -> MaskedImages:
    """Return the test images of a data source, or evenly spaced ones of them.

    They are the part that training left out if `fraction` is given (of a folder with this number of `images`), else the
    test images, else a whole folder of masks.

    Raises: UserError for an unknown source, or without test images.
    """
    if source not in FORMATS:
        raise UserError(f"data source {source!r} is unknown; choose one of {', '.join(FORMATS)}")
    pairs = _left_out(source, root, fraction, images) if fraction else None
    pairs = pairs or open_masks(source, "test", root)
    if pairs is None and source == "masks":
        pairs = whole_folder(root)
    if pairs is None:
        raise UserError(
            f"{root} has no test images in the folders of the data source {source}; give the folder that has them"
        )
    return pairs if max_images is None else pairs.subset(spaced_numbers(len(pairs), max_images))


def build_train_loader(
    recipe: Recipe, part: SegmentationPart, config: dict[str, Any], train: MaskedImages, deals: TrainSampler
) -> DataLoader[Any]:
    """Return the loader of training crops. Shape: yields (B, 3, *crop), (B, *crop) int64, messages"""
    transform: Any = TrainTransform(part, config["mean"], config["std"])
    return train_loader(train, transform, deals, recipe.data.workers, recipe.data.unreadable)  # type: ignore[arg-type]


def build_test_loader(
    part: SegmentationPart, config: dict[str, Any], test: MaskedImages, runtime: Runtime, workers: int = 0
) -> Iterable[Any]:
    """Return the loader of this process's whole test images, one by one. Shape: yields (1, 3, h, w), (1, H, W)"""
    own = test.subset(range(len(test))[runtime.share])
    own.transform = TestTransform(part.resize, config["mean"], config["std"])
    return IsolatedDataLoader(
        own,
        batch_size=1,
        num_workers=workers,
        worker_init_fn=ignore_stop_signals,
        persistent_workers=workers > 0,
    )


def check_class_count(pairs: MaskedImages) -> None:
    """Raise UserError for more classes than masks of 8 bits can have."""
    if len(pairs.classes) > MAX_CLASSES:
        raise UserError(f"{len(pairs.classes)} classes are too many; masks can have {MAX_CLASSES}")
