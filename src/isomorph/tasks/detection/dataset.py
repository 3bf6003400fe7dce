"""Images with objects: a data set in COCO's format, checked before training; errors name the file and annotation."""

import json
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from isomorph.errors import UserError, optional_module
from isomorph.tasks.image_sets import ImageSet

Objects = dict[str, Tensor]
"""Objects of an image: boxes (n, 4) as left, top, right, bottom, labels (n,), and where wanted masks (n, H, W)."""

ANNOTATION_FILES = {
    "train": ("annotations/instances_train2017.json", "annotations/train.json", "train.json", "trainval.json"),
    "test": (
        *("annotations/instances_val2017.json", "annotations/val.json", "val.json"),
        *("annotations/test.json", "test.json"),
    ),
}
"""Files in a folder where annotations are looked for, first to last."""
IMAGE_FOLDERS = {"train": ("train2017", "images/train", "train", "images"), "test": ("val2017", "images/val", "val")}
"""Folders where images are looked for, first to last; then `images` and the folder itself."""
_TOLERANCE = 1.0
"""Pixels by which a box may leave its image: some annotators count pixels from 1."""


class ImageRecord(NamedTuple):
    """An image: its number in the annotations, its file, its size, and its objects in COCO's format."""

    id: int
    file: str
    height: int
    width: int
    objects: tuple[dict[str, Any], ...] = ()


class Annotations(NamedTuple):
    """The images of a COCO file, and the names of its categories by their numbers, in order."""

    images: list[ImageRecord]
    categories: dict[int, str]


def pycocotools(module: str) -> Any:
    """Return a module of pycocotools. Raises: UserError if the package is not installed."""
    return optional_module(f"pycocotools.{module}", "detection needs pycocotools, which is not installed", "dense")


def decode_masks(coded: Sequence[Any]) -> np.ndarray:
    """Return masks from COCO's RLE. Shape: n masks -> (n, H, W) uint8"""
    codec = pycocotools("mask")
    with warnings.catch_warnings():  # of NumPy 2, about pycocotools' own arrays
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        return np.stack([codec.decode(each) for each in coded])


def draw_masks(outlines: Sequence[Any], height: int, width: int) -> Tensor:
    """Return the masks of outlines in COCO's format: polygons, or RLE as text or numbers. Shape: -> (n, H, W) uint8"""
    if not outlines:
        return torch.zeros(0, height, width, dtype=torch.uint8)
    codec, coded = pycocotools("mask"), []
    for outline in outlines:
        if isinstance(outline, list):
            outline = codec.merge(codec.frPyObjects(outline, height, width))
        elif isinstance(outline["counts"], list):
            outline = codec.frPyObjects(outline, height, width)
        coded.append(outline)
    return torch.from_numpy(decode_masks(coded))


def read_annotations(path: Path, masks: bool, skip: int = 0) -> Annotations:
    """Read a file in COCO's format. With `masks`, every object needs an outline, as polygons or RLE.

    Up to `skip` annotations with a box of no area, or outside its image, are left out.

    Raises: UserError naming the file, and the annotation where there is one, for anything wrong.
    """
    content = _read_json(path)
    categories = _read_categories(path, content["categories"])
    records = _read_images(path, content["images"])
    objects: dict[int, list[dict[str, Any]]] = defaultdict(list)
    skipped = 0
    for position, annotation in enumerate(content["annotations"]):
        name = f"{path}: annotation {annotation.get('id', f'number {position}')}"
        number, category = annotation.get("image_id"), annotation.get("category_id")
        if not isinstance(number, int) or number not in records:
            raise UserError(f"{name} is of image {number}, which the file does not have")
        if not isinstance(category, int) or category not in categories:
            listed = ", ".join(map(str, list(categories)[:8])) + ", ..." * (len(categories) > 8)
            raise UserError(f"{name} has the unknown category_id {category}; the file's categories are {listed}")
        if problem := _box_problem(annotation, records[number]):
            skipped += 1
            if skipped > skip:
                raise UserError(f"{name} {problem}; correct it, or leave {skipped} out with task.skip_annotations")
            continue
        if masks and not annotation.get("iscrowd") and (problem := _outline_problem(annotation, records[number])):
            raise UserError(f"{name} {problem}; correct it, or train boxes only with task.masks false")
        objects[number].append(annotation)
    if not objects:
        raise UserError(f"{path} has no annotations; give a file with boxes")
    return Annotations([record._replace(objects=tuple(objects[i])) for i, record in records.items()], categories)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of a COCO file. Raises: UserError when it is missing or not in COCO's format."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; give annotations in COCO's format") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}; give annotations in COCO's format (JSON)") from None
    for name in ("images", "annotations", "categories"):
        listed = content.get(name) if isinstance(content, dict) else None
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise UserError(f"{path} has no list {name!r}; give annotations in COCO's format")
    return content


def _read_categories(path: Path, categories: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return the names of the categories by number, in order. Raises: UserError for none, or two of one number."""
    named: dict[Any, str] = {c.get("id"): str(c.get("name", c.get("id"))) for c in categories}
    if not named or not all(type(number) is int for number in named) or len(named) < len(categories):
        raise UserError(f"{path}: categories must have an id each, a whole number of their own")
    return dict(sorted(named.items()))


def _read_images(path: Path, images: Sequence[Mapping[str, Any]]) -> dict[int, ImageRecord]:
    """Return the images by number, without objects. Raises: UserError for missing fields, or two of one number."""
    records: dict[int, ImageRecord] = {}
    for image in images:
        number, file, *size = (image.get(key) for key in ("id", "file_name", "height", "width"))
        if type(number) is not int or not isinstance(file, str) or not all(type(n) is int and n > 0 for n in size):
            raise UserError(f"{path}: image {number} needs an id, a file_name, and height and width in pixels")
        if number in records:
            raise UserError(f"{path} has two images with id {number}; give each image its own")
        records[number] = ImageRecord(number, file, *size)  # type: ignore[arg-type]
    return records


def _box_problem(annotation: Mapping[str, Any], record: ImageRecord) -> str | None:
    """Return what is wrong with the box of an annotation (left, top, width, height), or None."""
    box: Any = annotation.get("bbox")
    numbers = isinstance(box, list) and len(box) == 4 and all(isinstance(n, int | float) for n in box)
    if not numbers or not all(math.isfinite(n) for n in box):
        return f"has bbox {box}, which is not left, top, width and height"
    left, top, width, height = box
    if width <= 0 or height <= 0:
        return f"has bbox {box} in {record.file}, which has no area"
    limits = (-_TOLERANCE, record.width + _TOLERANCE, record.height + _TOLERANCE)
    if left < limits[0] or top < limits[0] or left + width > limits[1] or top + height > limits[2]:
        return f"has bbox {box}, outside {record.file} of {record.width} x {record.height} pixels"
    return None


def _outline_problem(annotation: Mapping[str, Any], record: ImageRecord) -> str | None:
    """Return what is wrong with the outline of an annotation, polygons or RLE, or None."""
    outline = annotation.get("segmentation")
    if isinstance(outline, list) and outline:
        fine = all(_is_polygon(each) for each in outline)
        return None if fine else "has a polygon with fewer than three points, or that is not pairs of numbers"
    if isinstance(outline, dict) and "counts" in outline:
        size, counts = outline.get("size"), outline["counts"]
        if size != [record.height, record.width]:
            return f"has an RLE mask of size {size}, and {record.file} is {record.height} x {record.width}"
        runs = isinstance(counts, list) and all(type(n) is int and n >= 0 for n in counts)
        fine = sum(counts) == record.height * record.width if runs else isinstance(counts, str)
        return None if fine else "has an RLE mask whose counts do not add up to its pixels"
    return "has no segmentation"


def _is_polygon(points: Any) -> bool:
    """True for a list of three points or more, as finite numbers x, y, x, y, ..."""
    if not isinstance(points, list) or len(points) < 6 or len(points) % 2:
        return False
    return all(isinstance(n, int | float) and math.isfinite(n) for n in points)


class DetectionSource(ImageSet[ImageRecord]):
    """Images with objects in COCO's format; an example is an image and its `Objects`.

    Crowds are left out. With `masks` the objects have masks, drawn from polygons or RLE.

    Raises: UserError naming the image when one cannot be read, or has another size than its annotations say.
    """

    def __init__(self, path: Path, annotations: Annotations, folder: Path, masks: bool) -> None:
        super().__init__(annotations.images, tuple(annotations.categories.values()))
        self.annotations, self.folder, self.masks = path, folder, masks
        self.category_ids = tuple(annotations.categories)
        self.label_of = {number: label for label, number in enumerate(self.category_ids)}

    def with_objects(self) -> "DetectionSource":
        """Return the images with objects other than crowds. Raises: UserError if there are none."""
        chosen = [i for i, record in enumerate(self.samples) if any(not each.get("iscrowd") for each in record.objects)]
        if not chosen:
            raise UserError(f"{self.annotations} has crowds only; give a file with objects to train on")
        return self.subset(chosen)

    def path(self, index: int) -> Path:
        return self.folder / self.samples[index].file

    def file_name(self, index: int) -> str:
        return self.samples[index].file

    def image(self, index: int) -> Image.Image:
        image, record = super().image(index), self.samples[index]
        if image.size != (record.width, record.height):
            raise UserError(
                f"{self.path(index)} has {image.width} x {image.height} pixels, and its annotations in "
                f"{self.annotations} say {record.width} x {record.height}; correct them"
            )
        return image

    def truth(self, index: int) -> list[np.ndarray]:
        return [tensor.numpy() for tensor in self.objects(index).values()]

    def objects(self, index: int) -> Objects:
        """Return the objects of an image, without crowds. Boxes are cut at the borders of the image.

        Raises: UserError when the outline of one cannot be drawn.
        """
        record = self.samples[index]
        found = [each for each in record.objects if not each.get("iscrowd")]
        boxes = torch.tensor([each["bbox"] for each in found], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        limits = torch.tensor([record.width, record.height] * 2, dtype=torch.float32)
        labels = torch.tensor([self.label_of[each["category_id"]] for each in found], dtype=torch.int64)
        objects = {"boxes": boxes.clamp(min=0).minimum(limits), "labels": labels}
        if self.masks:
            try:
                objects["masks"] = draw_masks([each["segmentation"] for each in found], record.height, record.width)
            except ValueError as error:
                what = f"an outline in {record.file} cannot be drawn ({error})"
                raise UserError(f"{self.annotations}: {what}; correct it") from None
        return objects

    def example(self, index: int) -> tuple[Image.Image, Objects]:
        return self.image(index), self.objects(index)


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
    path = root / annotations if annotations else find_annotations(root, split)
    found = read_annotations(path, masks, skip)
    names = [record.file for record in found.images]
    known = [root / name for name in (*IMAGE_FOLDERS[split], "images", ".") if (root / name).is_dir()]
    places = [root / images] if images else known
    folder = next((place for place in places if (place / names[0]).is_file()), places[0])
    present = set(os.listdir(folder)) if folder.is_dir() else set()
    missing = [name for name in names if name not in present and not (folder / name).is_file()]
    if missing:
        others = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(f"{folder} has no file {missing[0]}{others}, of the images in {path}; correct data.root")
    return DetectionSource(path, found, folder, masks)


def find_annotations(root: Path, split: str, instead: str = "") -> Path:
    """Return the annotations of a split. Raises: UserError, which says what to give `instead`, if there are none."""
    places = ANNOTATION_FILES[split]
    found = next((root / name for name in places if (root / name).is_file()), None)
    if found is None:
        instead = instead or f"give task.{split} a file"
        raise UserError(f"{root} has none of {', '.join(places)} for the {split} split; {instead}")
    return found


def check_same_categories(train: DetectionSource, test: DetectionSource) -> None:
    """Raise UserError if the test data has categories with other numbers or names than the training data."""
    (a, b) = (dict(zip(s.category_ids, s.classes, strict=True)) for s in (train, test))
    if a != b:
        other = next(number for number in sorted({*a, *b}) if a.get(number) != b.get(number))
        raise UserError(
            f"category {other} is {a.get(other)!r} in {train.annotations} and {b.get(other)!r} in "
            f"{test.annotations}; give both the same categories"
        )
