"""Joint augmentation of images and masks, as transforms of torchvision (v2): resizing, cropping, flips and colours.

All random numbers come from torch's global generator, which the loader seeds for every sample.

Source: the pipelines of G2SD's code for ADE20K (mmsegmentation's), see docs/decisions/014
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F
from torchvision.transforms.v2 import query_size

from isomorph.tasks.segmentation.fields import SegmentationPart
from isomorph.tasks.segmentation.images import IGNORE, Pair

CROP_ATTEMPTS = 10
"""Crops that are tried until no class has too large a share."""


def _uniform(low: float, high: float) -> float:
    """Draw a number from torch's global generator."""
    return low + (high - low) * torch.rand(()).item()


def scaled_size(size: tuple[int, int], limits: Sequence[float]) -> tuple[int, int]:
    """Return height and width, enlarged or reduced until the longest or the shortest side reaches its limit."""
    longest, shortest = limits
    factor = min(longest / max(size), shortest / min(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


class RatioResize(v2.Transform):
    """Resize to at most `resize` (longest, shortest side; None: the image's own size) times a factor drawn evenly."""

    def __init__(self, resize: Sequence[int] | None, ratio: tuple[float, float]) -> None:
        super().__init__()
        self.resize, self.ratio = resize, ratio

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = query_size(flat_inputs)
        factor = _uniform(*self.ratio)
        limits = self.resize or (max(height, width), min(height, width))
        return {"size": scaled_size((height, width), [factor * limit for limit in limits])}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return F.resize(inpt, list(params["size"]), antialias=True)  # of a mask, the nearest pixel


class CappedCrop(v2.Transform):
    """Crop at random, preferring crops of several classes in which none has more than a share of the pixels.

    An image that is smaller in a direction is kept whole in it.
    """

    def __init__(self, size: Sequence[int], share: float) -> None:
        super().__init__()
        self.size, self.share = size, share

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        sides = query_size(flat_inputs)
        height, width = (min(side, limit) for side, limit in zip(sides, self.size, strict=True))
        mask = next((each for each in flat_inputs if isinstance(each, tv_tensors.Mask)), None)
        for _ in range(CROP_ATTEMPTS):
            top, left = (
                int(torch.randint(0, side - own + 1, ())) for side, own in zip(sides, (height, width), strict=True)
            )
            box = dict(top=top, left=left, height=height, width=width)
            if self.share >= 1 or mask is None:
                break
            part = mask[top : top + height, left : left + width]
            counts = torch.bincount(part[part != IGNORE])
            if (counts > 0).sum() > 1 and counts.max() < self.share * counts.sum():
                break
        return box

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return F.crop(inpt, **params)


class Photometric(v2.Transform):
    """Change brightness (by up to 32 of 255), contrast and saturation (.5 to 1.5) and hue (.1), each at odds of .5.

    Contrast is a factor on all values, applied before or after the colours.

    Source: PhotoMetricDistortion of mmsegmentation; differs: saturation blends with grey instead of scaling HSV
    """

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        def maybe(low: float, high: float) -> float | None:
            value, drawn = _uniform(low, high), torch.rand(()).item() < 0.5
            return value if drawn else None

        return {
            "brightness": maybe(-32 / 255, 32 / 255),
            "contrast": maybe(0.5, 1.5),
            "contrast_first": torch.rand(()).item() < 0.5,
            "saturation": maybe(0.5, 1.5),
            "hue": maybe(-0.1, 0.1),
        }

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        if not isinstance(inpt, tv_tensors.Image):
            return inpt
        x = F.to_dtype(inpt, torch.float32, scale=True)
        if params["brightness"] is not None:
            x = (x + params["brightness"]).clamp(0, 1)
        steps = {"saturation": F.adjust_saturation, "hue": F.adjust_hue}
        contrast = {"contrast": F.adjust_brightness}
        for name, adjust in ({**contrast, **steps} if params["contrast_first"] else {**steps, **contrast}).items():
            x = x if params[name] is None else adjust(x, params[name])
        return tv_tensors.Image(x)


class PadTo(v2.Transform):
    """Pad to a size, right and below: images with 0, the mean colour once they are normalised, masks with IGNORE."""

    def __init__(self, size: Sequence[int]) -> None:
        super().__init__()
        self.size = size

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = query_size(flat_inputs)
        return {"padding": [0, 0, max(0, self.size[1] - width), max(0, self.size[0] - height)]}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        fill = IGNORE if isinstance(inpt, tv_tensors.Mask) else 0
        return F.pad(inpt, params["padding"], fill=fill) if any(params["padding"]) else inpt


class TrainTransform:
    """Augment a pair. Shape: (3, H, W) uint8, (H, W) -> (3, *crop) float32, normalised, (*crop) int64"""

    def __init__(self, part: SegmentationPart, mean: Sequence[float], std: Sequence[float]) -> None:
        geometry = [RatioResize(part.resize, part.ratio), CappedCrop(part.crop, part.category_share)]
        colours = [Photometric()] if part.photometric else []
        numbers = [v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True), v2.Normalize(mean, std)]
        self.steps = v2.Compose([*geometry, v2.RandomHorizontalFlip(part.hflip), *colours, *numbers, PadTo(part.crop)])

    def __call__(self, pair: Pair) -> tuple[Tensor, Tensor]:
        image, mask = self.steps(pair.image, pair.mask)
        return image.as_subclass(Tensor), mask.as_subclass(Tensor)


class TestTransform:
    """Resize and normalise an image; its mask stays as it is. Shape: (3, H, W), (H, W) -> (3, h, w), (H, W)"""

    __test__ = False

    def __init__(self, resize: Sequence[int] | None, mean: Sequence[float], std: Sequence[float]) -> None:
        self.resize, self.mean, self.std = resize, list(mean), list(std)

    def image(self, image: Tensor) -> Tensor:
        """Return an image as the network reads it. Shape: (3, H, W) uint8 -> (3, h, w)"""
        if self.resize:
            size = scaled_size((image.shape[-2], image.shape[-1]), self.resize)
            image = F.resize(image, list(size), antialias=True)
        return F.normalize(F.to_dtype(image, torch.float32, scale=True), self.mean, self.std).as_subclass(Tensor)

    def __call__(self, pair: Pair) -> tuple[Tensor, Tensor]:
        return self.image(pair.image), pair.mask.as_subclass(Tensor)
