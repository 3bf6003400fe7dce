"""Corrupted copies of images; the corruption of an image depends on neither order nor worker.

They follow ImageNet-C's code (docs/robustness.md compares), where the package imagecorruptions differs or is slow.
"""

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from types import ModuleType

import numpy as np
import torch
from numpy.random import RandomState
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import transforms

from isomorph.errors import UserError, did_you_mean, first_line, install_hint
from isomorph.lab.data.loaders import ImageConfig, eval_transform
from isomorph.lab.data.sources import Source

CORRUPTION_CATEGORIES: dict[str, tuple[str, ...]] = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
# The 15 corruptions of ImageNet-C. Severities use its constants, also at 32 px, where CIFAR-10-C has others.
IMAGENET_C_CORRUPTIONS = list(chain.from_iterable(CORRUPTION_CATEGORIES.values()))
# ImageNet-C's four extra corruptions for validation; its means leave them out.
EXTRA_CORRUPTIONS = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
_CORRUPTIONS = (*IMAGENET_C_CORRUPTIONS, *EXTRA_CORRUPTIONS)
SEVERITIES = (1, 2, 3, 4, 5)
SEVERITY_SCALE = "ImageNet-C's constants"
MIN_IMAGE_SIDE = 32
CLEAN = "clean"  # name of the images without corruption, at severity 0
CORRUPTION_VERSION = (
    3  # increased when pixels change: results and cached images of other versions are not reused
)


def corrupt(pixels: np.ndarray, corruption: str, severity: int, seed: int) -> np.ndarray:
    """Return an image under one of ImageNet-C's corruptions, at severity 1 to 5; the seed makes it reproducible.

    Shape: (H, W, 3) uint8 -> (H, W, 3) uint8
    Source: Hendrycks and Dietterich 2019 (ImageNet-C)
    Raises: UserError for an unknown corruption or severity, an image under 32 px, or without imagecorruptions.

    >>> pixels = torch.full((32, 32, 3), 128, dtype=torch.uint8).numpy()
    >>> iso.data.corrupt(pixels, "brightness", severity=3, seed=0)[0, 0].tolist()
    [204, 204, 204]
    """
    check_corruption(corruption, severity)
    if min(pixels.shape[:2]) < MIN_IMAGE_SIDE:
        raise UserError(
            f"corruptions need images of {MIN_IMAGE_SIDE} px at least; this one is "
            f"{pixels.shape[1]} x {pixels.shape[0]}"
        )
    package, own_functions = corruption_functions()
    own = getattr(own_functions, corruption, None)
    if own:
        return own(pixels, severity, RandomState(seed))
    # it has its own random generator
    seeded = {"seed": seed} if corruption == "impulse_noise" else {}
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        with np.errstate(invalid="raise"):
            return package(pixels, severity=severity, corruption_name=corruption, **seeded)
    except (
        FloatingPointError
    ):  # spatter divides by its brightest drop, and a small image may have none
        return pixels.copy()
    finally:
        np.random.set_state(state)


@lru_cache(1)
def corruption_functions() -> tuple[Callable[..., np.ndarray], ModuleType]:
    """Return imagecorruptions' function, and isomorph's own in a module. Raises: UserError without the package."""
    try:
        from imagecorruptions import corrupt as package

        from isomorph.lab.data.corruptions import imagenet_c
    except ImportError as error:
        raise UserError(
            f"corruptions need the package imagecorruptions ({first_line(error)}); "
            f"{install_hint('corruptions')}"
        ) from None
    return package, imagenet_c


def corruption_seed(corruption: str, severity: int, identity: int, seed: int = 0) -> int:
    """Return the seed of one image's corruption; `identity` is the image's index in the whole source."""
    return zlib.crc32(f"{seed} {corruption} {severity} {identity}".encode())


def check_corruption(corruption: str, severity: int = 1) -> None:
    """Raise a UserError for an unknown corruption, with the closest name, or an unknown severity."""
    if corruption not in _CORRUPTIONS:
        otherwise = f"choose one of {', '.join(_CORRUPTIONS)}"
        hint = did_you_mean(corruption, _CORRUPTIONS, otherwise)
        raise UserError(f"corruption {corruption!r} is unknown; {hint}")
    if severity not in SEVERITIES:
        raise UserError(f"severity {severity} is not in 1 to 5")


ImageTransform = Callable[[Image.Image], Image.Image]
# of ImageNet-C's files
IMAGENET_C_CROP = dict(crop_pct=224 / 256, crop_mode="center", interpolation="bilinear")


def image_transform(config: ImageConfig) -> ImageTransform:
    """Return the part of the test transform that resizes and crops images, without conversion to tensors."""
    steps = eval_transform(config).transforms  # type: ignore[attr-defined]
    return transforms.Compose(
        [s for s in steps if not type(s).__name__.endswith(("ToTensor", "Normalize"))]
    )


@dataclass(frozen=True)
class CorruptedImages(Dataset[tuple[Tensor, int]]):
    """The images of a source, cropped and then under several severities of one corruption; uncorrupted for None.

    Shape: [i] -> (severities, 3, H, W) uint8, label
    Raises: UserError for an image under 32 px.
    """

    source: Source
    crop: ImageTransform
    corruption: str | None = None
    severities: Sequence[int] = (0,)
    seed: int = 0

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.asarray(self.crop(self.source.image(index)))
        versions = [pixels]
        if self.corruption:
            identity = int(self.source.ids[index])
            versions = []
            for severity in self.severities:
                seed = corruption_seed(self.corruption, severity, identity, self.seed)
                versions.append(corrupt(pixels, self.corruption, severity, seed))
        return torch.from_numpy(np.stack(versions)).permute(0, 3, 1, 2), int(
            self.source.labels[index]
        )


def fingerprint(source: Source) -> str:
    """Return a hash of a source: of labels, ids, classes, and the pixels of its first, middle and last image."""
    if not len(source):
        raise UserError("there is nothing to evaluate: the source has no image")
    names = "\n".join(source.classes)
    digest = hashlib.sha256(names.encode("utf-8", "surrogatepass"))
    digest.update(
        np.asarray(source.labels, np.int64).tobytes() + np.asarray(source.ids, np.int64).tobytes()
    )
    for index in sorted({0, len(source) // 2, len(source) - 1}):
        digest.update(np.asarray(source.image(index)).tobytes())
    return digest.hexdigest()[:16]
