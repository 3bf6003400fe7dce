"""Sources and streams of labelled images, their corrupted and reduced forms, and loaders."""

from isomorph.data.corruptions.corrupt import (
    CORRUPTION_CATEGORIES,
    EXTRA_CORRUPTIONS,
    IMAGENET_C_CORRUPTIONS,
    CorruptedSource,
    NoisySource,
    corrupt,
)
from isomorph.data.formats.registry import SOURCES, open_source
from isomorph.data.label_maps import LabelMapSource, MapLabels
from isomorph.data.loaders import eval_loader, eval_transform, train_loader, train_transform
from isomorph.data.sampler import BatchOrder, BatchParts, TrainSampler
from isomorph.data.sources import Source, class_fraction, first_classes, image_name
from isomorph.data.streams.loader import stream_loader, stream_test_loader
from isomorph.data.streams.stream import STREAMS, Stream, open_stream
from isomorph.seeding import mixed_seed, seed_generators

__all__ = [
    "CORRUPTION_CATEGORIES",
    "EXTRA_CORRUPTIONS",
    "IMAGENET_C_CORRUPTIONS",
    "SOURCES",
    "STREAMS",
    "CorruptedSource",
    "TrainSampler",
    "MapLabels",
    "LabelMapSource",
    "NoisySource",
    "BatchOrder",
    "BatchParts",
    "Source",
    "Stream",
    "class_fraction",
    "corrupt",
    "eval_loader",
    "eval_transform",
    "first_classes",
    "mixed_seed",
    "open_source",
    "open_stream",
    "image_name",
    "seed_generators",
    "stream_loader",
    "stream_test_loader",
    "train_loader",
    "train_transform",
]
