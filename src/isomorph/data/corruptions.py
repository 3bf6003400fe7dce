"""Corrupted copies of a source: the same image always gets the same corruption, whatever the order or worker."""

import zlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from isomorph.data.sources import Source
from isomorph.errors import UserError

IMAGENET_C = [
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
]
"""The 15 corruptions of ImageNet-C; severities are its constants, also at 32 px (CIFAR-C has others)."""


class Altered(Source):
    """A source whose images are altered on the way, each by a draw of its own."""

    def __init__(self, inner: Source) -> None:
        super().__init__(inner.pictures, inner.labels, inner.classes, inner.shards)
        self.inner, self.ids = inner, inner.ids

    def subset(self, indices: Sequence[int] | np.ndarray) -> "Source":
        """The given images, altered as they are in the whole source."""
        part = super().subset(indices)
        part.inner = self.inner.subset(indices)  # type: ignore[attr-defined]
        return part


class Corrupted(Altered):
    """A source seen through one ImageNet-C corruption, seeded by image, corruption and severity.

    Raises: UserError for an unknown corruption or severity, an image under 32 px, or when the package is missing.
    """

    def __init__(self, inner: Source, corruption: str, severity: int) -> None:
        if corruption not in (*IMAGENET_C, "speckle_noise", "gaussian_blur", "spatter", "saturate"):
            raise UserError(f"corruption {corruption!r} is unknown; choose one of {', '.join(IMAGENET_C)}")
        if severity not in range(1, 6):
            raise UserError(f"severity {severity} is not in 1 to 5")
        super().__init__(inner)
        self.corruption, self.severity = corruption, severity

    def image(self, index: int) -> Image.Image:
        try:
            from imagecorruptions import corrupt
        except ImportError:
            raise UserError("corruptions need a package; pip install 'isomorph[corruptions]'") from None
        pixels = np.asarray(self.inner.image(index))
        if min(pixels.shape[:2]) < 32:
            raise UserError(
                f"corruptions need images of 32 px at least; image {index} is {pixels.shape[1]} x {pixels.shape[0]}"
            )
        seed = zlib.crc32(f"{self.corruption} {self.severity} {self.ids[index]}".encode())
        seeded = {"seed": seed} if self.corruption in ("glass_blur", "impulse_noise") else {}
        state = np.random.get_state()
        np.random.seed(seed)
        try:
            return Image.fromarray(corrupt(pixels, severity=self.severity, corruption_name=self.corruption, **seeded))
        finally:
            np.random.set_state(state)


class Noisy(Altered):
    """A source under white Gaussian noise; its standard deviation is a share of the full range. Needs no package."""

    def __init__(self, inner: Source, std: float) -> None:
        super().__init__(inner)
        self.std = std

    def image(self, index: int) -> Image.Image:
        pixels = np.asarray(self.inner.image(index)) / 255
        noise = np.random.default_rng(self.ids[index]).normal(0, self.std, pixels.shape)
        return Image.fromarray((np.clip(pixels + noise, 0, 1) * 255).astype(np.uint8))
