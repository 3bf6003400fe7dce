"""Read annotations in COCO's format, checked before training: every error names the file and the annotation."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isomorph.errors import UserError

_TOLERANCE = 1.0
"""Pixels by which a box may leave its image: some annotators count pixels from 1."""


@dataclass(frozen=True)
class ImageRecord:
    """An image: its number in the annotations, its file, its size, and its objects in COCO's format."""

    id: int
    file: str
    height: int
    width: int
    objects: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Annotations:
    """The images of a COCO file, the names of its categories in the order of their numbers, and these numbers.

    `skipped` counts the annotations that were left out because their box has no area or is outside its image.
    """

    path: Path
    images: tuple[ImageRecord, ...]
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    skipped: int = 0
    label_of: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.label_of.update({number: label for label, number in enumerate(self.category_ids)})


def read_annotations(path: Path, masks: bool, skip: int = 0) -> Annotations:
    """Read a file in COCO's format. With `masks`, every object needs an outline, as polygons or RLE.

    Up to `skip` annotations with a box of no area, or outside its image, are left out.

    Raises: UserError naming the file, and the annotation where there is one, for anything wrong.
    """
    content = _read_json(path)
    classes, numbers = _read_categories(path, content["categories"])
    records = {}
    for image in content["images"]:
        record = _read_image(path, image)
        if record.id in records:
            raise UserError(f"{path} has two images with id {record.id}; give each image its own")
        records[record.id] = record
    objects: dict[int, list[dict[str, Any]]] = defaultdict(list)
    skipped: list[str] = []
    for position, annotation in enumerate(content["annotations"]):
        name = f"{path}: annotation {_identity(annotation, position)}"
        record = _image_of(name, annotation, records)
        if (category := annotation.get("category_id")) not in numbers:
            listed = ", ".join(map(str, numbers[:8])) + ", ..." * (len(numbers) > 8)
            raise UserError(f"{name} has the unknown category_id {category}; the file's categories are {listed}")
        if problem := _box_problem(annotation, record):
            skipped.append(f"{name} {problem}")
            if len(skipped) > skip:
                raise UserError(f"{skipped[-1]}; correct it, or leave {len(skipped)} out with task.skip_annotations")
            continue
        if masks and not annotation.get("iscrowd") and (problem := _outline_problem(annotation, record)):
            raise UserError(f"{name} {problem}; correct it, or train boxes only with task.masks false")
        objects[record.id].append(annotation)
    if not any(objects.values()):
        raise UserError(f"{path} has no annotations; give a file with boxes")
    found = tuple(ImageRecord(r.id, r.file, r.height, r.width, tuple(objects[r.id])) for r in records.values())
    return Annotations(path, found, classes, numbers, len(skipped))


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


def _read_categories(path: Path, categories: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return names and numbers of the categories, by number. Raises: UserError for none, or two of one number."""
    named: dict[Any, str] = {c.get("id"): str(c.get("name", c.get("id"))) for c in categories}
    if not named or not all(type(number) is int for number in named) or len(named) < len(categories):
        raise UserError(f"{path}: categories must have an id each, a whole number of their own")
    numbers = tuple(sorted(named))
    return tuple(named[number] for number in numbers), numbers


def _read_image(path: Path, image: Mapping[str, Any]) -> ImageRecord:
    """Return the record of an image, without objects. Raises: UserError for missing fields."""
    number, file, size = image.get("id"), image.get("file_name"), (image.get("height"), image.get("width"))
    if type(number) is not int or not isinstance(file, str) or not all(type(n) is int and n > 0 for n in size):
        raise UserError(f"{path}: image {number} needs an id, a file_name, and height and width in pixels")
    return ImageRecord(number, file, *size)  # type: ignore[arg-type]


def _identity(annotation: Mapping[str, Any], position: int) -> str:
    """Return what to call an annotation in an error: its id, else its position in the file."""
    return str(annotation["id"]) if "id" in annotation else f"number {position}"


def _image_of(name: str, annotation: Mapping[str, Any], records: Mapping[int, ImageRecord]) -> ImageRecord:
    """Return the image of an annotation. Raises: UserError if the file does not have it."""
    try:
        return records[annotation["image_id"]]
    except (KeyError, TypeError):
        raise UserError(f"{name} is of image {annotation.get('image_id')}, which the file does not have") from None


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
