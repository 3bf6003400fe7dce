"""Sources of labelled images, their corrupted and reduced forms, and loaders."""

from isomorph.data.corruptions import IMAGENET_C, Corrupted, Noisy
from isomorph.data.loaders import eval_loader, train_loader
from isomorph.data.sources import SOURCES, Source, class_fraction, first_classes, open_source

__all__ = [
    "IMAGENET_C",
    "SOURCES",
    "Corrupted",
    "Noisy",
    "Source",
    "class_fraction",
    "eval_loader",
    "first_classes",
    "open_source",
    "train_loader",
]
