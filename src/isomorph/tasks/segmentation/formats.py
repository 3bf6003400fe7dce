"""Folders of images and masks as published: ADE20K, CamVid, Pascal VOC, COCO; and any folder of pairs."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import yaml

from isomorph.data.formats.naming import IMAGE_SUFFIXES, SPLITS
from isomorph.errors import UserError, first_line
from isomorph.tasks.segmentation.pairs import IGNORE, MAX_CLASSES, MaskedImages, lookup_table, read_mask

T = TypeVar("T")
IMAGE_FOLDERS, MASK_FOLDERS = ("images", "image", "imgs"), ("masks", "mask", "labels", "annotations")
"""Names of the two folders of a data set of one's own; the first that exists is used."""
CAMVID_CLASSES = (
    *("Sky", "Building", "Pole", "Road", "Pavement", "Tree"),
    *("SignSymbol", "Fence", "Car", "Pedestrian", "Bicyclist"),
)
CAMVID_COLOURS = (
    (128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (60, 40, 222), (128, 128, 0), (192, 128, 128),
    (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192),
)  # fmt: skip
VOC_CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
ADE_CLASSES = 150


def open_masks(source: str, split: str, root: Path) -> MaskedImages | None:
    """Return the images and masks of a split, "train" or "test"; None if the data has no such split.

    Raises: UserError for missing folders or files.
    """
    if not root.is_dir():
        raise UserError(f"data.root {root} is not a folder")
    return FORMATS[source](split, root)


def _files(folder: Path, suffixes: Iterable[str] = tuple(IMAGE_SUFFIXES)) -> list[Path]:
    """Return the image files below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)


def _pair_by_name(images: Path, masks: Path) -> tuple[list[Path], list[Path]]:
    """Return the images of a folder and the masks of the same names, ending in .png or as the images.

    Raises: UserError for an image without a mask, or a folder without images.
    """
    files = _files(images)
    if not files:
        raise UserError(f"{images} has no images")
    found = []
    for file in files:
        stem = masks / file.relative_to(images).with_suffix("")
        candidates = [stem.with_name(stem.name + end) for end in (".png", file.suffix, *sorted(IMAGE_SUFFIXES))]
        mask = next((path for path in candidates if path.is_file()), None)
        if mask is None:
            raise UserError(f"{file} has no mask: {candidates[0]} does not exist")
        found.append(mask)
    return files, found


def _existing(root: Path, names: Iterable[str]) -> Path | None:
    """Return the first of these folders that exists."""
    return next((path for name in names if (path := root / name).is_dir()), None)


def camvid(split: str, root: Path) -> MaskedImages | None:
    """Open CamVid as published with SegNet: {train,val,test}/ and {train,val,test}annot/, 11 classes, 11 ignored."""
    root = root if _existing(root, SPLITS["train"]) else root / "camvid"
    images = _existing(root, SPLITS[split])
    if images is None:
        return None
    table = lookup_table(range(len(CAMVID_CLASSES)))
    table[len(CAMVID_CLASSES)] = IGNORE
    return MaskedImages(
        *_pair_by_name(images, images.with_name(f"{images.name}annot")), CAMVID_CLASSES, table, CAMVID_COLOURS
    )


def ade20k(split: str, root: Path) -> MaskedImages | None:
    """Open ADE20K as published: images/ and annotations/ with training/ and validation/; 0 has no class."""
    root = root if (root / "annotations").is_dir() else root / "ADEChallengeData2016"
    folder = {"train": "training", "test": "validation"}[split]
    if not (root / "images" / folder).is_dir():
        return None
    table = lookup_table(range(1, ADE_CLASSES + 1))
    table[0] = IGNORE
    files = _pair_by_name(root / "images" / folder, root / "annotations" / folder)
    return MaskedImages(*files, _ade_classes(root / "objectInfo150.txt"), table)


def _ade_classes(path: Path) -> list[str]:
    """Return the names in ADE20K's table of classes; numbers if it is missing."""
    if not path.is_file():
        return [str(number) for number in range(1, ADE_CLASSES + 1)]
    names = [line.split("\t")[-1].split(",")[0].strip() for line in _read_text(path).splitlines()[1:] if line.strip()]
    if len(names) != ADE_CLASSES:
        raise UserError(
            f"{path} names {len(names)} classes, not {ADE_CLASSES}; use the file as published, or remove it"
        )
    return names


def voc(split: str, root: Path) -> MaskedImages | None:
    """Open Pascal VOC as published: JPEGImages/, SegmentationClass/ and ImageSets/Segmentation/{train,val}.txt."""
    folders = [root, root / "VOC2012", root / "VOCdevkit" / "VOC2012"]
    root = next((folder for folder in folders if (folder / "SegmentationClass").is_dir()), root)
    lists = [root / "ImageSets" / "Segmentation" / f"{name}.txt" for name in SPLITS[split]]
    listed = next((path for path in lists if path.is_file()), None)
    if listed is None:
        return None
    names = _read_text(listed).split()
    images, masks = (
        [root / folder / f"{name}{end}" for name in names]
        for folder, end in (("JPEGImages", ".jpg"), ("SegmentationClass", ".png"))
    )
    return MaskedImages(images, masks, VOC_CLASSES, lookup_table(range(len(VOC_CLASSES))))


def coco_semantic(split: str, root: Path) -> MaskedImages | None:
    """Open masks of COCO's panoptic categories: {train,val}2017/ and semantic/{train,val}2017/; 0 has no class.

    The names of the categories come from semantic/config.yaml, or from annotations/panoptic_*.json.
    """
    found = _existing(root / "semantic", [f"{name}2017" for name in SPLITS[split]] + list(SPLITS[split]))
    if found is None:
        return None
    classes = _coco_categories(root)
    images = _existing(root, (found.name, f"images/{found.name}"))
    if images is None:
        raise UserError(f"{root / found.name} does not exist; it should hold the images of {found}")
    masks = _files(found)
    pictures = [_of_suffix(images / mask.relative_to(found).with_suffix(""), (".jpg", ".png")) for mask in masks]
    table = lookup_table(list(classes))
    table[0] = IGNORE
    return MaskedImages(pictures, masks, list(classes.values()), table)


def _of_suffix(stem: Path, suffixes: Sequence[str]) -> Path:
    """Return the first existing file of this name with one of the suffixes, else the first of them."""
    paths = [stem.with_name(stem.name + suffix) for suffix in suffixes]
    return next((path for path in paths if path.is_file()), paths[0])


def _coco_categories(root: Path) -> dict[int, str]:
    """Return the names of COCO's panoptic categories by id, without that of pixels that have none."""
    config = root / "semantic" / "config.yaml"
    if config.is_file():
        return _parsed(config, _classes_of_config)
    annotations = sorted((root / "annotations").glob("panoptic_*.json"))
    if not annotations:
        raise UserError(f"{config} does not exist, nor {root}/annotations/panoptic_*.json; one must name the classes")
    return _parsed(annotations[0], _classes_of_annotations)


def _classes_of_config(text: str) -> dict[int, str]:
    """Return the classes by number in the text of a config.yaml."""
    names = {int(number): str(name) for number, name in yaml.safe_load(text)["classes"].items()}
    return {number: names[number] for number in sorted(names) if number != 0}


def _classes_of_annotations(text: str) -> dict[int, str]:
    """Return the categories by number in the text of a COCO file."""
    names = {each["id"]: each["name"] for each in json.loads(text)["categories"]}
    return {number: names[number] for number in sorted(names)}


def _parsed(path: Path, parse: Callable[[str], T]) -> T:
    """Return what `parse` makes of a file's text. Raises: UserError naming the file when it cannot."""
    try:
        return parse(_read_text(path))
    except (KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"{path} does not name the classes as published: {first_line(error)}; replace it") from None


def _read_text(path: Path) -> str:
    """Return the text of a file. Raises: UserError naming the file when it cannot be read, or is not text."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}; save it as text in UTF-8") from None


def masks(split: str, root: Path) -> MaskedImages | None:
    """Open a folder of one's own: images/ and masks/, each with the splits or inside them; classes.txt names classes.

    A mask is an image with the number of the class of every pixel, from 0; 255 has none. Without classes.txt there are
    as many classes as the training masks have values.
    """
    pair = _own_folders(root, SPLITS[split])
    if pair is None and split == "train" and not _own_folders(root, SPLITS["test"]):
        pair = _own_folders(root, ("",))
    if pair is None:
        if split == "train":
            raise UserError(f"{root} has no folders images and masks; each image needs a mask of the same name")
        return None
    files = _pair_by_name(*pair)
    classes = _own_classes(root, files[1] if split == "train" else None)
    return MaskedImages(*files, classes, lookup_table(range(len(classes))))


def whole_folder(root: Path) -> MaskedImages | None:
    """Open all images of a folder of one's own that has no splits; None if it has any."""
    pair = _own_folders(root, ("",))
    if pair is None or any(_own_folders(root, names) for names in SPLITS.values()):
        return None
    files = _pair_by_name(*pair)
    classes = _own_classes(root, files[1])
    return MaskedImages(*files, classes, lookup_table(range(len(classes))))


def _own_folders(root: Path, names: Sequence[str]) -> tuple[Path, Path] | None:
    """Return the folders of images and of masks of a split, or None."""
    for name in names:
        inside = [_existing(root / name, folders) for folders in (IMAGE_FOLDERS, MASK_FOLDERS)]
        around = [
            _existing(root, [f"{folder}/{name}" for folder in folders]) for folders in (IMAGE_FOLDERS, MASK_FOLDERS)
        ]
        for images, found in (inside, around):
            if images and found:
                return images, found
    return None


def _own_classes(root: Path, training: Sequence[Path] | None) -> list[str]:
    """Return the names in classes.txt, or the numbers up to the largest value in the training masks."""
    listed = root / "classes.txt"
    if listed.is_file():
        names = [line.strip() for line in _read_text(listed).splitlines() if line.strip()]
        if not 1 < len(names) <= MAX_CLASSES:
            raise UserError(f"{listed} names {len(names)} classes; give 2 to {MAX_CLASSES}, one a line")
        return names
    if training is None:
        pair = _own_folders(root, SPLITS["train"])
        training = _files(pair[1]) if pair else []
    largest = max((_largest_value(path) for path in training), default=-1)
    if largest < 1:
        raise UserError(f"the masks of {root} have one class only; give 2 to {MAX_CLASSES}, numbered from 0")
    return [str(number) for number in range(largest + 1)]


def _largest_value(path: Path) -> int:
    """Return the largest class in a mask, -1 if no pixel has one."""
    values = read_mask(path)
    return int(values[values != IGNORE].max(initial=-1))


FORMATS: dict[str, Callable[[str, Path], MaskedImages | None]] = {
    "masks": masks,
    "ade20k": ade20k,
    "camvid": camvid,
    "voc": voc,
    "coco-semantic": coco_semantic,
}
"""Formats of images with masks, by the name of the data source."""
