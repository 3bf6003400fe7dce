"""Images with a truth of their own, such as masks or boxes: data sets of them, and the page of a test."""

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from isomorph.data.sources import read_image
from isomorph.errors import UserError
from isomorph.report.html import ImageCard, Section, write_page
from isomorph.terminal_tables import row_table

S = TypeVar("S")
_LONGEST_NAME = 255
"""Bytes that file systems take for the name of a file."""


def file_inside(folder: Path, name: str, where: str) -> Path:
    """Return the file of this name in a folder. Raises: UserError, which says where the name is, if it leads out."""
    parts = re.split(r"[\\/]", name)
    if ".." in parts or Path(name).is_absolute() or re.match(r"[A-Za-z]:[\\/]", name):
        raise UserError(f"{where} names the file {name[:100]!r}, outside {folder}; give paths below that folder")
    if "\0" in name or max(len(part.encode("utf-8", "replace")) for part in parts) > _LONGEST_NAME:
        raise UserError(f"{where} names the file {name[:40]!r}..., which no folder can have; correct it")
    return folder / name


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


def write_test_page(
    path: Path,
    title: str,
    lead: str,
    rows: Sequence[Mapping[str, Any]],
    by_class: str,
    images: Sequence[ImageCard],
    how_to_read: str,
    *between: Section,
) -> None:
    """Write the page of a test: metrics, those of every class, sections `between`, and the images, the worst first.

    `rows` are the metrics of all images, and then of every class; `by_class` and `how_to_read` explain them.

    Raises: UserError when it cannot be written.
    """
    overall, *classes = rows
    sections = [
        Section("Metrics", "Over all images together.", table=row_table([overall])),
        Section("By class", by_class, table=row_table(classes)),
        *between,
        Section("Images, the worst first", how_to_read, images=images),
    ]
    write_page(path, title, lead, sections)
