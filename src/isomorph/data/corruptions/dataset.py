"""From a source to corrupted pictures as the model will see them: framed, corrupted, then left alone."""

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
from isomorph.data.loaders import IsolatedDataLoader, eval_transform, ignore_stop_signals
from isomorph.data.sources import Source
from isomorph.errors import UserError

ImageTransform = Callable[[Image.Image], Image.Image]
CLEAN = "clean"
IMAGENET_C_CROP = dict(crop_pct=224 / 256, crop_mode="center", interpolation="bilinear")
"""How ImageNet-C was made: the shorter side to 256, bilinear, the middle 224 x 224 cut out, then corrupted."""


def image_transform(config: Mapping[str, Any]) -> ImageTransform:
    """The part of the transform for testing that makes pictures of the model's size, without what makes tensors."""
    steps = eval_transform(config).transforms  # type: ignore[attr-defined]
    kept = [step for step in steps if not type(step).__name__.endswith(("ToTensor", "Normalize"))]
    return transforms.Compose(kept)


class CorruptedImages(Dataset[tuple[Tensor, int]]):
    """The framed images of a source, each at several severities of one corruption (of `clean`: severity 0, as it is).

    Shape: [i] -> (severities, 3, H, W) uint8, label
    Raises: UserError for a picture under 32 px.
    """

    def __init__(
        self,
        source: Source,
        frame: ImageTransform,
        corruption: str = CLEAN,
        severities: Sequence[int] = (0,),
        seed: int = 0,
    ) -> None:
        self.source, self.frame, self.seed = source, frame, seed
        self.corruption, self.severities = corruption, tuple(severities)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.asarray(self.frame(self.source.image(index)))
        if self.corruption == CLEAN:
            seen = [pixels]
        else:
            identity = int(self.source.ids[index])
            seeds = (corruption_seed(self.corruption, severity, identity, self.seed) for severity in self.severities)
            seen = [corrupt(pixels, self.corruption, *draw) for draw in zip(self.severities, seeds, strict=True)]
        return torch.from_numpy(np.stack(seen)).permute(0, 3, 1, 2), int(self.source.labels[index])


def image_loader(pictures: Dataset[tuple[Tensor, int]], batch: int, workers: int) -> DataLoader[Any]:
    """Batches in order. Shape: -> (B, severities, 3, H, W) uint8, (B,)"""
    if workers:
        _limit_opencv_threads()
    pinned = torch.cuda.is_available()
    return IsolatedDataLoader(
        pictures, batch, num_workers=workers, worker_init_fn=ignore_stop_signals, pin_memory=pinned
    )


def _limit_opencv_threads() -> None:
    """Ends OpenCV's threads: workers share the cores out among themselves, and one forked beside such threads hangs."""
    try:
        import cv2
    except ImportError:  # published or stored pictures need none
        return
    cv2.setNumThreads(1)


def fingerprint(source: Source) -> str:
    """What tells a source from another: labels, places, classes, and the pixels of its first, middle and last image."""
    if not len(source):
        raise UserError("there is nothing to evaluate: the source has no image")
    known = hashlib.sha256("\n".join(source.classes).encode())
    known.update(np.asarray(source.labels, np.int64).tobytes() + np.asarray(source.ids, np.int64).tobytes())
    for index in sorted({0, len(source) // 2, len(source) - 1}):
        known.update(np.asarray(source.image(index)).tobytes())
    return known.hexdigest()[:16]


def check_input_size(config: Mapping[str, Any]) -> None:
    """Raises: UserError when the model sees pictures too small to be corrupted."""
    height, width = config["input_size"][-2:]
    if min(height, width) < MIN_IMAGE_SIDE:
        raise UserError(f"corruptions need pictures of {MIN_IMAGE_SIDE} px at least; the model sees {width} x {height}")
