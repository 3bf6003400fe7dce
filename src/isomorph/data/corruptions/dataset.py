"""Data sets and loaders of corrupted images at the model's input size."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from isomorph.data.corruptions.corrupt import MIN_IMAGE_SIDE, corrupt, corruption_seed
from isomorph.data.loaders import IsolatedDataLoader, batch_ranges, eval_transform, ignore_stop_signals
from isomorph.data.sources import Source
from isomorph.errors import UserError

ImageTransform = Callable[[Image.Image], Image.Image]
CLEAN = "clean"
"""Name of the images without corruption, at severity 0."""
IMAGENET_C_CROP = dict(crop_pct=224 / 256, crop_mode="center", interpolation="bilinear")
"""The crop of ImageNet-C's files before corruption: shorter side to 256, bilinear, then the central 224 x 224."""


def image_transform(config: Mapping[str, Any]) -> ImageTransform:
    """Return the part of the test transform that resizes and crops images, without conversion to tensors."""
    steps = eval_transform(config).transforms  # type: ignore[attr-defined]
    image_steps = [step for step in steps if not type(step).__name__.endswith(("ToTensor", "Normalize"))]
    return transforms.Compose(image_steps)


class CorruptedImages(Dataset[tuple[Tensor, int]]):
    """The images of a source, cropped and then under several severities of one corruption (`clean`: uncorrupted).

    Shape: [i] -> (severities, 3, H, W) uint8, label
    Raises: UserError for an image under 32 px.
    """

    def __init__(
        self,
        source: Source,
        crop: ImageTransform,
        corruption: str = CLEAN,
        severities: Sequence[int] = (0,),
        seed: int = 0,
    ) -> None:
        self.source, self.crop, self.seed = source, crop, seed
        self.corruption, self.severities = corruption, tuple(severities)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.asarray(self.crop(self.source.image(index)))
        if self.corruption == CLEAN:
            versions = [pixels]
        else:
            identity = int(self.source.ids[index])
            seeds = (corruption_seed(self.corruption, severity, identity, self.seed) for severity in self.severities)
            versions = [corrupt(pixels, self.corruption, *draw) for draw in zip(self.severities, seeds, strict=True)]
        return torch.from_numpy(np.stack(versions)).permute(0, 3, 1, 2), int(self.source.labels[index])


def image_loader(
    images: Dataset[tuple[Tensor, int]], batch: int, workers: int, batches: slice = slice(None)
) -> DataLoader[Any]:
    """Return a loader of batches in order, or of some of them. Shape: -> (B, severities, 3, H, W) uint8, (B,)"""
    if workers:
        _limit_opencv_threads()
    return IsolatedDataLoader(
        images,
        batch_sampler=batch_ranges(len(images), batch)[batches],  # type: ignore[arg-type]
        num_workers=workers,
        worker_init_fn=ignore_stop_signals,
        pin_memory=torch.cuda.is_available(),
    )


def _limit_opencv_threads() -> None:
    """Limit OpenCV to one thread: workers already use all cores, and one forked next to OpenCV's threads hangs."""
    try:
        import cv2
    except ImportError:  # published and cached images do not need it
        return
    cv2.setNumThreads(1)


def fingerprint(source: Source) -> str:
    """Return a hash of a source: of labels, ids, classes, and the pixels of its first, middle and last image."""
    if not len(source):
        raise UserError("there is nothing to evaluate: the source has no image")
    digest = hashlib.sha256("\n".join(source.classes).encode())
    digest.update(np.asarray(source.labels, np.int64).tobytes() + np.asarray(source.ids, np.int64).tobytes())
    for index in sorted({0, len(source) // 2, len(source) - 1}):
        digest.update(np.asarray(source.image(index)).tobytes())
    return digest.hexdigest()[:16]


def check_input_size(config: Mapping[str, Any]) -> None:
    """Raise a UserError when the model's input size is too small for corruptions."""
    height, width = config["input_size"][-2:]
    if min(height, width) < MIN_IMAGE_SIDE:
        raise UserError(
            f"corruptions need images of {MIN_IMAGE_SIDE} px at least, and the model's input is {width} x {height}; "
            f"give a larger size, for example --size {MIN_IMAGE_SIDE}"
        )
