"""Sources and streams of labelled images, their corrupted and reduced forms, and loaders."""

from isomorph.data.corruptions.corrupt import (
    CATEGORIES,
    EXTRA,
    IMAGENET_C,
    Corrupted,
    Noisy,
    corrupt,
)
from isomorph.data.formats.registry import SOURCES, open_source
from isomorph.data.label_maps import MapLabels, MappedSource
from isomorph.data.loaders import eval_loader, evaluation_transform, train_loader, train_transform
from isomorph.data.sampler import Deals, Order, Share
from isomorph.data.sources import Source, class_fraction, first_classes, picture_name
from isomorph.data.streams.loader import stream_loader, stream_test_loader
from isomorph.data.streams.source import STREAMS, Stream, open_stream
from isomorph.seeding import mixed_seed, seed_generators

__all__ = [
    "CATEGORIES",
    "EXTRA",
    "IMAGENET_C",
    "SOURCES",
    "STREAMS",
    "Corrupted",
    "Deals",
    "MapLabels",
    "MappedSource",
    "Noisy",
    "Order",
    "Share",
    "Source",
    "Stream",
    "class_fraction",
    "corrupt",
    "eval_loader",
    "evaluation_transform",
    "first_classes",
    "mixed_seed",
    "open_source",
    "open_stream",
    "picture_name",
    "seed_generators",
    "stream_loader",
    "stream_test_loader",
    "train_loader",
    "train_transform",
]
