"""Images with a truth of their own, such as masks or boxes: what all tasks on images need of a data set."""

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from isomorph.data.sources import read_image

S = TypeVar("S")


class ImageSet(Dataset[Any], Generic[S]):
    """Images with their truth, read when they are indexed.

    `samples` describe the images, and `example` reads one with its truth. `transform` is applied to an example that is
    indexed, and `alter` to every image, given the name of its file; both are None by default.
    """

    def __init__(self, samples: Sequence[S], classes: Sequence[str]) -> None:
        self.samples, self.classes = list(samples), tuple(classes)
        self.transform: Callable[[Any], Any] | None = None
        self.alter: Callable[[Image.Image, str], Image.Image] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        example = self.example(index)
        return self.transform(example) if self.transform else example

    def subset(self, indices: Iterable[int] | np.ndarray) -> Self:
        """Return the images at these indices."""
        part = copy.copy(self)
        part.samples = [self.samples[int(i)] for i in indices]
        return part

    def image(self, index: int) -> Image.Image:
        """Return an image in RGB, altered by `alter` if there is one."""
        image = read_image(self.path(index))
        return self.alter(image, self.file_name(index)) if self.alter else image

    def path(self, index: int) -> Path:
        """Return the file of an image."""
        raise NotImplementedError

    def file_name(self, index: int) -> str:
        """Return the name of an image's file."""
        return self.path(index).name

    def example(self, index: int) -> Any:
        """Return an image and its truth, before the transform."""
        raise NotImplementedError

    def truth(self, index: int) -> list[np.ndarray]:
        """Return the truth of an image as arrays."""
        raise NotImplementedError
