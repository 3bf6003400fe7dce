"""Recipe fields of segmentation (`task`)."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from isomorph.training.recipe.fields import File, Fraction, NotNegative, Part, Positive, Size


def _as_pair(value: Any) -> Any:
    """Return the two numbers of "512,512", "512x512" or 512; anything else unchanged."""
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+)\s*[x,]\s*(\d+)", value.strip())):
        return [int(found[1]), int(found[2])]
    return [value, value] if isinstance(value, int) and not isinstance(value, bool) else value


Sides = Annotated[tuple[Size, Size], BeforeValidator(_as_pair)]
"""Two sizes in pixels; one number stands for both."""


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
    hflip: Annotated[float, Field(ge=0, le=1)] = 0.5
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
        if self.stride and any(step > side for step, side in zip(self.stride, self.crop, strict=True)):
            raise ValueError(f"stride {self.stride} must not be above crop {self.crop}, or windows leave gaps")
        if self.teacher_weights and not self.teacher:
            raise ValueError("teacher_weights needs teacher, the name of a timm model; give both")
        return self

    @property
    def test_stride(self) -> tuple[int, int]:
        """Distance of the test windows in height and width."""
        return self.stride or (max(1, self.crop[0] * 2 // 3), max(1, self.crop[1] * 2 // 3))
