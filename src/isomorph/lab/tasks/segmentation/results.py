"""What a trained network predicts for the pixels of whole images: windows, metrics and pictures.

Logits come from windows of the size that the network was trained on, averaged where they overlap.
"""

import colorsys
import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from isomorph.lab.distributed import Runtime
from isomorph.lab.tasks.segmentation.augment import SegmentationPart
from isomorph.lab.tasks.segmentation.data import IGNORE
from isomorph.layers.modes import eval_mode, require_finite
from isomorph.models.task_networks.upernet import resize_map
from isomorph.spec import ImageSize
from isomorph.terminal_tables import Metrics, Rows

WINDOWS = 8


def window_starts(side: int, window: int, stride: int) -> list[int]:
    """Return where windows start along a side that they cover; the last one ends at its end."""
    count = -(-max(side - window, 0) // stride) + 1
    return [max(0, min(number * stride, side - window)) for number in range(count)]


def slide(
    model: nn.Module,
    images: Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    batch_size: int = WINDOWS,
) -> Tensor:
    """Return the logits of every pixel, the mean over all windows that contain it; a side below the window's is whole.

    Shape: images (B, C, H, W) -> (B, K, H, W)
    Source: sliding-window testing as in G2SD's code (mmsegmentation's)
    """
    B, _, H, W = images.shape
    height = min(window[0], H)
    width = min(window[1], W)
    tops = window_starts(H, height, stride[0])
    lefts = window_starts(W, width, stride[1])
    starts = list(product(range(B), tops, lefts))
    if len(starts) == B:
        return torch.cat([model(part) for part in images.split(batch_size)])
    total = torch.empty(0)
    count = images.new_zeros(B, 1, H, W)
    for first in range(0, len(starts), batch_size):
        boxes = [
            (image, slice(None), slice(top, top + height), slice(left, left + width))
            for image, top, left in starts[first : first + batch_size]
        ]
        batch_logits = model(torch.stack([images[box] for box in boxes]))
        if not len(total):
            total = batch_logits.new_zeros(B, batch_logits.shape[1], H, W)
        for box, logits in zip(boxes, batch_logits, strict=True):
            total[box] += logits
            count[box] += 1
    return total / count


class Confusion:
    """Pixels of each true class (rows) predicted as each class (columns). Shape: counts (K, K) int64"""

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)

    def add(self, truth: Tensor, predicted: Tensor) -> None:
        """Count the pixels of a mask; those of class IGNORE do not count. Shape: (*), the same"""
        K = len(self.counts)
        valid = truth != IGNORE
        pairs = truth[valid] * K + predicted[valid]
        self.counts += torch.bincount(pairs.cpu(), minlength=K * K).view(K, K)

    def ious(self) -> Tensor:
        """Return the IoU of each class; NaN for one that is neither true nor predicted. Shape: -> (K,)"""
        hits = self.counts.diagonal().double()
        unions = self.counts.sum(0) + self.counts.sum(1) - self.counts.diagonal()
        return hits / unions

    def recalls(self) -> Tensor:
        """Return the share of each class's pixels that were found; NaN for a class without pixels. Shape: -> (K,)"""
        return self.counts.diagonal().double() / self.counts.sum(1)

    def metrics(self) -> Metrics:
        """Return miou, mean_accuracy and pixel_accuracy in percent; means over the classes that occur."""
        hits = self.counts.diagonal().double().sum()
        return {
            "miou": 100 * float(self.ious().nanmean()),
            "mean_accuracy": 100 * float(self.recalls().nanmean()),
            "pixel_accuracy": 100 * float(hits / self.counts.sum()),
        }

    def rows(self, names: Sequence[str]) -> Rows:
        """Return the IoU, the accuracy and the share of the pixels of each class, in percent; None where undefined."""
        shares = self.counts.sum(1).double() / max(1, int(self.counts.sum()))
        ious = _percents(self.ious())
        accuracies = _percents(self.recalls())
        columns = zip(names, ious, accuracies, _percents(shares), strict=True)
        return [
            {"class": name, "iou": iou, "accuracy": accuracy, "share": share}
            for name, iou, accuracy, share in columns
        ]


def _percents(shares: Tensor) -> list[float | None]:
    return [None if math.isnan(share) else 100 * share for share in shares.tolist()]


@torch.no_grad()
def predict_mask(
    model: nn.Module, image: Tensor, part: SegmentationPart, size: ImageSize
) -> Tensor:
    """Return each pixel's class, at `size` before resizing. Shape: (1, 3, h, w) -> (H, W). Raises: NotFinite."""
    parameter = next(model.parameters())
    with eval_mode(model):
        logits = slide(
            model, image.to(parameter.device, parameter.dtype), part.crop, part.test_stride
        )
    require_finite(logits)  # the largest of NaNs would be class 0
    if tuple(logits.shape[-2:]) != size:
        logits = resize_map(logits, size)
    return logits[0].argmax(0)


def measure(
    model: nn.Module, loader: Iterable[Any], part: SegmentationPart, runtime: Runtime
) -> tuple[Confusion, int]:
    """Return the counts over the images of all processes, and the number of images."""
    total = Confusion(model.num_classes)  # type: ignore[arg-type]
    images = 0
    with eval_mode(model):
        for image, truth in loader:
            with runtime.autocast():
                total.add(truth[0], predict_mask(model, image, part, tuple(truth.shape[-2:])).cpu())
            images += 1
    counted, numbers = zip(*runtime.gather((total.counts.tolist(), images)), strict=True)
    total.counts = torch.tensor(counted).sum(0)
    return total, sum(numbers)


# pictures


SHOWN_CLASSES = 25
_ROW = 28  # pixels
_LONGEST_NAME = 60
_OPACITY = 0.55
_GOLDEN = 0.6180339887


def class_colours(classes: int) -> np.ndarray:
    """Return a colour for each class; they differ in hue. Shape: -> (K, 3) uint8"""
    colours = []
    for i in range(classes):
        hue = i * _GOLDEN % 1
        saturation = 0.55 + 0.4 * (i % 2)
        value = 0.95 - 0.3 * (i // 2 % 2)
        colours.append(colorsys.hsv_to_rgb(hue, saturation, value))
    return (255 * np.array(colours)).round().astype(np.uint8)


def index_image(mask: np.ndarray, colours: np.ndarray) -> Image.Image:
    """Return a mask as an image with a palette, whose pixels are the class numbers. Shape: (H, W)"""
    image = Image.fromarray(mask.astype(np.uint8), mode="P")
    palette = np.zeros((256, 3), np.uint8)
    palette[: len(colours)] = colours
    image.putpalette(palette.flatten().tolist())
    return image


def overlay(image: Image.Image, mask: np.ndarray, colours: np.ndarray) -> Image.Image:
    """Return an image with the colours of a mask over it; pixels without a class stay as they are. Shape: (H, W)"""
    pixels = np.asarray(image.convert("RGB"), np.float32)
    shown = ((mask != IGNORE) & (mask < len(colours)))[..., None]
    painted = colours[np.minimum(mask, len(colours) - 1)].astype(np.float32)
    mixed = np.where(shown, (1 - _OPACITY) * pixels + _OPACITY * painted, pixels)
    return Image.fromarray(mixed.round().astype(np.uint8))


def draw_legend(names: Sequence[str], colours: np.ndarray, pixels: Sequence[float]) -> Image.Image:
    """Draw colours and names of classes with pixels, up to SHOWN_CLASSES. Shape: colours (K, 3), pixels (K,)"""
    order = np.argsort(-np.asarray(pixels), kind="stable").tolist()
    shown = [i for i in order if pixels[i]][:SHOWN_CLASSES]
    size = _ROW - 10
    texts = [" ".join(names[i].split())[:_LONGEST_NAME] for i in shown]
    left_out = sum(map(bool, pixels)) - len(shown)
    if left_out:
        texts.append(f"and {left_out} more")
    ruler = ImageDraw.Draw(Image.new("L", (1, 1)))
    longest = max(round(ruler.textlength(text, font_size=size)) for text in texts)
    width = 2 * _ROW + 20 + longest
    canvas = Image.new("RGB", (width, _ROW * len(texts)), "white")
    draw = ImageDraw.Draw(canvas)
    for row, text in enumerate(texts):
        top = _ROW * row
        if row < len(shown):
            colour = tuple(colours[shown[row]].tolist())
            draw.rectangle((0, top + 3, 2 * _ROW, top + _ROW - 3), fill=colour)
        draw.text((2 * _ROW + 10, top + 3), text, fill="black", font_size=size)
    return canvas


def draw_prediction(
    image: Image.Image, mask: np.ndarray, names: Sequence[str], colours: np.ndarray
) -> Image.Image:
    """Return an image with the colours of a mask over it, and a legend of its classes below. Shape: mask (H, W)"""
    painted = overlay(image, mask, colours)
    pixels = np.bincount(mask.flatten(), minlength=len(names)).tolist()
    legend = draw_legend(names, colours, pixels)
    size = (max(painted.width, legend.width), painted.height + legend.height)
    canvas = Image.new("RGB", size, "white")
    canvas.paste(painted)
    canvas.paste(legend, (0, painted.height))
    return canvas
