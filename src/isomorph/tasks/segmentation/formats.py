"""Folders of images and masks as published: ADE20K, CamVid, Pascal VOC, COCO; and any folder of pairs."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import yaml

from isomorph.data.formats.naming import IMAGE_SUFFIXES, SPLITS
from isomorph.data.sources import hash_to_unit, spaced_indices
from isomorph.errors import UserError, first_line
from isomorph.tasks.segmentation.images import (
    IGNORE,
    MAX_CLASSES,
    Files,
    MaskedImages,
    lookup_table,
    read_mask,
)

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


def _files(folder: Path) -> list[Path]:
    """Return the image files below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)


def _first_file(stem: Path, suffixes: Iterable[str]) -> Path | None:
    """Return the first existing file of this name with one of the suffixes."""
    return next((path for end in suffixes if (path := stem.with_name(stem.name + end)).is_file()), None)


def _pair_by_name(images: Path, masks: Path) -> list[Files]:
    """Return the images of a folder, and the masks of the same names, ending in .png or as the images.

    Raises: UserError for an image without a mask, or a folder without images.
    """
    found = []
    for file in _files(images):
        stem = masks / file.relative_to(images).with_suffix("")
        mask = _first_file(stem, (".png", file.suffix, *sorted(IMAGE_SUFFIXES)))
        if mask is None:
            raise UserError(f"{file} has no mask: {stem}.png does not exist")
        found.append(Files(file, mask))
    if not found:
        raise UserError(f"{images} has no images")
    return found


def _existing(root: Path, names: Iterable[str]) -> Path | None:
    """Return the first of these folders that exists."""
    return next((path for name in names if (path := root / name).is_dir()), None)


def camvid(split: str, root: Path) -> MaskedImages | None:
    """Open CamVid as published with SegNet: {train,val,test}/ and {train,val,test}annot/, 11 classes, 11 ignored."""
    root = root if _existing(root, SPLITS["train"]) else root / "camvid"
    images = _existing(root, SPLITS[split])
    if images is None:
        return None
    table = lookup_table(range(len(CAMVID_CLASSES)), len(CAMVID_CLASSES))
    pairs = _pair_by_name(images, images.with_name(f"{images.name}annot"))
    return MaskedImages(pairs, CAMVID_CLASSES, table, CAMVID_COLOURS)


def ade20k(split: str, root: Path) -> MaskedImages | None:
    """Open ADE20K as published: images/ and annotations/ with training/ and validation/; 0 has no class."""
    root = root if (root / "annotations").is_dir() else root / "ADEChallengeData2016"
    folder = {"train": "training", "test": "validation"}[split]
    if not (root / "images" / folder).is_dir():
        return None
    files = _pair_by_name(root / "images" / folder, root / "annotations" / folder)
    return MaskedImages(files, _ade_classes(root / "objectInfo150.txt"), lookup_table(range(1, ADE_CLASSES + 1), 0))


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
    images, masks = root / "JPEGImages", root / "SegmentationClass"
    files = [Files(images / f"{name}.jpg", masks / f"{name}.png") for name in _read_text(listed).split()]
    return MaskedImages(files, VOC_CLASSES, lookup_table(range(len(VOC_CLASSES))))


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
    stems = {mask: images / mask.relative_to(found).with_suffix("") for mask in _files(found)}
    files = [Files(_first_file(stem, (".jpg", ".png")) or Path(f"{stem}.jpg"), mask) for mask, stem in stems.items()]
    return MaskedImages(files, list(classes.values()), lookup_table(list(classes), 0))


def _coco_categories(root: Path) -> dict[int, str]:
    """Return the names of COCO's panoptic categories by id, without that of pixels that have none."""
    config, published = root / "semantic" / "config.yaml", sorted((root / "annotations").glob("panoptic_*.json"))
    path = config if config.is_file() or not published else published[0]
    if not path.is_file():
        raise UserError(f"{config} does not exist, nor {root}/annotations/panoptic_*.json; one must name the classes")
    text = _read_text(path)
    try:
        if path == config:
            names = {int(number): str(name) for number, name in yaml.safe_load(text)["classes"].items()}
        else:
            names = {each["id"]: each["name"] for each in json.loads(text)["categories"]}
    except (KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"{path} does not name the classes as published: {first_line(error)}; replace it") from None
    return {number: names[number] for number in sorted(names) if number != 0}


def _read_text(path: Path) -> str:
    """Return the text of a file. Raises: UserError naming the file when it cannot be read, or is not text."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}; save it as text in UTF-8") from None


def masks(split: str, root: Path) -> MaskedImages | None:
    """Open a folder of one's own: images/ and masks/, each with the splits or inside them; classes.txt names classes.

    A mask is an image with the number of the class of every pixel, from 0; 255 has none. Without classes.txt there are
    as many classes as the training masks have values. A folder without splits is all for training.
    """
    pair = _own_folders(root, SPLITS[split])
    if pair is None and split == "train" and not _own_folders(root, SPLITS["test"]):
        pair = _own_folders(root, ("",))
    if pair is None:
        if split == "train":
            raise UserError(f"{root} has no folders images and masks; each image needs a mask of the same name")
        return None
    files = _pair_by_name(*pair)
    classes = _own_classes(root, [each.mask for each in files] if split == "train" else None)
    return MaskedImages(files, classes, lookup_table(range(len(classes))))


def _own_folders(root: Path, names: Sequence[str]) -> tuple[Path, Path] | None:
    """Return the folders of images and of masks of a split, or None."""
    for pattern in [pattern for name in names for pattern in (f"{name}/{{}}", f"{{}}/{name}")]:
        folders = (IMAGE_FOLDERS, MASK_FOLDERS)
        images, found = (_existing(root, [pattern.format(each).strip("/") for each in kind]) for kind in folders)
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
    values = (read_mask(path) for path in training)
    largest = max((int(each[each != IGNORE].max(initial=-1)) for each in values), default=-1)
    if largest < 1:
        raise UserError(f"the masks of {root} have one class only; give 2 to {MAX_CLASSES}, numbered from 0")
    return [str(number) for number in range(largest + 1)]


FORMATS: dict[str, Callable[[str, Path], MaskedImages | None]] = {
    "masks": masks,
    "ade20k": ade20k,
    "camvid": camvid,
    "voc": voc,
    "coco-semantic": coco_semantic,
}
"""Formats of images with masks, by the name of the data source."""


def open_masks(source: str, split: str, root: Path) -> MaskedImages | None:
    """Return the images and masks of a split, "train" or "test"; None if the data has no such split.

    Raises: UserError for missing folders or files.
    """
    if not root.is_dir():
        raise UserError(f"data.root {root} is not a folder")
    return FORMATS[source](split, root)


def open_splits(source: str, root: Path, fraction: float | None) -> tuple[MaskedImages, MaskedImages]:
    """Return training and test images; without test images of its own, a `fraction` of the training images.

    Raises: UserError without training images, or without test images and a fraction.
    """
    train, test = (open_masks(source, split, root) for split in ("train", "test"))
    if train is None:
        raise _missing(source, root, "training")
    if test is not None:
        if fraction is not None:
            raise UserError(f"{root} has test images of its own; leave data.split out")
        return train, test
    if fraction is None:
        raise UserError(
            f"{root} has no test images; give --data.split, the fraction of the images to test on, like 0.2"
        )
    held_out = np.array([hash_to_unit(files.image.name) for files in train.samples]) < fraction
    if held_out.all() or not held_out.any():
        raise UserError(f"data.split {fraction:g} leaves no image on one side of {len(train)}; give another fraction")
    train.split = (fraction, len(train))
    return train.subset(np.flatnonzero(~held_out)), train.subset(np.flatnonzero(held_out))


def open_test_pairs(
    source: str, root: Path, fraction: float | None, max_images: int | None, images: int | None = None
) -> MaskedImages:
    """Return the test images of a data source, or evenly spaced ones of them.

    They are the part that training left out if `fraction` is given (of a folder with this number of `images`), else the
    test images, else a whole folder of masks.

    Raises: UserError for an unknown source, or without test images.
    """
    if source not in FORMATS:
        raise UserError(f"data source {source!r} is unknown; choose one of {', '.join(FORMATS)}")
    pairs = None
    with suppress(UserError):  # of a folder that cannot be split
        part = open_splits(source, root, fraction)[1] if fraction else None
        pairs = part if part and images in (None, (part.split or (0, 0))[1]) else None
    pairs = pairs or open_masks(source, "test", root)
    if pairs is None and source == "masks" and not any(_own_folders(root, names) for names in SPLITS.values()):
        pairs = masks("train", root)
    if pairs is None:
        raise _missing(source, root, "test")
    return pairs if max_images is None else pairs.subset(spaced_indices(np.zeros(len(pairs)), max_images))


def _missing(source: str, root: Path, kind: str) -> UserError:
    where = f"in the folders of the data source {source}; give the folder that has them"
    return UserError(f"{root} has no {kind} images {where}")
