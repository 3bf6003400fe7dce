"""Corrupted copies of a source: the same image always gets the same corruption, whatever the order or worker."""

import zlib

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


class Corrupted(Source):
    """A source seen through one ImageNet-C corruption, seeded by image, corruption and severity.

    Raises: UserError for an unknown corruption or severity, or when the package behind it is missing.
    """

    def __init__(self, source: Source, corruption: str, severity: int) -> None:
        if corruption not in (*IMAGENET_C, "speckle_noise", "gaussian_blur", "spatter", "saturate"):
            raise UserError(f"corruption {corruption!r} is unknown; choose one of {', '.join(IMAGENET_C)}")
        if severity not in range(1, 6):
            raise UserError(f"severity {severity} is not in 1 to 5")
        super().__init__(source.pictures, source.labels, source.classes)
        self.corruption, self.severity = corruption, severity

    def image(self, index: int) -> Image.Image:
        try:
            from imagecorruptions import corrupt
        except ImportError:
            raise UserError("corruptions need a package; pip install 'isomorph[corruptions]'") from None
        seed = zlib.crc32(f"{self.corruption} {self.severity} {index}".encode())
        seeded = {"seed": seed} if self.corruption in ("glass_blur", "impulse_noise") else {}
        state = np.random.get_state()
        np.random.seed(seed)
        try:
            pixels = np.asarray(super().image(index))
            return Image.fromarray(corrupt(pixels, severity=self.severity, corruption_name=self.corruption, **seeded))
        finally:
            np.random.set_state(state)


class Noisy(Source):
    """A source under white Gaussian noise; its standard deviation is a share of the full range. Needs no package."""

    def __init__(self, source: Source, std: float) -> None:
        super().__init__(source.pictures, source.labels, source.classes)
        self.std = std

    def image(self, index: int) -> Image.Image:
        pixels = np.asarray(super().image(index)) / 255
        noise = np.random.default_rng(index).normal(0, self.std, pixels.shape)
        return Image.fromarray((np.clip(pixels + noise, 0, 1) * 255).astype(np.uint8))
