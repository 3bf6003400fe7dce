"""Images with objects: a data set in COCO's format, and where its files are in a folder."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from isomorph.data.sources import read_image
from isomorph.errors import UserError
from isomorph.tasks.detection.annotations import Annotations, ImageRecord, read_annotations
from isomorph.tasks.detection.extra import decode_masks, mask_codec

Objects = dict[str, Tensor]
"""Objects of an image: boxes (n, 4) as left, top, right, bottom, labels (n,), and where wanted masks (n, H, W)."""

ANNOTATION_FILES = {
    "train": ("annotations/instances_train2017.json", "annotations/train.json", "train.json", "trainval.json"),
    "test": (
        "annotations/instances_val2017.json",
        "annotations/val.json",
        "val.json",
        "annotations/test.json",
        "test.json",
    ),
}
"""Files in a folder where annotations are looked for, first to last."""
IMAGE_FOLDERS = {"train": ("train2017", "images/train", "train", "images"), "test": ("val2017", "images/val", "val")}
"""Folders where images are looked for, first to last; then `images` and the folder itself."""


class DetectionSource(Dataset[tuple[Any, Any]]):
    """Images with objects in COCO's format, each read when it is indexed.

    `source[i]` is an image and its `Objects`, after `transform`. Crowds are left out. With `masks` the objects have
    masks, drawn from polygons or RLE. `alter` changes each image, given the name of its file; by default None.

    Raises: UserError naming the image when one cannot be read, or has another size than its annotations say.
    """

    def __init__(self, annotations: Annotations, folder: Path, masks: bool, images: Sequence[ImageRecord]) -> None:
        self.annotations, self.folder, self.masks, self.images = annotations, folder, masks, list(images)
        self.classes = annotations.classes
        self.transform: Callable[[Image.Image, Objects], tuple[Any, Any]] | None = None
        self.alter: Callable[[Image.Image, str], Image.Image] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def subset(self, indices: Sequence[int] | np.ndarray) -> "DetectionSource":
        """Return the images at these indices."""
        return DetectionSource(self.annotations, self.folder, self.masks, [self.images[int(i)] for i in indices])

    def with_objects(self) -> "DetectionSource":
        """Return the images with objects other than crowds. Raises: UserError if there are none."""
        chosen = [i for i, record in enumerate(self.images) if any(not each.get("iscrowd") for each in record.objects)]
        if not chosen:
            raise UserError(f"{self.annotations.path} has crowds only; give a file with objects to train on")
        return self.subset(chosen)

    def image(self, index: int) -> Image.Image:
        """Return one image in RGB, altered by `alter` if there is one, before the transform."""
        record = self.images[index]
        path = self.folder / record.file
        image = read_image(path)
        if image.size != (record.width, record.height):
            raise UserError(
                f"{path} has {image.width} x {image.height} pixels, and its annotations in "
                f"{self.annotations.path} say {record.width} x {record.height}; correct them"
            )
        return self.alter(image, record.file) if self.alter else image

    def file_name(self, index: int) -> str:
        """Return the name of an image's file."""
        return self.images[index].file

    def truth(self, index: int) -> list[np.ndarray]:
        """Return the tensors of an image's objects."""
        return [tensor.numpy() for tensor in self.objects(index).values()]

    def objects(self, index: int) -> Objects:
        """Return the objects of an image, without crowds. Boxes are cut at the borders of the image."""
        record = self.images[index]
        found = [each for each in record.objects if not each.get("iscrowd")]
        boxes = torch.tensor([each["bbox"] for each in found], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        limits = torch.tensor([record.width, record.height] * 2, dtype=torch.float32)
        labels = torch.tensor([self.annotations.label_of[each["category_id"]] for each in found], dtype=torch.int64)
        objects = {"boxes": boxes.clamp(min=0).minimum(limits), "labels": labels}
        if self.masks:
            objects["masks"] = self._masks([each["segmentation"] for each in found], record)
        return objects

    def _masks(self, outlines: Sequence[Any], record: ImageRecord) -> Tensor:
        """Return the masks of an image's objects. Raises: UserError when one cannot be drawn."""
        try:
            return draw_masks(outlines, record.height, record.width)
        except ValueError as error:
            raise UserError(
                f"{self.annotations.path}: an outline in {record.file} cannot be drawn ({error}); correct it"
            ) from None

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, objects = self.image(index), self.objects(index)
        return self.transform(image, objects) if self.transform else (image, objects)


def draw_masks(outlines: Sequence[Any], height: int, width: int) -> Tensor:
    """Return the masks of outlines in COCO's format: polygons, or RLE as text or numbers. Shape: -> (n, H, W) uint8"""
    if not outlines:
        return torch.zeros(0, height, width, dtype=torch.uint8)
    codec = mask_codec()
    coded = [
        codec.merge(codec.frPyObjects(each, height, width)) if isinstance(each, list) else each for each in outlines
    ]
    coded = [codec.frPyObjects(each, height, width) if isinstance(each["counts"], list) else each for each in coded]
    return torch.from_numpy(decode_masks(coded))


def open_split(
    root: Path, split: str, masks: bool, annotations: str | None = None, images: str | None = None, skip: int = 0
) -> DetectionSource:
    """Open the images of a split, train or test, of a folder with annotations in COCO's format.

    `annotations` and `images` are a file and a folder, from `root`; by default they are looked for as in
    `ANNOTATION_FILES` and `IMAGE_FOLDERS`.

    Raises: UserError naming the file when one is missing, or an annotation is wrong.
    """
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; give data.root a folder with images and COCO annotations")
    path = root / annotations if annotations else _find_annotations(root, split)
    found = read_annotations(path, masks, skip)
    names = [record.file for record in found.images]
    if images:
        folder = root / images
    else:
        places = [root / name for name in (*IMAGE_FOLDERS[split], "images", ".") if (root / name).is_dir()]
        folder = next((place for place in places if (place / names[0]).is_file()), places[0])
    _check_files(path, folder, names)
    return DetectionSource(found, folder, masks, found.images)


def require_annotations(root: Path, annotations: str | None) -> None:
    """Raise UserError unless data given to evaluate a model is a folder, with test annotations if no file is named."""
    if not root.is_dir():
        raise UserError(f"{root} is neither a folder nor an annotation file that ends in .json")
    places = ANNOTATION_FILES["test"]
    if annotations is None and not any((root / name).is_file() for name in places):
        raise UserError(f"{root} has none of {', '.join(places)}; give such a folder, or the annotation file itself")


def _find_annotations(root: Path, split: str) -> Path:
    """Return the annotations of a split. Raises: UserError if there are none."""
    places = ANNOTATION_FILES[split]
    found = next((root / name for name in places if (root / name).is_file()), None)
    if found is None:
        raise UserError(f"{root} has none of {', '.join(places)} for the {split} split; give task.{split} a file")
    return found


def _check_files(path: Path, folder: Path, names: Sequence[str]) -> None:
    """Raise UserError if the folder does not have the files of all images."""
    present = set(os.listdir(folder)) if folder.is_dir() else set()
    missing = [name for name in names if name not in present and not (folder / name).is_file()]
    if missing:
        others = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(f"{folder} has no file {missing[0]}{others}, of the images in {path}; correct data.root")


def check_same_categories(train: DetectionSource, test: DetectionSource) -> None:
    """Raise UserError if the test data has categories with other numbers or names than the training data."""
    (a, b) = (dict(zip(s.annotations.category_ids, s.classes, strict=True)) for s in (train, test))
    if a != b:
        other = next(number for number in sorted({*a, *b}) if a.get(number) != b.get(number))
        raise UserError(
            f"category {other} is {a.get(other)!r} in {train.annotations.path} and {b.get(other)!r} in "
            f"{test.annotations.path}; give both the same categories"
        )
