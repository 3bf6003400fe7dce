"""Joint transforms of an image and its objects: large-scale jitter, a crop of fixed size, a flip; and the test form."""

from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as V

from isomorph.tasks.detection.dataset import Objects

_MIN_SIDE = 1.0
"""Shortest side in pixels of a box that the crop has cut, for objects without masks; smaller ones are left out."""


class FitTransform:
    """Resize an image to fit the input, keeping its ratio, and pad it on the right and below.

    Shape: PIL image -> (3, H, W), normalised
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.size = tuple(config["input_size"][-2:])
        self.mean, self.std = list(config["mean"]), list(config["std"])

    def fit(self, image: Image.Image) -> tuple[Tensor, tuple[int, int]]:
        """Return an image as the network reads it, and its height and width inside."""
        resized = V.resize(V.pil_to_tensor(image), fitted_size(image.size[::-1], self.size), antialias=True)
        return pad_to(self.normalise(resized), self.size), tuple(resized.shape[-2:])

    def normalise(self, image: Tensor) -> Tensor:
        """Return an image of bytes as normalised numbers."""
        return V.normalize(V.to_dtype(image, torch.float32, scale=True), self.mean, self.std)


class TrainTransform(FitTransform):
    """Flip an image, resize it by a random scale, crop it to the input size, and pad it on the right and below.

    The scale is drawn from `scales`, where 1 fits the image to the input. Boxes are those of the masks after the crop
    where there are masks; objects that the crop removes are left out.

    Shape: PIL image, objects -> (3, H, W), normalised, and the objects left
    Source: large-scale jitter (Ghiasi et al., 2021), as in G2SD's ViTDet
    """

    def __init__(self, config: Mapping[str, Any], scales: tuple[float, float], flip: float) -> None:
        super().__init__(config)
        self.scales, self.flip = scales, flip

    def __call__(self, example: tuple[Image.Image, Objects]) -> tuple[Tensor, Objects]:
        image, objects = example
        canvas = image.size[::-1]
        sample: dict[str, Any] = {"image": tv_tensors.Image(V.pil_to_tensor(image))}
        sample["boxes"] = tv_tensors.BoundingBoxes(objects["boxes"], format="XYXY", canvas_size=canvas)
        if "masks" in objects:
            sample["masks"] = tv_tensors.Mask(objects["masks"])
        draw = torch.rand(4)  # flip, scale, row and column of the crop
        if draw[0] < self.flip:
            sample = {name: V.horizontal_flip(value) for name, value in sample.items()}
        scale = self.scales[0] + (self.scales[1] - self.scales[0]) * draw[1].item()
        size = fitted_size(canvas, tuple(max(1, round(n * scale)) for n in self.size))
        sample = {name: _resize(value, size) for name, value in sample.items()}
        top, left = (int(max(n - m, 0) * part + 0.5) for n, m, part in zip(size, self.size, draw[2:], strict=True))
        kept = [min(n, m) for n, m in zip(size, self.size, strict=True)]
        sample = {name: V.crop(value, top, left, *kept) for name, value in sample.items()}
        return pad_to(self.normalise(sample["image"].as_subclass(Tensor)), self.size), self._objects(sample, objects)

    def _objects(self, sample: dict[str, Any], objects: Objects) -> Objects:
        """Return the objects that the crop left."""
        boxes, labels = sample["boxes"].as_subclass(Tensor), objects["labels"]
        if "masks" not in sample:
            left = ((boxes[:, 2:] - boxes[:, :2]) >= _MIN_SIDE).all(1)
            return {"boxes": boxes[left], "labels": labels[left]}
        masks = sample["masks"].as_subclass(Tensor)
        left = masks.flatten(1).any(1).bool()
        boxes = masks_to_boxes(masks[left])
        boxes[:, 2:] += 1  # the last pixel belongs to the object
        return {"boxes": boxes, "labels": labels[left], "masks": pad_to(masks[left], self.size)}


def fitted_size(size: tuple[int, ...], limit: tuple[int, ...]) -> list[int]:
    """Return height and width of an image resized to fit a limit, with its ratio kept."""
    scale = min(limit[0] / size[0], limit[1] / size[1])
    return [min(bound, max(1, round(n * scale))) for n, bound in zip(size, limit, strict=True)]


def _resize(value: Any, size: list[int]) -> Any:
    """Resize an image, its boxes or its masks; masks take the nearest pixel."""
    if isinstance(value, tv_tensors.Mask):
        return V.resize(value, size, InterpolationMode.NEAREST) if len(value) else value.new_zeros(0, *size)
    return V.resize(value, size, antialias=True)


def pad_to(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Pad an image or masks with zeros on the right and below. Shape: (C, H, W) -> (C, *size)"""
    return torch.nn.functional.pad(x, (0, size[1] - x.shape[-1], 0, size[0] - x.shape[-2]))
