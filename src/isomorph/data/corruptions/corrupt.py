"""Corrupted copies of a source: the same image always gets the same corruption, whatever the order or worker.

What is drawn follows ImageNet-C's own code, checked against its output (docs/robustness.md): isomorph's own form of a
corruption where imagecorruptions draws something else or is slow, imagecorruptions' for the rest.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.random import RandomState
from PIL import Image

from isomorph.data.sources import Source
from isomorph.errors import UserError

CORRUPTION_CATEGORIES: dict[str, tuple[str, ...]] = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
"""ImageNet-C's four categories."""
IMAGENET_C_CORRUPTIONS = [name for names in CORRUPTION_CATEGORIES.values() for name in names]
"""The 15 corruptions of ImageNet-C; severities are its constants, also at 32 px (CIFAR-C has others)."""
EXTRA_CORRUPTIONS = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""Its four further corruptions, for validation; no part of its means."""
SEVERITIES = (1, 2, 3, 4, 5)
SEVERITY_SCALE = "ImageNet-C's constants"
MIN_IMAGE_SIDE = 32
CORRUPTION_VERSION = 2
"""Counts up when a corruption draws other pixels than before: stored results and pictures are then of another kind."""

Corruption = Callable[[np.ndarray, int, RandomState], np.ndarray]


def corrupt(pixels: np.ndarray, corruption: str, severity: int, seed: int) -> np.ndarray:
    """The picture under one corruption, a function of its arguments alone.

    Shape: (H, W, 3) uint8 -> (H, W, 3) uint8
    Raises: UserError when the package is missing, or for a picture under 32 px.
    """
    if min(pixels.shape[:2]) < MIN_IMAGE_SIDE:
        size = f"{pixels.shape[1]} x {pixels.shape[0]}"
        raise UserError(f"corruptions need images of {MIN_IMAGE_SIDE} px at least; this one is {size}")
    package, own = corruption_functions()
    if corruption in own:
        return own[corruption](pixels, severity, RandomState(seed))
    seeded = {"seed": seed} if corruption == "impulse_noise" else {}  # has a stream of its own
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        return package(pixels, severity=severity, corruption_name=corruption, **seeded)
    finally:
        np.random.set_state(state)


@lru_cache(1)
def corruption_functions() -> tuple[Callable[..., np.ndarray], Mapping[str, Corruption]]:
    """imagecorruptions' function, and isomorph's own by name. Raises: UserError when the package is missing."""
    try:
        from imagecorruptions import corrupt as package

        from isomorph.data.corruptions import blur as corruptions_blur
        from isomorph.data.corruptions import digital as corruptions_digital
        from isomorph.data.corruptions import weather as corruptions_weather
    except ImportError as error:
        broken = "" if isinstance(error, ModuleNotFoundError) else f" ({str(error).splitlines()[0]})"
        raise UserError(f"corruptions need a package; pip install 'isomorph[corruptions]'{broken}") from None
    rooms = (corruptions_blur, corruptions_digital, corruptions_weather)
    return package, {
        name: getattr(room, name)
        for name in (*IMAGENET_C_CORRUPTIONS, *EXTRA_CORRUPTIONS)
        for room in rooms
        if hasattr(room, name)
    }


def corruption_seed(corruption: str, severity: int, identity: int, seed: int = 0) -> int:
    """The seed of one image's corruption; `identity` is its place in the whole source."""
    return zlib.crc32(f"{seed} {corruption} {severity} {identity}".encode())


def check_corruption(corruption: str, severity: int = 1) -> None:
    """Raises: UserError for an unknown corruption, with the closest name, or severity."""
    known = (*IMAGENET_C_CORRUPTIONS, *EXTRA_CORRUPTIONS)
    if corruption not in known:
        close = get_close_matches(corruption, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}"
        raise UserError(f"corruption {corruption!r} is unknown; {hint}")
    if severity not in SEVERITIES:
        raise UserError(f"severity {severity} is not in 1 to 5")


class _AlteredSource(Source):
    """A source whose images are altered on the way, each by a draw of its own."""

    def __init__(self, inner: Source) -> None:
        super().__init__(inner.pictures, inner.labels, inner.classes, inner.shards)
        self.inner, self.ids = inner, inner.ids

    def subset(self, indices: Sequence[int] | np.ndarray) -> "Source":
        """The given images, altered as they are in the whole source."""
        part: Any = super().subset(indices)
        part.inner = self.inner.subset(indices)
        return part


class CorruptedSource(_AlteredSource):
    """A source seen through one ImageNet-C corruption, seeded by image, corruption and severity.

    Raises: UserError for an unknown corruption or severity, an image under 32 px, or when the package is missing.
    """

    def __init__(self, inner: Source, corruption: str, severity: int, seed: int = 0) -> None:
        check_corruption(corruption, severity)
        super().__init__(inner)
        self.corruption, self.severity, self.seed = corruption, severity, seed

    def image(self, index: int) -> Image.Image:
        seed = corruption_seed(self.corruption, self.severity, int(self.ids[index]), self.seed)
        return Image.fromarray(corrupt(np.asarray(self.inner.image(index)), self.corruption, self.severity, seed))


class NoisySource(_AlteredSource):
    """A source under white Gaussian noise; its standard deviation is a share of the full range. Needs no package."""

    def __init__(self, inner: Source, std: float) -> None:
        super().__init__(inner)
        self.std = std

    def image(self, index: int) -> Image.Image:
        pixels = np.asarray(self.inner.image(index)) / 255
        noise = np.random.default_rng(self.ids[index]).normal(0, self.std, pixels.shape)
        return Image.fromarray((np.clip(pixels + noise, 0, 1) * 255).astype(np.uint8))
