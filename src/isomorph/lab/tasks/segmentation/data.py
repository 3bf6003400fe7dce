"""Images and their masks, the class of every pixel as a second image of the same size, in folders as published.

Formats: ADE20K, CamVid, and any folder of pairs.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms.v2.functional import pil_to_tensor

from isomorph.errors import DataWarning, UserError
from isomorph.lab.data.formats.naming import (
    IMAGE_SUFFIXES,
    SPLITS,
    composed,
    find_folder,
    image_files,
    read_lines,
)
from isomorph.lab.data.sources import (
    UnreadableImage,
    explain_decode_errors,
    hash_to_unit,
    spaced_indices,
    upright,
    upright_size,
)
from isomorph.lab.tasks.image_sets import ImageSet
from isomorph.spec import ImageSize

# Class of the pixels that count neither in the loss nor in the metrics.
IGNORE = 255
MAX_CLASSES = 255
# Masks whose values are checked before training; of more, those spaced evenly. Each is checked when it is read too.
CHECKED_MASKS = 1000
# Formats of images (Pillow's names) that keep numbers as they are.
_EXACT_FORMATS = {"PNG", "TIFF", "BMP", "DIB", "GIF", "PPM"}
# Compressions inside a TIFF that do not.
_LOSSY_COMPRESSIONS = {"jpeg", "tiff_jpeg", "webp", "jpeg2000"}


class Pair(NamedTuple):
    """An image and its mask. Shape: image (3, H, W) uint8, mask (H, W) int64, IGNORE for pixels without a class"""

    image: tv_tensors.Image
    mask: tv_tensors.Mask


class Files(NamedTuple):
    """The files of an image and its mask."""

    image: Path
    mask: Path


def lookup_table(values: Sequence[int], *ignored: int) -> np.ndarray:
    """Return classes of mask values: values[i] is class i, 255 and `ignored` none, others -1. Shape: -> (256,)"""
    table = np.full(256, -1, np.int64)
    table[[IGNORE, *ignored]] = IGNORE
    table[list(values)] = np.arange(len(values))
    return table


def read_mask(path: Path) -> np.ndarray:
    """Return the values of a mask. Shape: -> (H, W) int64

    Raises: UserError naming the file for one that cannot be read, has several channels, is stored in a format that
    changes numbers, or has values that are not whole numbers from 0.
    """
    with explain_decode_errors(lambda: str(path)), Image.open(path) as opened:
        stored = opened.format or "image"
        compression = str(opened.info.get("compression")).lower()
        exact = stored in _EXACT_FORMATS and compression not in _LOSSY_COMPRESSIONS
        if stored == "PPM":  # Pillow scales values whose white is not 255 or 65535
            exact = all(tile[0] == "raw" for tile in opened.tile)
        values = np.asarray(upright(opened))
    if not exact:
        raise UserError(
            f"{path} is stored as {stored}, which changes the numbers of classes; save masks as PNG"
        )
    if values.ndim != 2:
        raise UserError(
            f"{path} has {values.shape[2]} channels; a mask has one, with the number of each class"
        )
    wrong = ~((values >= 0) & (values <= np.iinfo(np.int32).max))  # NaN is not in any range
    if values.dtype.kind == "f":
        wrong |= np.trunc(values) != values
    if wrong.any():
        raise UserError(
            f"{path} has the value {values[wrong][0]:g}; a mask has whole numbers of classes, from 0"
        )
    return values.astype(np.int64)


class MaskedImages(ImageSet[Files]):
    """Images and their masks; an example is a `Pair`.

    `table` gives the class of each value in the mask files: IGNORE where the value has none, -1 where it must not
    occur. `split`, where images without test images were split, is the fraction for testing and the number of images
    before.

    Raises: UserError, from reading, for a damaged file, a mask of another size than its image, or an unknown value.
    """

    split: tuple[float, int] | None = None

    def __init__(self, samples: Sequence[Files], classes: Sequence[str], table: np.ndarray) -> None:
        super().__init__(samples, classes)
        self.table = table

    def path(self, index: int) -> Path:
        return self.samples[index].image

    def mask(self, index: int) -> np.ndarray:
        """Return the class of every pixel of an image. Shape: -> (H, W)"""
        path = self.samples[index].mask
        values = read_mask(path)
        classes = self.table[np.minimum(values, len(self.table) - 1)]
        wrong = (classes < 0) | (values >= len(self.table))
        if wrong.any():
            raise UserError(
                f"{path} has the value {values[wrong][0]}, which is not one of the "
                f"{len(self.classes)} classes; correct it, or use {IGNORE} for pixels without a "
                "class"
            )
        return classes

    def example(self, index: int) -> Pair:
        image = self.image(index)
        mask = self.mask(index)
        _check_size(self.samples[index], image.size, mask.shape[::-1])
        return Pair(tv_tensors.Image(pil_to_tensor(image)), tv_tensors.Mask(torch.from_numpy(mask)))

    def check(self, unreadable: int | None = None) -> None:
        """Check all files before training: present, of the same size, with known values (in up to CHECKED_MASKS).

        Up to `unreadable` files may be damaged, which training leaves out; None for data that must be whole.

        Raises: UserError for the first file that is wrong, or if no pixel has a class.
        """
        if not len(self):
            raise UserError("there are no images; check data.root")
        damaged = set[str]()
        seen = set[int]()
        for files in self.samples:
            for path in files:
                if not path.is_file():
                    raise UserError(
                        f"{path} does not exist; every image needs a mask of the same name"
                    )
            with _counting(damaged, unreadable):
                _check_size(files, _size_of(files.image), _size_of(files.mask))
        for index in spaced_indices(np.zeros(len(self)), CHECKED_MASKS):
            with _counting(damaged, unreadable):
                seen.update(np.unique(self.mask(index)).tolist())
        folder = self.samples[0].mask.parent
        ignored = {IGNORE} & seen
        if not seen - ignored:
            raise UserError(
                f"no pixel of the masks in {folder} has a class; give masks with class numbers"
            )
        if len(self.classes) == 2 and ignored and len(seen) == 2:
            raise UserError(
                f"the masks in {folder} have one class, and {IGNORE}, which stands for no class; write the number of "
                "the other class in its place"
            )


@contextmanager
def _counting(damaged: set[str], allowed: int | None) -> Iterator[None]:
    """Add the message about an image that cannot be decoded to `damaged`. Raises: it, when they are too many."""
    try:
        yield
    except UnreadableImage as error:
        damaged.add(str(error))
        if allowed is None:
            raise
        if len(damaged) > allowed:
            raise UserError(f"{error}; to skip unreadable images, give data.unreadable") from None


def _size_of(path: Path) -> ImageSize:
    with explain_decode_errors(partial(str, path)), Image.open(path) as opened:
        return upright_size(opened)


def _check_size(files: Files, image: tuple[int, ...], mask: tuple[int, ...]) -> None:
    if image != mask:
        own = "{} x {}".format(*mask)
        given = "{} x {}".format(*image)
        raise UserError(
            f"{files.mask} has {own} pixels, and {files.image.name} has {given}, turned as EXIF "
            "data says; make them equal"
        )


# folders


# Names of the two folders of a data set of one's own; the first that exists is used.
IMAGE_FOLDERS = ("images", "image", "imgs")
MASK_FOLDERS = ("masks", "mask", "labels", "annotations")
CAMVID = (
    "Sky",
    "Building",
    "Pole",
    "Road",
    "Pavement",
    "Tree",
    "SignSymbol",
    "Fence",
    "Car",
    "Pedestrian",
    "Bicyclist",
)
ADE_CLASSES = 150


def _pair_by_name(images: Path, masks: Path) -> list[Files]:
    """Pair images with masks of the same names. Raises: UserError for an image without a mask, or no images."""
    pairs = []
    mask_of = {composed(str(path.relative_to(masks))): path for path in image_files(masks)}
    for file in image_files(images):
        stem = file.relative_to(images).with_suffix("")
        suffixes = (".png", file.suffix, *sorted(IMAGE_SUFFIXES))
        names = [composed(f"{stem}{suffix}") for suffix in suffixes]
        present = [name for name in names if name in mask_of]
        if not present:
            raise UserError(f"{file} has no mask: {masks / stem}.png does not exist")
        pairs.append(Files(file, mask_of[present[0]]))
    if not pairs:
        raise UserError(f"{images} has no images")
    return pairs


def camvid(split: str, root: Path) -> MaskedImages | None:
    """Open CamVid as published with SegNet: {train,val,test}/ and {train,val,test}annot/, 11 classes, 11 ignored."""
    if not find_folder(root, SPLITS["train"]):
        root = root / "camvid"
    images = find_folder(root, SPLITS[split])
    if images is None:
        return None
    pairs = _pair_by_name(images, images.with_name(f"{images.name}annot"))
    count = len(CAMVID)
    table = lookup_table(range(count), count)
    return MaskedImages(pairs, CAMVID, table)


def ade20k(split: str, root: Path) -> MaskedImages | None:
    """Open ADE20K as published: images/ and annotations/ with training/ and validation/; 0 has no class."""
    if not (root / "annotations").is_dir():
        root = root / "ADEChallengeData2016"
    folder = {"train": "training", "test": "validation"}[split]
    if not (root / "images" / folder).is_dir():
        return None
    files = _pair_by_name(root / "images" / folder, root / "annotations" / folder)
    classes = _ade_classes(root / "objectInfo150.txt")
    return MaskedImages(files, classes, lookup_table(range(1, ADE_CLASSES + 1), 0))


def _ade_classes(path: Path) -> list[str]:
    if not path.is_file():
        return [str(number) for number in range(1, ADE_CLASSES + 1)]
    names = [line.split("\t")[-1].split(",")[0].strip() for line in read_lines(path)[1:]]
    if len(names) != ADE_CLASSES:
        raise UserError(
            f"{path} names {len(names)} classes, not {ADE_CLASSES}; use the published file, or none"
        )
    return names


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
            raise UserError(
                f"{root} has no folders images and masks; each image needs a mask of the same name"
            )
        return None
    pairs = _pair_by_name(*pair)
    training = None
    if split == "train":
        training = [files.mask for files in pairs]
    classes = _own_classes(root, training)
    return MaskedImages(pairs, classes, lookup_table(range(len(classes))))


def _own_folders(root: Path, names: Sequence[str]) -> tuple[Path, Path] | None:
    """Return the folders of images and masks of a split: inside its folder, or with its folders inside them."""
    for name in names:
        for pattern in (f"{name}/{{}}", f"{{}}/{name}"):
            images, masks = (
                find_folder(root, [pattern.format(folder).strip("/") for folder in folders])
                for folders in (IMAGE_FOLDERS, MASK_FOLDERS)
            )
            if images and masks:
                return images, masks
    return None


def _own_classes(root: Path, training: Sequence[Path] | None) -> list[str]:
    listed = root / "classes.txt"
    if listed.is_file():
        names = read_lines(listed)
        if not 1 < len(names) <= MAX_CLASSES:
            raise UserError(
                f"{listed} names {len(names)} classes; give 2 to {MAX_CLASSES}, one a line"
            )
        return names
    if training is None:
        pair = _own_folders(root, SPLITS["train"])
        training = image_files(pair[1]) if pair else []
    largest = -1
    for path in training:
        values = read_mask(path)
        largest = max(largest, int(values[values != IGNORE].max(initial=-1)))
        if largest > MAX_CLASSES:
            raise UserError(
                f"{path} has the value {largest}; classes are numbered from 0 to {MAX_CLASSES - 1}"
            )
    if largest < 1:
        raise UserError(
            f"the masks of {root} have one class only; give 2 to {MAX_CLASSES}, numbered from 0"
        )
    return [str(number) for number in range(largest + 1)]


FORMATS: dict[str, Callable[[str, Path], MaskedImages | None]] = {
    "masks": masks,
    "ade20k": ade20k,
    "camvid": camvid,
}


def open_masks(source: str, split: str, root: Path) -> MaskedImages | None:
    """Return the pairs of a split, train or test; None without such a split. Raises: UserError for missing files."""
    if not root.is_dir():
        raise UserError(f"data.root {root} is not a folder")
    return FORMATS[source](split, root)


def open_splits(
    source: str, root: Path, fraction: float | None
) -> tuple[MaskedImages, MaskedImages]:
    """Return training and test images; without test images, a `fraction` of the training images.

    Raises: UserError without training images, or without test images and a fraction.
    """
    train = open_masks(source, "train", root)
    test = open_masks(source, "test", root)
    if train is None:
        raise _missing(source, root, "training")
    if test is not None:
        if fraction is not None:
            raise UserError(f"{root} has test images of its own; leave data.split out")
        return train, test
    if fraction is None:
        raise UserError(f"{root} has no test images; give data.split=0.2, the fraction to test on")
    names = [files.image.relative_to(root).as_posix() for files in train.samples]
    places = np.array([hash_to_unit(name) for name in names])
    held_out = places < fraction
    if held_out.all() or not held_out.any():
        raise UserError(
            f"data.split {fraction:g} leaves no image on one side of {len(train)}; give another fraction"
        )
    train.split = (fraction, len(train))
    return train.subset(np.flatnonzero(~held_out)), train.subset(np.flatnonzero(held_out))


def open_test_pairs(
    source: str,
    root: Path,
    fraction: float | None,
    max_images: int | None,
    images: int | None = None,
) -> MaskedImages:
    """Return the test images of a data source, or evenly spaced ones of them.

    They are the part that training left out if `fraction` is given, of a folder that had this number of `images` then
    (it warns of another number), else the test images, else a whole folder of masks.

    Raises: UserError for an unknown source, or without test images.
    """
    if source not in FORMATS:
        raise UserError(f"data source {source!r} is unknown; choose one of {', '.join(FORMATS)}")
    pairs = None
    if fraction:
        pairs = _left_out_of_training(source, root, fraction, images)
    if pairs is None:
        pairs = open_masks(source, "test", root)
    if (
        pairs is None
        and source == "masks"
        and not any(_own_folders(root, names) for names in SPLITS.values())
    ):
        pairs = masks("train", root)
    if pairs is None:
        raise _missing(source, root, "test")
    if max_images is None:
        return pairs
    return pairs.subset(spaced_indices(np.zeros(len(pairs)), max_images))


def _left_out_of_training(
    source: str, root: Path, fraction: float, images: int | None
) -> MaskedImages | None:
    """Return the part of a folder that a split leaves out of training; None of a folder that cannot be split."""
    try:
        _, pairs = open_splits(source, root, fraction)
    except UserError:
        return None
    _, now = pairs.split or (fraction, images)
    if images is not None and images != now:
        message = (
            f"{root} has {now} images, it had {images} in training: the {len(pairs)} that a split "
            f"of {fraction:g} leaves out of training are used"
        )
        warnings.warn(message, DataWarning, stacklevel=3)
    return pairs


def _missing(source: str, root: Path, split: str) -> UserError:
    return UserError(
        f"{root} has no {split} images in the folders of the data source {source}; give the "
        "folder that has them"
    )
