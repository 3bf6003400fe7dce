"""Labelled images: sources and streams, parts of them, corrupted copies, and loaders."""

from isomorph.lab.data.corruptions.corrupt import (
    CORRUPTION_CATEGORIES,
    EXTRA_CORRUPTIONS,
    IMAGENET_C_CORRUPTIONS,
    corrupt,
)
from isomorph.lab.data.formats.registry import open_source
from isomorph.lab.data.loaders import eval_loader, eval_transform, train_transform
from isomorph.lab.data.sources import Source, class_fraction, first_classes, split_classes
from isomorph.lab.data.streams import Stream, open_stream

__all__ = [
    "CORRUPTION_CATEGORIES",
    "EXTRA_CORRUPTIONS",
    "IMAGENET_C_CORRUPTIONS",
    "Source",
    "Stream",
    "class_fraction",
    "corrupt",
    "eval_loader",
    "eval_transform",
    "first_classes",
    "open_source",
    "open_stream",
    "split_classes",
    "train_transform",
]


def __dir__() -> list[str]:
    return sorted(__all__)
