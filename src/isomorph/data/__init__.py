"""Sources and streams of labelled images, their corrupted and reduced forms, and loaders."""

from isomorph.data.corruptions import IMAGENET_C, Corrupted, Noisy
from isomorph.data.loaders import eval_loader, train_loader
from isomorph.data.opening import SOURCES, open_source
from isomorph.data.sources import Source, class_fraction, first_classes
from isomorph.data.stream import STREAMS, Stream, open_stream

__all__ = [
    "IMAGENET_C",
    "SOURCES",
    "STREAMS",
    "Corrupted",
    "Noisy",
    "Source",
    "Stream",
    "class_fraction",
    "eval_loader",
    "first_classes",
    "open_source",
    "open_stream",
    "train_loader",
]
