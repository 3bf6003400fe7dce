"""Images with a truth of their own, such as masks or boxes."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from isomorph.errors import UserError
from isomorph.lab.data.sources import chosen_indices, read_image, with_changes

S = TypeVar("S")
# Bytes that file systems take for the name of a file.
_LONGEST_NAME = 255


def resize_masks(masks: tv_tensors.Mask, size: list[int]) -> tv_tensors.Mask:
    """Take the nearest pixel. Shape: (..., H, W) -> (..., *size)

    As of an image: older versions of torchvision take NEAREST for masks, which shifts them by up to a pixel.
    """
    layers = masks.reshape(-1, *masks.shape[-2:])  # (n, H, W)
    resized = F.resize_image(layers, size, InterpolationMode.NEAREST_EXACT)
    return tv_tensors.wrap(resized.reshape(*masks.shape[:-2], *size), like=masks)


def normalised(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return an image of bytes in float32, normalised. Shape: (C, H, W) -> the same"""
    shares = F.to_dtype(image, torch.float32, scale=True)
    return F.normalize(shares, list(mean), list(std)).as_subclass(Tensor)


def file_inside(folder: Path, name: str, where: str) -> Path:
    """Return the file of this name in a folder. Raises: UserError, which says where the name is, if it leads out."""
    parts = re.split(r"[\\/]", name)
    if ".." in parts or Path(name).is_absolute() or re.match(r"[A-Za-z]:[\\/]", name):
        raise UserError(
            f"{where} names the file {name[:100]!r}, outside {folder}; give paths below that folder"
        )
    if "\0" in name or max(len(part.encode("utf-8", "replace")) for part in parts) > _LONGEST_NAME:
        raise UserError(
            f"{where} names the file {name[:40]!r}..., which no folder can have; correct it"
        )
    return folder / name


class ImageSet(Dataset[Any], Generic[S]):
    """Images with their truth: `samples` describe them, `example` reads one, `transform` is applied if indexed."""

    def __init__(self, samples: Sequence[S], classes: Sequence[str]) -> None:
        self.samples = list(samples)
        self.classes = tuple(classes)
        self.transform: Callable[[Any], Any] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        example = self.example(index)
        return self.transform(example) if self.transform else example

    def subset(self, indices: Iterable[int] | np.ndarray) -> Self:
        chosen = chosen_indices(indices, len(self))
        return with_changes(self, samples=[self.samples[i] for i in chosen])

    def image(self, index: int) -> Image.Image:
        return read_image(self.path(index))

    def path(self, index: int) -> Path:
        """Return the file of an image."""
        raise NotImplementedError

    def example(self, index: int) -> Any:
        """Return an image and its truth, before the transform."""
        raise NotImplementedError
