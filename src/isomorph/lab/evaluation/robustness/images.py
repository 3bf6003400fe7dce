"""The images of a robustness evaluation: clean ones to corrupt, or ImageNet-C, CIFAR-10-C, CIFAR-100-C as unpacked."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from isomorph.errors import UserError, first_line
from isomorph.json_values import JsonObject
from isomorph.lab.data.corruptions.corrupt import (
    CLEAN,
    CORRUPTION_VERSION,
    EXTRA_CORRUPTIONS,
    IMAGENET_C_CORRUPTIONS,
    IMAGENET_C_CROP,
    MIN_IMAGE_SIDE,
    SEVERITIES,
    SEVERITY_SCALE,
    CorruptedImages,
    check_corruption,
    corruption_functions,
    fingerprint,
    image_transform,
)
from isomorph.lab.data.formats.imagefolder import imagefolder
from isomorph.lab.data.formats.naming import visible
from isomorph.lab.data.imagenet_labels import with_imagenet_labels
from isomorph.lab.data.loaders import ImageConfig
from isomorph.lab.data.sources import Source, spaced_images
from isomorph.lab.distributed import ALONE, Runtime
from isomorph.lab.evaluation.classes import check_own_classes, class_count, shorten
from isomorph.lab.evaluation.model_data import with_model_labels
from isomorph.models.cifar_resnet import CIFAR10_CLASSES
from isomorph.models.input_sizes import (
    ImageSize,
    built_size,
    evaluation_config,
    image_size,
    input_channels,
    label_names,
)
from isomorph.spec import spec_of

PUBLISHED_SIZE = (224, 224)
ProgressCallback = Callable[[float, int, str], None]  # finished cells, all cells, corruption


@dataclass(frozen=True)
class RobustnessOptions:
    """What to measure, how, and the files of results; the fields are described at `iso.robustness`.

    >>> from isomorph.lab.evaluation.robustness.images import RobustnessOptions
    >>> RobustnessOptions(corruptions=["fog"], severities=[1, 3]).wanted()
    {'fog': (1, 3)}
    """

    suite: str = "imagenet-c"
    folder: str | Path | None = None
    corruptions: Sequence[str] | None = None
    severities: Sequence[int] = SEVERITIES
    extra: bool = False
    size: int | ImageSize | None = None
    seed: int = 0
    limit: int | None = None
    partial: bool = False
    batch_size: int = 100
    workers: int = 0
    out: str | Path | None = None
    baseline: str | Path | None = None
    name: str | None = None
    progress: ProgressCallback | None = None
    runtime: Runtime = ALONE

    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Return the severities of each corruption. Raises: UserError for an unknown one, or none."""
        names = list(IMAGENET_C_CORRUPTIONS if self.corruptions is None else self.corruptions)
        if self.extra:
            names += EXTRA_CORRUPTIONS
        if not names or not self.severities:
            raise UserError("there is nothing to do: give at least one corruption and one severity")
        for corruption in names:
            for severity in self.severities:
                check_corruption(corruption, severity)
        return dict.fromkeys(names, tuple(sorted(set(self.severities))))


class Published(NamedTuple):
    """A published data set. Its texts are part of the identity of saved results: they must not change.

    `cell(model, size, corruption, severity)` returns its images, with the labels of the model.
    """

    cell: Callable[[nn.Module, ImageSize | None, str, int], Source]
    pictures: str
    constants: str


def open_published(options: RobustnessOptions) -> Published | None:
    """Open the published data set of a suite; None without a folder.

    Raises: UserError for an unknown suite, the folder of another suite, no folder for cifar-c, or missing images.
    """
    suite = options.suite
    folder = options.folder
    if suite not in ("imagenet-c", "cifar-c"):
        raise UserError(f"suite {suite!r} is unknown; choose one of imagenet-c, cifar-c")
    if not folder:
        if suite == "cifar-c":
            raise UserError(
                "the suite cifar-c needs published images; give the folder of CIFAR-10-C or CIFAR-100-C"
            )
        return None
    root = Path(folder).expanduser()
    if not os.path.isdir(root):
        raise UserError(f"no folder {root}; give the one where {suite} is unpacked")
    if suite == "cifar-c":
        for corruption in options.wanted():
            _cifar_c_arrays(root, corruption)
        return Published(
            partial(_cifar_c, root),
            "published pictures in the model's own test crop",
            "CIFAR-C's constants",
        )
    if (root / "labels.npy").is_file():
        raise UserError(f"{folder} holds the arrays of CIFAR-C; choose the suite cifar-c")
    for corruption, severities in options.wanted().items():
        for severity in severities:
            _imagenet_c_folder(root, corruption, severity)
    return Published(partial(_imagenet_c, root), "published images, not cropped", SEVERITY_SCALE)


def _imagenet_c(
    root: Path, model: nn.Module, size: ImageSize | None, corruption: str, severity: int
) -> Source:
    """For 1000 classes, labels follow from the wnids, so classes may be missing; otherwise from the model's classes."""
    folder = _imagenet_c_folder(root, corruption, severity)
    source = imagefolder("test", folder)
    if class_count(model, size) == 1000:
        return with_imagenet_labels(source, str(folder))
    check_own_classes(model, source.classes, f" in {folder}", size=size)
    return with_model_labels(source, model)


def _imagenet_c_folder(root: Path, corruption: str, severity: int) -> Path:
    """Return CORRUPTION/SEVERITY, which holds WNID/*.JPEG, below the root or a category's folder in it (`noise`)."""
    for top in (root, *visible(root)):
        folder = top / corruption / str(severity)
        if folder.is_dir():
            return folder
    raise UserError(
        f"{root} has no folder {corruption}/{severity}; unpack it, or choose other `corruptions`"
    )


def _cifar_c(
    root: Path, model: nn.Module, size: ImageSize | None, corruption: str, severity: int
) -> Source:
    images, labels = _cifar_c_arrays(root, corruption)
    present = int(labels.max()) + 1
    count = len(labels) // len(SEVERITIES)
    num_classes = class_count(model, size)
    if present != num_classes:
        raise UserError(f"the images in {root} have {present} classes, the model has {num_classes}")
    part = slice((severity - 1) * count, severity * count)
    cell: Any = images[part]
    own = label_names(model)
    if num_classes != len(CIFAR10_CLASSES) or not own or all(map(str.isdigit, own)):
        return Source(cell, labels[part], map(str, range(num_classes)))
    if not set(own) >= set(CIFAR10_CLASSES):
        raise UserError(
            f"the model's classes ({shorten(own)}) are not CIFAR-10's ({shorten(CIFAR10_CLASSES)}), so their order is "
            "unknown; give a model whose classes have these names"
        )
    return with_model_labels(Source(cell, labels[part], CIFAR10_CLASSES), model)


def _cifar_c_arrays(root: Path, corruption: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images of severities 1 to 5 in turn, memory-mapped, and their labels.

    Shape: -> (5 n, H, W, 3) uint8, (5 n,)
    """
    arrays = []
    for path in (root / f"{corruption}.npy", root / "labels.npy"):
        try:
            arrays.append(np.load(path, mmap_mode="r", allow_pickle=False))
        except (ValueError, EOFError, OSError) as error:
            raise UserError(
                f"cannot read {path} as an array ({first_line(error)}); unpack CIFAR-10-C or "
                "CIFAR-100-C there"
            ) from None
    images, labels = arrays
    are_images = images.ndim == 4 and images.shape[3] == 3 and images.dtype == np.uint8
    fits = len(images) == len(labels) and len(images) % 5 == 0
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not len(labels) or labels.min() < 0:
        raise UserError(
            f"{root}/labels.npy must hold one class index, from 0, for each image; unpack it again"
        )
    if not are_images or not fits:
        raise UserError(
            f"{root / corruption}.npy has shape {' x '.join(map(str, images.shape))} of "
            f"{images.dtype}; it must be N x height x width x 3 of uint8, with N a multiple of 5 "
            f"and equal to the {len(labels)} labels"
        )
    return images, labels


@dataclass(frozen=True)
class RobustnessInputs:
    """The images that a model is evaluated on: clean ones, published ones, the data config and the options."""

    model: nn.Module
    source: Source | None
    published: Published | None
    config: ImageConfig
    num_classes: int
    options: RobustnessOptions

    @property
    def size(self) -> ImageSize:
        """Height and width of the images."""
        height, width = self.config["input_size"][-2:]
        return height, width

    def identity(self) -> JsonObject:
        """Return what must be equal for two results to be comparable; the text of `pictures` must not change."""
        if self.published:
            source = f"published {Path(self.options.folder or '').expanduser().resolve()}"
            pictures = self.published.pictures
            constants = self.published.constants
        else:
            assert self.source is not None
            source = fingerprint(self.source)
            crop = "shorter side to 256/224 of the size, middle cut out"
            if self.num_classes != 1000:
                config = self.config
                crop = (
                    f"the model's own test crop ({config['crop_pct']}, {config['crop_mode']}, "
                    f"{config['interpolation']})"
                )
            pictures = f"{crop}, {self.size[1]} x {self.size[0]} px, then corrupted"
            constants = SEVERITY_SCALE
            if self.size != PUBLISHED_SIZE:
                constants += " at every size, not CIFAR-10-C's milder ones"
        return {
            "suite": self.options.suite,
            "version": CORRUPTION_VERSION,
            "source": source,
            "limit": self.options.limit,
            "size": list(self.size),
            "seed": self.options.seed,
            "pictures": pictures,
            "constants": constants,
        }

    def groups(self, corruption: str, severities: Sequence[int]) -> Iterator[CorruptedImages]:
        """Yield the images of a corruption (or `CLEAN`), severities together or, of published folders, one by one."""
        if corruption == CLEAN or not self.published:
            if self.source is not None:
                crop = image_transform(self.config)
                applied = None if corruption == CLEAN else corruption
                yield CorruptedImages(self.source, crop, applied, severities, self.options.seed)
            return
        config = dict(self.config)
        if self.options.suite == "imagenet-c":
            config["crop_pct"] = 1.0
        for severity in severities:
            cell = self.published.cell(self.model, self.size, corruption, severity)
            cell = spaced_images(cell, self.options.limit)
            yield CorruptedImages(cell, image_transform(config), None, (severity,))


def open_inputs(
    model: nn.Module, source: Source | None, options: RobustnessOptions
) -> RobustnessInputs:
    """Return the images for a model; for a model of 1000 classes, with ImageNet's labels by class name.

    Raises: UserError when classes, channels or sizes do not fit, or published images are missing.
    """
    published = open_published(options)
    size = None if options.size is None else image_size(options.size)
    if source is None and published is None:
        raise UserError("give a source of clean images, or the folder of a published data set")
    num_classes = class_count(model, size)
    imagenet = num_classes == 1000
    if source is not None:
        if not imagenet:
            source = with_model_labels(source, model)
            check_own_classes(model, source.classes, more="", size=size)
        else:
            if not options.partial:
                hint = ", or partial=True to use a part of ImageNet's classes"
                check_own_classes(model, source.classes, more=hint, size=size)
            source = with_imagenet_labels(source, "the data")
        source = spaced_images(source, options.limit)
    channels = input_channels(model)
    if channels != 3:
        raise UserError(f"the corruptions need images of 3 channels, the model takes {channels}")
    if size is None:
        fixed = spec_of(model).config.get("fixed_input_size") or built_size(model)
        if imagenet and not fixed:
            size = PUBLISHED_SIZE
        else:
            size = evaluation_config(model)["input_size"][-2:]
        if published and not (imagenet or fixed or options.suite == "cifar-c"):
            corruption, severities = next(iter(options.wanted().items()))
            width, height = published.cell(model, None, corruption, severities[0]).image(0).size
            size = height, width
    config = evaluation_config(model, (size[0], size[1]))
    if imagenet:
        config |= IMAGENET_C_CROP
    if published and imagenet and tuple(size) != PUBLISHED_SIZE:
        raise UserError(
            f"the published images are 224 x 224, the model needs {size[1]} x {size[0]}, and resizing would change the "
            "corruptions; give a source and no folder to corrupt images at that size"
        )
    if min(size) < MIN_IMAGE_SIDE:
        raise UserError(
            f"corruptions need images of {MIN_IMAGE_SIDE} px at least, and the model's input is {size[1]} x {size[0]}; "
            f"give a larger size, for example size={MIN_IMAGE_SIDE}"
        )
    if not published:
        corruption_functions()  # raises now, not after hours, if their package is missing
    return RobustnessInputs(model, source, published, config, num_classes, options)
