"""Sources of labelled images, their corrupted and reduced forms, and loaders."""

from isomorph.data.corruptions import IMAGENET_C, Corrupted, Noisy
from isomorph.data.loaders import eval_loader, train_loader
from isomorph.data.order import Deals, Order, Share, mixed_seed, seed_generators
from isomorph.data.sources import SOURCES, Source, class_fraction, first_classes, open_source

__all__ = [
    "IMAGENET_C",
    "SOURCES",
    "Corrupted",
    "Deals",
    "Noisy",
    "Order",
    "Share",
    "Source",
    "class_fraction",
    "eval_loader",
    "first_classes",
    "mixed_seed",
    "open_source",
    "seed_generators",
    "train_loader",
]
