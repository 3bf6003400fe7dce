"""Label maps for token labelling: scores of the likeliest classes at every position of an image, stored in files."""

import os
import pickle
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import functional

from isomorph.errors import UserError, first_line
from isomorph.lab.data.formats.naming import composed
from isomorph.lab.data.sources import Source, image_name

# Of torch.load.
_LOAD_ERRORS = (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError)


class MapLabels(NamedTuple):
    """Labels and label maps of a batch of images (or of one), and how augmentation cropped and flipped each image.

    Shape: label (B,); maps (B, 2, K, H, W), scores and their classes; box (B, 4): top, left, bottom, right of the
    crop as fractions of the image; flipped (B,)
    """

    label: Any
    maps: Tensor
    box: Tensor
    flipped: Any


def random_label_maps(labels: Tensor, classes: int) -> MapLabels:
    """Return random label maps of images with these labels, not cropped, as large as NFNet's published ones.

    Shape: labels (B,) -> maps (B, 2, 5, 18, 18)
    """
    count = len(labels)
    device = labels.device
    shape = (count, 5, 18, 18)
    scores = torch.rand(shape, device=device)
    likeliest = torch.randint(classes, shape, device=device)
    maps = torch.stack([scores, likeliest.to(scores.dtype)], dim=1)
    box = torch.tensor([0.0, 0.0, 1.0, 1.0], device=device).expand(count, 4)
    flipped = torch.zeros(count, dtype=torch.bool, device=device)
    return MapLabels(labels, maps, box, flipped)


def apply_and_track_crop(transform: Any, image: Image.Image) -> tuple[Any, Tensor, bool]:
    """Apply timm's training transform, and return the result, the box that it cropped, and True if it flipped.

    Random numbers are drawn as the transform itself draws them, so the image is the same to the last bit.

    Shape: -> image, (4,): top, left, bottom, right as fractions of the image, flipped
    Raises: UserError for a transform that does not crop and resize once.
    """
    boxes = []
    flipped = False
    for step in getattr(transform, "transforms", ()):
        if isinstance(step, RandomResizedCropAndInterpolation):
            image, box = _random_resized_crop(step, image)
            boxes.append(box)
        elif isinstance(step, transforms.RandomHorizontalFlip):
            flipped = bool(torch.rand(1) < step.p)
            if flipped:
                image = functional.hflip(image)
        else:
            image = step(image)
    if len(boxes) != 1:
        raise UserError(
            "label maps need images that are cropped and resized once; set augment.crop_padding to 0"
        )
    return image, boxes[0], flipped


def _random_resized_crop(
    step: RandomResizedCropAndInterpolation, image: Image.Image
) -> tuple[Image.Image, Tensor]:
    """Return a random crop, resized, and its box as fractions of the image. Shape: -> image, (4,)"""
    top, left, height, width = step.get_params(image, step.scale, step.ratio)
    modes = step.interpolation
    interpolation = random.choice(modes) if isinstance(modes, Sequence) else modes
    pixels = torch.tensor([top, left, top + height, left + width])
    box = pixels / torch.tensor([image.height, image.width, image.height, image.width])
    cropped = functional.resized_crop(image, top, left, height, width, step.size, interpolation)
    return cropped, box


class LabelMapSource(Source):
    """A source that also reads label maps: `folder/class/image.pt` for `class/image.jpg`, a tensor (2, K, H, W).

    Source: Jiang et al. (2021), the authors' files
    Raises: UserError when images have no file names, files are missing, or the first is not a map of these classes.
    """

    def __init__(self, source: Source, folder: Path, num_classes: int) -> None:
        vars(self).update(vars(source))
        self.folder = folder
        self.num_classes = num_classes
        _check_files_exist(folder, map(self._relative_path, range(len(self))))
        self.label_map(0)

    def _relative_path(self, index: int) -> str:
        """Return CLASS/IMAGE.pt: what follows the class in the image's name, or else the whole name."""
        name = image_name(self.images, index)
        owner = self.classes[int(self.labels[index])]
        if name is None:
            raise UserError(
                "token_labels.maps needs named files: data.source must be imagefolder, tar or webdataset"
            )
        *folders, file = name.split("/")
        named = list(map(composed, folders))
        if owner in named:
            below = folders[named.index(owner) :]
        else:
            below = [owner, *folders]
        return "/".join([*below, file.rpartition(".")[0] + ".pt"])

    def label_map(self, index: int) -> Tensor:
        """Return the scores and classes of one image. Shape: -> (2, K, H, W)"""
        return _load_label_map(self.folder / self._relative_path(index), self.num_classes)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, box, flipped = apply_and_track_crop(self.transform, self.image(index))
        return image, MapLabels(int(self.labels[index]), self.label_map(index), box, flipped)


def _check_files_exist(folder: Path, paths: Iterable[str]) -> None:
    if not os.path.isdir(folder):
        raise UserError(
            f"there is no folder {folder}; token_labels.maps must be the folder that holds class/image.pt"
        )

    missing = [path for path in paths if not os.path.isfile(folder / path)]
    if missing:
        raise UserError(
            f"label maps are missing in {folder}: {len(missing)}, the first of them {folder / missing[0]}"
        )


def _load_label_map(path: Path, num_classes: int) -> Tensor:
    """Shape: -> (2, K, H, W)"""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except _LOAD_ERRORS as error:
        raise UserError(f"cannot read the label map {path}: {first_line(error)}") from None
    if not isinstance(loaded, Tensor) or loaded.ndim != 4 or len(loaded) != 2 or not loaded.numel():
        if isinstance(loaded, Tensor):
            given = f"a tensor of {tuple(loaded.shape)}"
        else:
            given = type(loaded).__name__
        raise UserError(
            f"{path} is not a label map: it is {given}, but must be 2 x K x H x W (scores, their classes)"
        )
    if not loaded.isfinite().all():
        raise UserError(f"{path} is not a label map: it has values that are not finite")
    classes = loaded[1].double()
    wrong = (classes < 0) | (classes >= num_classes) | (classes != classes.round())
    if wrong.any():
        raise UserError(
            f"{path} has class {classes[wrong][0]:g}, not an integer from 0 to {num_classes - 1}"
        )
    return loaded
