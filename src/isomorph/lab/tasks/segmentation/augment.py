"""Options of segmentation, and joint augmentation of images and masks as transforms of torchvision (v2).

All random numbers come from torch's global generator, which the loader seeds for every sample.

Source: the pipelines of G2SD's code for ADE20K (mmsegmentation's), see docs/decisions/014
"""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, model_validator
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F
from torchvision.transforms.v2 import query_size

from isomorph.lab.tasks.image_sets import normalised, resize_masks
from isomorph.lab.tasks.segmentation.data import IGNORE, Pair
from isomorph.lab.training.recipe.fields import (
    File,
    Fraction,
    NotNegative,
    Part,
    Positive,
    Probability,
    Size,
    both_sides,
)
from isomorph.spec import ImageSize

# Two sizes in pixels; one number stands for both.
Sides = Annotated[tuple[Size, Size], BeforeValidator(both_sides)]


# What a transform has drawn, once for an image and its mask.
Params = dict[str, Any]


class SegmentationPart(Part):
    """Semantic segmentation: a class for every pixel."""

    crop: Sides = (512, 512)
    """Height and width of the crops to train on, and of the windows to test with, e.g. 512,512."""
    resize: Sides | None = (2048, 512)
    """Longest and shortest side that images are resized to, keeping their proportions; null keeps their size."""
    ratio: tuple[Positive, Positive] = (0.5, 2.0)
    """Smallest and largest factor on that size, drawn for every training image."""
    category_share: Fraction = 0.75
    """Largest share of a training crop that one class should have; ten crops are tried."""
    hflip: Probability = 0.5
    """Probability of a horizontal flip."""
    photometric: bool = True
    """Change brightness, contrast, saturation and hue of training images, each with probability 0.5."""
    stride: Sides | None = None
    """Distance of the test windows in height and width, whose logits are averaged where they overlap; by default two
    thirds of crop."""
    auxiliary_weight: NotNegative = 0.4
    """Weight of the loss of the auxiliary head, if the network has one."""
    teacher: str | None = None
    """Network that was trained on the same classes, whose logits the network also learns: a checkpoint, or a run."""
    teacher_weights: File | None = None
    """File with the weights of a teacher that is given as a timm model."""
    distill_weight: Positive = 10.0
    """Weight of the distillation; 3 in the run script of G2SD's code, 10 in its config."""
    temperature: Positive = 1.0
    """Temperature of the softmax over positions in the distillation."""

    @model_validator(mode="after")
    def check_fields(self) -> "SegmentationPart":
        if self.ratio[0] > self.ratio[1]:
            raise ValueError("ratio must have the smaller factor first")
        if self.resize and self.resize[0] < self.resize[1]:
            raise ValueError("resize must have the longest side first, like 2048,512")
        if self.stride and any(
            step > side for step, side in zip(self.stride, self.crop, strict=True)
        ):
            raise ValueError(
                f"stride {self.stride} must not be above crop {self.crop}, or windows leave gaps"
            )
        if self.teacher_weights and not self.teacher:
            raise ValueError("teacher_weights needs teacher, the name of a timm model; give both")
        return self

    @property
    def test_stride(self) -> ImageSize:
        return self.stride or (max(1, self.crop[0] * 2 // 3), max(1, self.crop[1] * 2 // 3))


CROP_ATTEMPTS = 10


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * torch.rand(()).item()


def scaled_size(size: ImageSize, limits: Sequence[float]) -> ImageSize:
    """Return height and width, enlarged or reduced until the longest or the shortest side reaches its limit."""
    longest, shortest = limits
    factor = min(longest / max(size), shortest / min(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


class RatioResize(v2.Transform):
    """Resize to at most `resize` (longest, shortest side; None: the image's own size) times a factor drawn evenly."""

    def __init__(self, resize: Sequence[int] | None, ratio: tuple[float, float]) -> None:
        super().__init__()
        self.resize = resize
        self.ratio = ratio

    def make_params(self, flat_inputs: list[Any]) -> Params:
        height, width = query_size(flat_inputs)
        factor = _uniform(*self.ratio)
        limits = self.resize or (max(height, width), min(height, width))
        return {"size": scaled_size((height, width), [factor * limit for limit in limits])}

    def transform(self, inpt: Any, params: Params) -> Any:
        size = list(params["size"])
        if isinstance(inpt, tv_tensors.Mask):
            return resize_masks(inpt, size)
        return F.resize(inpt, size, InterpolationMode.BILINEAR, antialias=True)


class CappedCrop(v2.Transform):
    """Crop at random, preferring crops of several classes in which none has more than a share of the pixels.

    An image that is smaller in a direction is kept whole in it.
    """

    def __init__(self, size: Sequence[int], share: float) -> None:
        super().__init__()
        self.size = size
        self.share = share

    def make_params(self, flat_inputs: list[Any]) -> Params:
        rows, columns = query_size(flat_inputs)
        height = min(rows, self.size[0])
        width = min(columns, self.size[1])
        masks = [part for part in flat_inputs if isinstance(part, tv_tensors.Mask)]
        for _ in range(CROP_ATTEMPTS):
            top = int(torch.randint(0, rows - height + 1, ()))
            left = int(torch.randint(0, columns - width + 1, ()))
            box = dict(top=top, left=left, height=height, width=width)
            if self.share >= 1 or not masks:
                break
            part = masks[0][top : top + height, left : left + width]
            counts = torch.bincount(part[part != IGNORE])
            if (counts > 0).sum() > 1 and counts.max() < self.share * counts.sum():
                break
        return box

    def transform(self, inpt: Any, params: Params) -> Any:
        return F.crop(inpt, **params)


class Photometric(v2.Transform):
    """Change brightness (by up to 32 of 255), contrast and saturation (.5 to 1.5) and hue (.1), each at odds of .5.

    Contrast is a factor on all values, applied before or after the colours.

    Source: PhotoMetricDistortion of mmsegmentation; differs: saturation blends with grey instead of scaling HSV
    """

    def make_params(self, flat_inputs: list[Any]) -> Params:
        def maybe(low: float, high: float) -> float | None:
            value = _uniform(low, high)
            drawn = torch.rand(()).item() < 0.5
            return value if drawn else None

        return {
            "brightness": maybe(-32 / 255, 32 / 255),
            "contrast": maybe(0.5, 1.5),
            "contrast_first": torch.rand(()).item() < 0.5,
            "saturation": maybe(0.5, 1.5),
            "hue": maybe(-0.1, 0.1),
        }

    def transform(self, inpt: Any, params: Params) -> Any:
        if not isinstance(inpt, tv_tensors.Image):
            return inpt
        x = F.to_dtype(inpt, torch.float32, scale=True)
        if params["brightness"] is not None:
            x = (x + params["brightness"]).clamp(0, 1)
        contrast = params["contrast"]
        if contrast is not None and params["contrast_first"]:
            x = F.adjust_brightness(x, contrast)
        if params["saturation"] is not None:
            x = F.adjust_saturation(x, params["saturation"])
        if params["hue"] is not None:
            x = F.adjust_hue(x, params["hue"])
        if contrast is not None and not params["contrast_first"]:
            x = F.adjust_brightness(x, contrast)
        return tv_tensors.Image(x)


class PadTo(v2.Transform):
    """Pad to a size, right and below: images with 0, the mean colour once they are normalised, masks with IGNORE."""

    def __init__(self, size: Sequence[int]) -> None:
        super().__init__()
        self.size = size

    def make_params(self, flat_inputs: list[Any]) -> Params:
        height, width = query_size(flat_inputs)
        right = max(0, self.size[1] - width)
        below = max(0, self.size[0] - height)
        return {"padding": [0, 0, right, below]}

    def transform(self, inpt: Any, params: Params) -> Any:
        fill = IGNORE if isinstance(inpt, tv_tensors.Mask) else 0
        if any(params["padding"]):
            return F.pad(inpt, params["padding"], fill=fill)
        return inpt


class TrainTransform:
    """Augment a pair. Shape: (3, H, W) uint8, (H, W) -> (3, *crop) float32, normalised, (*crop) int64"""

    def __init__(self, part: SegmentationPart, mean: Sequence[float], std: Sequence[float]) -> None:
        steps: list[nn.Module] = [
            RatioResize(part.resize, part.ratio),
            CappedCrop(part.crop, part.category_share),
            v2.RandomHorizontalFlip(part.hflip),
        ]
        if part.photometric:
            steps.append(Photometric())
        steps += [
            v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
            v2.Normalize(mean, std),
            PadTo(part.crop),
        ]
        self.steps = v2.Compose(steps)

    def __call__(self, pair: Pair) -> tuple[Tensor, Tensor]:
        image, mask = self.steps(pair.image, pair.mask)
        return image.as_subclass(Tensor), mask.as_subclass(Tensor)


class TestTransform:
    """Resize and normalise an image; its mask stays as it is. Shape: (3, H, W), (H, W) -> (3, h, w), (H, W)"""

    __test__ = False

    def __init__(
        self, resize: Sequence[int] | None, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self.resize = resize
        self.mean = mean
        self.std = std

    def image(self, image: Tensor) -> Tensor:
        """Return an image as the network reads it. Shape: (3, H, W) uint8 -> (3, h, w)"""
        if self.resize:
            size = scaled_size((image.shape[-2], image.shape[-1]), self.resize)
            image = F.resize(image, list(size), antialias=True)
        return normalised(image, self.mean, self.std)

    def __call__(self, pair: Pair) -> tuple[Tensor, Tensor]:
        return self.image(pair.image), pair.mask.as_subclass(Tensor)
