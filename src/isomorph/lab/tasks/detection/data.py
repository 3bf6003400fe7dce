"""Images with objects: data in COCO's format, checked before training, and joint transforms of image and objects.

Errors name the file and the annotation.
"""

import json
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
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes
from torchvision.transforms.v2 import functional as V

from isomorph.errors import UserError, optional_module
from isomorph.lab.data.formats.naming import composed, split_words
from isomorph.lab.data.loaders import ImageConfig
from isomorph.lab.tasks.image_sets import ImageSet, file_inside, normalised, resize_masks
from isomorph.spec import ImageSize
from isomorph.terminal_tables import Row, Rows

# Objects of an image: boxes (n, 4) as left, top, right, bottom, labels (n,), where wanted masks (n, H, W), and scores
# (n,) of those that a network finds.
Objects = dict[str, Tensor]

ANNOTATION_FILES = {
    "train": (
        "annotations/instances_train2017.json",
        "annotations/train.json",
        "train.json",
        "trainval.json",
    ),
    "test": (
        "annotations/instances_val2017.json",
        "annotations/val.json",
        "val.json",
        "annotations/test.json",
        "test.json",
    ),
}
# Folders where images are looked for, first to last; then `images` and the folder itself.
IMAGE_FOLDERS = {
    "train": ("train2017", "images/train", "train", "images"),
    "test": ("val2017", "images/val", "val", "valid", "images/test", "test"),
}
# Pixels by which a box may leave its image: some annotators count pixels from 1.
_TOLERANCE = 1.0
_LARGEST_SIDE = 10**6
_LARGEST_ID = 2**63
# Shortest side in pixels of a box that the crop has cut, for objects without masks; smaller ones are left out.
_MIN_SIDE = 1.0


class ImageRecord(NamedTuple):
    """An image: its number in the annotations, its file, its size, and its objects in COCO's format."""

    id: int
    file: str
    height: int
    width: int
    objects: tuple[Row, ...] = ()


class Annotations(NamedTuple):
    """The images of a COCO file, and the names of its categories by their numbers, in order."""

    images: list[ImageRecord]
    categories: dict[int, str]


def pycocotools(module: str) -> Any:
    return optional_module(
        f"pycocotools.{module}", "detection needs pycocotools, which is not installed", "dense"
    )


def encode_outline(outline: Any, height: int, width: int) -> Row:
    """Return an outline in COCO's format, polygons or RLE as text or numbers, as pycocotools' RLE.

    The outline must have been checked: pycocotools crashes on polygons far outside the image, and reads text that is
    not RLE beyond its end.
    """
    codec = pycocotools("mask")
    if isinstance(outline, list):
        return codec.merge(codec.frPyObjects(outline, height, width))
    if isinstance(outline["counts"], str):
        return outline
    return codec.frPyObjects(outline, height, width)


def draw_masks(outlines: Sequence[Any], height: int, width: int) -> Tensor:
    """Return the masks of checked outlines in COCO's format. Shape: -> (n, H, W) uint8"""
    if not outlines:
        return torch.zeros(0, height, width, dtype=torch.uint8)
    codec = pycocotools("mask")
    with warnings.catch_warnings():  # of NumPy 2, about pycocotools' own arrays
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        masks = [codec.decode(encode_outline(outline, height, width)) for outline in outlines]
    return torch.from_numpy(np.stack(masks))


def run_lengths(text: str) -> list[int]:
    """Return the lengths of the runs that COCO's RLE text codes: off and on in turn, down the columns of the mask.

    A character holds six bits: five of a number, the lowest first, and one that is set if more follow. From the fourth
    number on, the last but one is subtracted.

    Raises: ValueError for text that is not RLE.
    """
    runs = list[int]()
    number = 0
    shift = 0
    for code in text.encode("ascii"):
        if not 48 <= code < 112 or shift > 30:
            raise ValueError(f"{text[:20]!r} is not RLE")
        number |= (code - 48 & 31) << shift
        shift += 5
        if not code - 48 & 32:
            number -= (code - 48 & 16) << shift - 4  # the sign
            runs.append(number + (runs[-2] if len(runs) > 2 else 0))
            number = shift = 0
    if shift:
        raise ValueError(f"{text[:20]!r} ends within a number")
    return runs


def read_annotations(path: Path, masks: bool, skip: int = 0) -> Annotations:
    """Read a file in COCO's format. With `masks`, every object needs an outline, as polygons or RLE.

    Fields that may be missing have COCO's own values: iscrowd 0, and the box and the area of the outline. Up to `skip`
    annotations with a wrong box, outline or field are left out.

    Raises: UserError naming the file, and the annotation where there is one, for anything wrong.
    """
    content = _read_json(path)
    categories = _read_categories(path, content["categories"])
    records = _read_images(path, content["images"])
    objects: dict[int, Rows] = defaultdict(list)
    skipped = 0
    for position, annotation in enumerate(content["annotations"]):
        name = f"{path}: annotation {str(annotation.get('id', f'number {position}'))[:40]}"
        record = _image_of(annotation, records, name)
        _check_category(annotation, categories, name)
        fields, problem, instead = _read_object(annotation, record, masks)
        if problem:
            skipped += 1
            if skipped > skip:
                raise UserError(
                    f"{name} {problem}; correct it, or leave {skipped} out with "
                    f"task.skip_annotations{instead}"
                )
            continue
        objects[record.id].append(fields)
    if not objects:
        raise UserError(f"{path} has no annotations; give a file with boxes")
    images = [record._replace(objects=tuple(objects[number])) for number, record in records.items()]
    return Annotations(images, categories)


def _image_of(annotation: Row, records: Mapping[int, ImageRecord], name: str) -> ImageRecord:
    number = annotation.get("image_id")
    if type(number) is not int or number not in records:
        raise UserError(f"{name} is of image {str(number)[:40]}, which the file does not have")
    return records[number]


def _check_category(annotation: Row, categories: Mapping[int, str], name: str) -> None:
    category = annotation.get("category_id")
    if type(category) is int and category in categories:
        return
    listed = ", ".join(map(str, list(categories)[:8]))
    if len(categories) > 8:
        listed += ", ..."
    given = str(category)[:40]
    raise UserError(
        f"{name} has the unknown category_id {given}; the file's categories are {listed}"
    )


def _read_object(annotation: Row, record: ImageRecord, masks: bool) -> tuple[Row, str | None, str]:
    """Return an object's fields in COCO's format, what is wrong with it, if anything, and another way out."""
    box = annotation.get("bbox")
    outline = annotation.get("segmentation") or None
    unusable = _outline_problem(outline, record)
    if unusable:
        outline = None
    elif isinstance(outline, dict):  # its sizes may be 48.0
        outline = {"size": [record.height, record.width], "counts": outline["counts"]}
    if box is None and not unusable:
        coded = encode_outline(outline, record.height, record.width)
        box = pycocotools("mask").toBbox(coded).tolist()
    instead = ""
    problem = _field_problem(annotation)
    if masks and unusable:
        instead = ", or train boxes only with task.masks false"
        problem = problem or unusable
    problem = problem or _box_problem(box, record)
    fields = {
        "category_id": annotation["category_id"],
        "bbox": box,
        "iscrowd": int(annotation.get("iscrowd") or 0) if not problem else 0,
        "segmentation": outline,
        "area": annotation.get("area"),
    }
    return fields, problem, instead


def _read_json(path: Path) -> Row:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; give annotations in COCO's format") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"cannot read {path}: {error}; give annotations in COCO's format (JSON)"
        ) from None
    for name in ("images", "annotations", "categories"):
        listed = content.get(name) if isinstance(content, dict) else None
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise UserError(f"{path} has no list {name!r}; give annotations in COCO's format")
    return content


def _read_categories(path: Path, categories: Rows) -> dict[int, str]:
    named: dict[int, str] = {}
    for category in categories:
        number: Any = category.get("id")
        if _is_id(number):
            named[number] = str(category.get("name") or number)
    if not named or len(named) < len(categories):
        raise UserError(f"{path}: categories must have an id each, a whole number of their own")
    if len(set(named.values())) < len(named):
        raise UserError(f"{path}: two categories have one name; give each a name of its own")
    return dict(sorted(named.items()))


def _read_images(path: Path, images: Rows) -> dict[int, ImageRecord]:
    records: dict[int, ImageRecord] = {}
    for image in images:
        number: Any = image.get("id")
        file = image.get("file_name")
        height: Any = image.get("height")
        width: Any = image.get("width")
        known = _is_id(number) and isinstance(file, str)
        if not known or not _is_side(height) or not _is_side(width):
            given = str(number)[:40]
            raise UserError(
                f"{path}: image {given} needs an id, a file_name, and height and width in pixels"
            )
        if number in records:
            raise UserError(f"{path} has two images with id {number}; give each image its own")
        records[number] = ImageRecord(number, str(file), height, width)
    return records


def _is_side(length: Any) -> bool:
    return type(length) is int and 0 < length <= _LARGEST_SIDE


def _is_id(number: Any) -> bool:
    return type(number) is int and abs(number) < _LARGEST_ID


def _is_number(value: Any) -> bool:
    """True for a finite number of a size that pixels can have; JSON also has whole numbers of any length, and NaN."""
    return type(value) in (int, float) and abs(value) <= _LARGEST_SIDE**2


def _field_problem(annotation: Row) -> str | None:
    crowd = annotation.get("iscrowd")
    area = annotation.get("area")
    if crowd not in (None, 0, 1):
        return f"has iscrowd {crowd!r:.40}, which is not 0 or 1"
    if area is not None and not (_is_number(area) and area >= 0):
        return f"has area {area!r:.40}, which is not a number of pixels"
    return None


def _box_problem(box: Any, record: ImageRecord) -> str | None:
    if not isinstance(box, list) or len(box) != 4 or not all(_is_number(n) for n in box):
        return f"has bbox {str(box)[:80]}, which is not left, top, width and height"
    left, top, width, height = box
    if width <= 0 or height <= 0:
        return f"has bbox {box} in {record.file}, which has no area"
    before = min(left, top) < -_TOLERANCE
    beyond = left + width > record.width + _TOLERANCE or top + height > record.height + _TOLERANCE
    if before or beyond:
        return f"has bbox {box}, outside {record.file} of {record.width} x {record.height} pixels"
    return None


def _outline_problem(outline: Any, record: ImageRecord) -> str | None:
    """Return what is wrong with polygons, which may leave the image by its size, or RLE."""
    if outline is None:
        return "has no segmentation"
    if isinstance(outline, list):
        return _polygon_problem(outline, record)
    if not isinstance(outline, dict) or "counts" not in outline:
        return "has a segmentation that is neither polygons nor RLE"
    W = record.width
    H = record.height
    if outline.get("size") != [H, W]:
        return f"has an RLE mask of size {str(outline.get('size'))[:40]}, and {record.file} is {H} x {W}"
    runs = outline["counts"]
    if isinstance(runs, str):
        try:
            runs = run_lengths(runs)
        except ValueError:  # of text in another code, too
            return "has an RLE mask whose counts are not COCO's text"
    counts = isinstance(runs, list) and all(type(run) is int and 0 <= run <= H * W for run in runs)
    if counts and sum(runs) == H * W:
        return None
    return "has an RLE mask whose counts do not add up to its pixels"


def _polygon_problem(polygons: Sequence[Any], record: ImageRecord) -> str | None:
    if not all(map(_is_polygon, polygons)):
        return "has a polygon with fewer than three points, or that is not pairs of numbers"
    for points in polygons:
        for places, side in ((points[::2], record.width), (points[1::2], record.height)):
            if min(places) < -side or max(places) > 2 * side:
                return f"has a polygon far outside {record.file} of {record.width} x {record.height} pixels"
    return None


def _is_polygon(points: Any) -> bool:
    if not isinstance(points, list) or len(points) < 6 or len(points) % 2:
        return False
    return all(map(_is_number, points))


class DetectionSource(ImageSet[ImageRecord]):
    """Images with objects in COCO's format; an example is an image and its `Objects`.

    Crowds are left out. With `masks` the objects have masks, drawn from polygons or RLE.

    Raises: UserError naming the image when one cannot be read, or has another size than its annotations say.
    """

    def __init__(self, path: Path, annotations: Annotations, folder: Path, masks: bool) -> None:
        super().__init__(annotations.images, tuple(annotations.categories.values()))
        self.annotations = path
        self.folder = folder
        self.masks = masks
        self.category_ids = tuple(annotations.categories)
        self.label_of = {number: label for label, number in enumerate(self.category_ids)}

    def with_objects(self) -> "DetectionSource":
        """Return the images with objects other than crowds. Raises: UserError if there are none."""
        chosen = [i for i, record in enumerate(self.samples) if _without_crowds(record)]
        if not chosen:
            raise UserError(
                f"{self.annotations} has no objects, or crowds only, in {len(self)} images; give a file with "
                "objects, or use more images"
            )
        return self.subset(chosen)

    def path(self, index: int) -> Path:
        return self.folder / self.samples[index].file

    def image(self, index: int) -> Image.Image:
        image = super().image(index)
        record = self.samples[index]
        if image.size != (record.width, record.height):
            raise UserError(
                f"{self.path(index)} has {image.width} x {image.height} pixels, and its annotations in "
                f"{self.annotations} say {record.width} x {record.height}; correct them (images are turned as EXIF "
                "data says)"
            )
        return image

    def objects(self, index: int) -> Objects:
        """Return the objects of an image, without crowds. Boxes are cut at the borders of the image."""
        record = self.samples[index]
        shown = _without_crowds(record)
        boxes = torch.tensor([thing["bbox"] for thing in shown], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        limits = torch.tensor([record.width, record.height] * 2, dtype=torch.float32)
        labels = [self.label_of[thing["category_id"]] for thing in shown]
        objects = {
            "boxes": boxes.clamp(min=0).minimum(limits),
            "labels": torch.tensor(labels, dtype=torch.int64),
        }
        if self.masks:
            outlines = [thing["segmentation"] for thing in shown]
            objects["masks"] = draw_masks(outlines, record.height, record.width)
        return objects

    def example(self, index: int) -> tuple[Image.Image, Objects]:
        return self.image(index), self.objects(index)


def _without_crowds(record: ImageRecord) -> Rows:
    return [thing for thing in record.objects if not thing["iscrowd"]]


def open_annotated(
    root: Path,
    split: str,
    masks: bool,
    annotations: str | None = None,
    images: str | None = None,
    skip: int = 0,
) -> DetectionSource:
    """Open the images of a split, train or test, of a folder with annotations in COCO's format.

    `annotations` and `images` are a file and a folder, from `root`; by default they are looked for as in
    `ANNOTATION_FILES` and `IMAGE_FOLDERS`.

    Raises: UserError naming the file when one is missing or outside the folder, or an annotation is wrong.
    """
    if not root.is_dir():
        raise UserError(
            f"there is no folder {root}; give data.root a folder with images and COCO annotations"
        )
    path = root / annotations if annotations else find_annotations(root, split)
    content = read_annotations(path, masks, skip)
    if images:
        folders = [root / images]
    else:
        folders = _image_folders(root, split, path)
    for record in content.images:
        file_inside(folders[0], record.file, str(path))
    first = content.images[0].file
    folder = next((folder for folder in folders if (folder / first).is_file()), folders[0])
    records = _with_names_on_disk(content.images, folder, path)
    return DetectionSource(path, content._replace(images=records), folder, masks)


def _image_folders(root: Path, split: str, annotations: Path) -> list[Path]:
    """Return the folders that may hold the images, first those that are named for the split of the annotations."""
    words = split_words(annotations.stem)
    alike = []
    for name in (*IMAGE_FOLDERS["train"], *IMAGE_FOLDERS["test"]):
        if words and split_words(name) == words:
            alike.append(name)
    names = dict.fromkeys([*alike, *IMAGE_FOLDERS[split], "images", "."])
    return [root / name for name in names if (root / name).is_dir()]


def _with_names_on_disk(
    records: Sequence[ImageRecord], folder: Path, path: Path
) -> list[ImageRecord]:
    """Return the images with the names of their files, which may have another Unicode form in the annotations.

    Raises: UserError for missing files.
    """
    present = set(os.listdir(folder)) if folder.is_dir() else set()
    by_form = {composed(name): name for name in present}
    named = []
    missing = []
    for record in records:
        name = record.file
        if name not in present:
            name = by_form.get(composed(name), name)
        if name not in present and not (folder / name).is_file():
            missing.append(name)
        named.append(record._replace(file=name))
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{folder} has no file {missing[0]}{others}, of the images in {path}; correct data.root"
        )
    return named


def find_annotations(root: Path, split: str, instead: str = "") -> Path:
    """Return the annotations of a split. Raises: UserError, which says what to give `instead`, if there are none."""
    places = ANNOTATION_FILES[split]
    for name in places:
        if (root / name).is_file():
            return root / name
    instead = instead or f"give task.{split} a file"
    raise UserError(f"{root} has none of {', '.join(places)} for the {split} split; {instead}")


def check_same_categories(train: DetectionSource, test: DetectionSource) -> None:
    """Raise UserError if the test data has categories with other numbers or names than the training data."""
    trained = dict(zip(train.category_ids, train.classes, strict=True))
    tested = dict(zip(test.category_ids, test.classes, strict=True))
    for number in sorted(trained.keys() | tested.keys()):
        old = trained.get(number)
        new = tested.get(number)
        if old != new:
            raise UserError(
                f"category {number} is {old!r} in {train.annotations} and {new!r} in {test.annotations}; "
                "give both the same categories"
            )


class FitTransform:
    """Resize an image to fit the input, keeping its ratio, and pad it on the right and below.

    Shape: PIL image -> (3, H, W), normalised
    """

    def __init__(self, config: ImageConfig) -> None:
        self.size = tuple(config["input_size"][-2:])
        self.mean = config["mean"]
        self.std = config["std"]

    def fit(self, image: Image.Image) -> tuple[Tensor, ImageSize]:
        """Return an image as the network reads it, and its height and width inside."""
        size = fitted_size(image.size[::-1], self.size)
        resized = V.resize(V.pil_to_tensor(image), size, antialias=True)
        inside = tuple(resized.shape[-2:])
        return pad_to(normalised(resized, self.mean, self.std), self.size), inside


class TrainTransform(FitTransform):
    """Flip an image, resize it by a random scale, crop it to the input size, and pad it on the right and below.

    The scale is drawn from `scales`, where 1 fits the image to the input. Boxes are those of the masks after the crop
    where there are masks; objects that the crop removes are left out.

    Shape: PIL image, objects -> (3, H, W), normalised, and the objects left
    Source: large-scale jitter (Ghiasi et al., 2021), as in G2SD's ViTDet
    """

    def __init__(self, config: ImageConfig, scales: tuple[float, float], flip: float) -> None:
        super().__init__(config)
        self.scales = scales
        self.flip = flip

    def __call__(self, example: tuple[Image.Image, Objects]) -> tuple[Tensor, Objects]:
        image, objects = example
        canvas = image.size[::-1]
        sample: Row = {"image": tv_tensors.Image(V.pil_to_tensor(image))}
        sample["boxes"] = tv_tensors.BoundingBoxes(
            objects["boxes"], format="XYXY", canvas_size=canvas
        )
        if "masks" in objects:
            sample["masks"] = tv_tensors.Mask(objects["masks"])
        draw = torch.rand(4)  # flip, scale, row and column of the crop
        if draw[0] < self.flip:
            sample = {name: V.horizontal_flip(value) for name, value in sample.items()}
        smallest, largest = self.scales
        scale = smallest + (largest - smallest) * draw[1].item()
        size = fitted_size(canvas, tuple(max(1, round(side * scale)) for side in self.size))
        sample = {name: _resize(value, size) for name, value in sample.items()}

        height = min(size[0], self.size[0])
        width = min(size[1], self.size[1])
        top = int((size[0] - height) * draw[2] + 0.5)
        left = int((size[1] - width) * draw[3] + 0.5)
        sample = {name: V.crop(value, top, left, height, width) for name, value in sample.items()}
        cropped = normalised(sample["image"], self.mean, self.std)
        return pad_to(cropped, self.size), self._objects(sample, objects)

    def _objects(self, sample: Row, objects: Objects) -> Objects:
        boxes = sample["boxes"].as_subclass(Tensor)
        labels = objects["labels"]
        if "masks" not in sample:
            left = ((boxes[:, 2:] - boxes[:, :2]) >= _MIN_SIDE).all(1)
            return {"boxes": boxes[left], "labels": labels[left]}
        masks = sample["masks"].as_subclass(Tensor)
        left = masks.flatten(1).any(1).bool()
        boxes = masks_to_boxes(masks[left])
        boxes[:, 2:] += 1  # the last pixel belongs to the object
        return {"boxes": boxes, "labels": labels[left], "masks": pad_to(masks[left], self.size)}


def fitted_size(size: tuple[int, ...], limit: tuple[int, ...]) -> list[int]:
    """Return height and width of an image resized to fit a limit, with its ratio kept."""
    scale = min(limit[0] / size[0], limit[1] / size[1])
    fitted = []
    for side, largest in zip(size, limit, strict=True):
        scaled = max(1, round(side * scale))
        fitted.append(min(largest, scaled))
    return fitted


def _resize(value: Any, size: list[int]) -> Any:
    if isinstance(value, tv_tensors.Mask):
        if len(value):
            return resize_masks(value, size)
        return value.new_zeros(0, *size)
    return V.resize(value, size, antialias=True)


def pad_to(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Pad an image or masks with zeros on the right and below. Shape: (C, H, W) -> (C, *size)"""
    height, width = size
    return torch.nn.functional.pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2]))
