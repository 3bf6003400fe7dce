"""Data sets that are not there: their published sizes, and random samples of the right shapes."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from isomorph.lab.data.loaders import ImageConfig
from isomorph.lab.training.recipe.recipe import Recipe

# Training images (sequences, sentences) and classes of published data sets. The papers print the images of ImageNet,
# CIFAR-10 and JFT-300M; the rest is assumed (docs/guides/readings.md).
PUBLISHED_SIZES: dict[str, tuple[int, int]] = {
    "ImageNet-1k": (1_281_167, 1000),
    "ImageNet-21k": (12_700_000, 21_841),  # images: CoAtNet section 4.1
    "JFT-300M": (300_000_000, 18_291),
    "JFT-3B": (3_000_000_000, 29_593),
    "CIFAR-10": (50_000, 10),
    "CIFAR-100": (50_000, 100),
    "digits": (1_347, 10),
    "ADE20K": (20_210, 150),
    "CamVid": (367, 11),
    "COCO 2017": (117_266, 80),  # those with objects
    "BCCD": (205, 3),
    "GLUE": (67_349, 2),
    "Wikipedia and BookCorpus": (26_000_000, 0),
}
_DATA_SETS = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "digits": "digits",
    "ade20k": "ADE20K",
    "camvid": "CamVid",
    "coco": "COCO 2017",
    "glue": "GLUE",
    "text": "Wikipedia and BookCorpus",
}


@dataclass(frozen=True)
class SyntheticData:
    """A data set that has a length and classes, and nothing to read."""

    name: str
    """Name of the published data set whose size it has."""
    images: int
    classes: tuple[str, ...]
    split: None = field(default=None)

    def __len__(self) -> int:
        return self.images


def synthetic_data(
    recipe: Recipe, counts: tuple[int, int] | None = None, labelled: bool = True
) -> SyntheticData:
    """Return a stand-in for a recipe's training data: of its published size, cut as the recipe says.

    `counts` are other numbers of images and classes; without labels there are no classes.
    """
    name = recipe.dataset or _DATA_SETS.get(recipe.data.source, "ImageNet-1k")
    images, classes = counts or PUBLISHED_SIZES[name]
    if recipe.data.images:
        images = recipe.data.images
    if recipe.data.classes:
        images = images * min(recipe.data.classes, classes) // classes
        classes = min(recipe.data.classes, classes)
    if recipe.data.split:
        images = round(images * (1 - recipe.data.split))
    images = max(1, round(images * recipe.data.fraction))
    names = tuple(map(str, range(classes))) if labelled else ()
    return SyntheticData(name, images, names)


def random_images(config: ImageConfig, samples: int, device: torch.device) -> Tensor:
    """Return normalised noise of the size of a data config. Shape: -> (samples, C, H, W)"""
    return torch.randn(samples, *config["input_size"], device=device)


def random_labels(classes: int, samples: int, device: torch.device) -> Tensor:
    """Return random classes. Shape: -> (samples,)"""
    return torch.randint(max(classes, 1), (samples,), device=device)
