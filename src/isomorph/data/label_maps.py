"""Label maps: scores of the likeliest classes everywhere in an image, kept in a file beside it (token labelling)."""

import os
import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import functional

from isomorph.data.sources import ImageLike, ImageSubset, Source, first_line
from isomorph.errors import UserError

_LOAD_ERRORS = (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError)
"""What loading a damaged file of tensors may raise."""


class MapLabels(NamedTuple):
    """Labels of images and of every place in them, with what the augmentation did to the place; or those of one image.

    Shape: label (B,); maps (B, 2, K, H, W), scores and their classes; box (B, 4): top, left, bottom, right of the
    crop as shares of the image; flipped (B,)
    """

    label: Any
    maps: Tensor
    box: Tensor
    flipped: Any

    def to(self, device: torch.device, non_blocking: bool = False) -> "MapLabels":
        return MapLabels(*(tensor.to(device, non_blocking=non_blocking) for tensor in self))


def apply_and_track_crop(transform: Any, image: Image.Image) -> tuple[Any, Tensor, bool]:
    """What timm's training transform makes of an image, the box that it cut out, and whether it flipped it.

    The draws are those of the transform itself, so the image is the same to the last bit.

    Shape: -> image, (4,): top, left, bottom, right as shares of the image, whether flipped
    Raises: UserError for a transform that does not crop and resize once.
    """
    boxes, flipped = [], False
    for step in getattr(transform, "transforms", ()):
        if isinstance(step, RandomResizedCropAndInterpolation):
            image, box = _random_resized_crop(step, image)
            boxes.append(box)
        elif isinstance(step, transforms.RandomHorizontalFlip):
            flipped = bool(torch.rand(1) < step.p)
            image = functional.hflip(image) if flipped else image
        else:
            image = step(image)
    if len(boxes) != 1:
        raise UserError("label maps go with images that are cropped and resized once; leave augment.crop_padding at 0")
    return image, boxes[0], flipped


def _random_resized_crop(step: RandomResizedCropAndInterpolation, image: Image.Image) -> tuple[Image.Image, Tensor]:
    """A crop as the step draws it, resized, and its box as shares of the image. Shape: -> image, (4,)"""
    top, left, height, width = step.get_params(image, step.scale, step.ratio)
    known = step.interpolation
    interpolation = random.choice(known) if isinstance(known, Sequence) else known
    box = torch.tensor([top, left, top + height, left + width]) / torch.tensor([image.height, image.width] * 2)
    return functional.resized_crop(image, top, left, height, width, step.size, interpolation), box


class LabelMapSource(Source):
    """A source whose labels are maps too: `folder/class/image.pt` for `class/image.jpg`, a tensor (2, K, H, W).

    Source: Jiang et al. (2021), the files of the authors
    Raises: UserError when images have no names, maps are missing, or the first is no map of these classes.
    """

    def __init__(self, source: Source, folder: Path, num_classes: int) -> None:
        super().__init__(source.pictures, source.labels, source.classes, source.shards)
        self.ids, self.folder, self.num_classes = source.ids, folder, num_classes
        _check_files_exist(folder, self.map_names())
        self.shape = _load_label_map(self.map_path(0), num_classes).shape

    def map_names(self) -> Iterator[tuple[str, str]]:
        """Folder and file of every image's map, in turn."""
        for index in range(len(self)):
            folder, _, file = self.map_name(index).rpartition("/")
            yield folder, file

    def map_name(self, index: int) -> str:
        """The class and what follows it in an image's name; the class and the whole name where it has no class."""
        name, owner = _file_name(self.pictures, index), self.classes[int(self.labels[index])]
        *folders, file = name.split("/")
        below = folders[folders.index(owner) :] if owner in folders else [owner, *folders]
        return "/".join([*below, file.rpartition(".")[0] + ".pt"])

    def map_path(self, index: int) -> Path:
        return self.folder / self.map_name(index)

    def map(self, index: int) -> Tensor:
        """Scores and classes of one image. Shape: -> (2, K, H, W)"""
        found = _load_label_map(self.map_path(index), self.num_classes)
        if found.shape != self.shape:
            raise UserError(
                f"{self.map_path(index)} is {_format_shape(found.shape)}, the first image's map {_format_shape(self.shape)}; "
                "all must be of one size"
            )
        return found

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, box, flipped = apply_and_track_crop(self.transform, self.image(index))
        return image, MapLabels(int(self.labels[index]), self.map(index), box, flipped)


def _file_name(pictures: Sequence[ImageLike], index: int) -> str:
    """The name of a picture below its folder, or in its tar file.

    Raises: UserError for pictures without names.
    """
    if isinstance(pictures, ImageSubset):
        return _file_name(pictures.pictures, int(pictures.places[index]))
    if not hasattr(pictures, "member"):
        raise UserError("token_labels.maps needs images with file names: data.source imagefolder, tar or webdataset")
    return pictures.member(index)


def _check_files_exist(folder: Path, names: Iterable[tuple[str, str]]) -> None:
    """Lists every folder once. Raises: UserError naming the first file that is not there, and how many are not."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}; give token_labels.maps the folder that holds class/image.pt")

    @lru_cache(maxsize=64)
    def listed(below: str) -> frozenset[str]:
        return frozenset(os.listdir(folder / below)) if (folder / below).is_dir() else frozenset()

    missing = [(below, file) for below, file in names if file not in listed(below)]
    if missing:
        first = folder / missing[0][0] / missing[0][1]
        raise UserError(f"label maps are missing in {folder}: {len(missing)}, the first of them {first}")


def _load_label_map(path: Path, num_classes: int) -> Tensor:
    """Scores and classes from a file, checked. Shape: -> (2, K, H, W)

    Raises: UserError when the file cannot be read, or is no map of these classes.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except _LOAD_ERRORS as error:
        raise UserError(f"cannot read the label map {path}: {first_line(error)}") from None
    if not isinstance(found, Tensor) or found.ndim != 4 or len(found) != 2 or not found.numel():
        shape = _format_shape(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UserError(f"{path} is no label map: it must be 2 x K x H x W (scores, their classes), found {shape}")
    if not found.isfinite().all():
        raise UserError(f"{path} is no label map: it holds numbers that are not finite")
    _check_classes(path, found[1].double(), num_classes)
    return found


def _check_classes(path: Path, classes: Tensor, num_classes: int) -> None:
    """Raises: UserError for classes that are not whole numbers from 0 to below `num_classes`."""
    wrong = (classes < 0) | (classes >= num_classes) | (classes != classes.round())
    if wrong.any():
        raise UserError(f"{path} names class {classes[wrong][0]:g}; there are {num_classes}, counted from 0")


def _format_shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a number"
