"""Classes of the pixels of whole images, as a trained network predicts them, and how many are right.

Logits come from windows of the size that the network was trained on, averaged where they overlap.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.distributed import Runtime
from isomorph.layers.eval_mode import eval_mode
from isomorph.models.task_networks.upernet import resize_map
from isomorph.tasks.segmentation.fields import SegmentationPart
from isomorph.tasks.segmentation.images import IGNORE

WINDOWS = 8
"""Windows that are computed at once."""


def window_starts(side: int, window: int, stride: int) -> list[int]:
    """Return where windows start along a side that they cover; the last one ends at its end.

    >>> from isomorph.tasks.segmentation.predict import window_starts
    >>> window_starts(683, window=512, stride=341)
    [0, 171]
    """
    count = -(-max(side - window, 0) // stride) + 1
    return [max(0, min(number * stride, side - window)) for number in range(count)]


def slide(
    model: nn.Module, images: Tensor, window: Sequence[int], stride: Sequence[int], batch_size: int = WINDOWS
) -> Tensor:
    """Return the logits of every pixel, the mean over all windows that contain it.

    A side below the window's is taken whole. At most `batch_size` windows are computed at once.

    Shape: images (B, C, H, W) -> (B, K, H, W)
    Source: sliding-window testing as in G2SD's code (mmsegmentation's)
    """
    B, _, H, W = images.shape
    height, width = min(window[0], H), min(window[1], W)
    starts = [
        (image, top, left)
        for image in range(B)
        for top in window_starts(H, height, stride[0])
        for left in window_starts(W, width, stride[1])
    ]
    if len(starts) == B:
        return torch.cat([model(part) for part in images.split(batch_size)])
    total, count = torch.empty(0), images.new_zeros(B, 1, H, W)
    for first in range(0, len(starts), batch_size):
        boxes = starts[first : first + batch_size]
        logits = model(torch.stack([images[i, :, t : t + height, x : x + width] for i, t, x in boxes]))
        if not len(total):
            total = logits.new_zeros(B, logits.shape[1], H, W)
        for (image, top, left), each in zip(boxes, logits, strict=True):
            total[image, :, top : top + height, left : left + width] += each
            count[image, :, top : top + height, left : left + width] += 1
    return total / count


class Confusion:
    """The number of pixels of each true class (rows) that were predicted as each class (columns).

    Shape: counts (K, K) int64
    """

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)

    def add(self, truth: Tensor, predicted: Tensor) -> None:
        """Count the pixels of a mask; those of class IGNORE do not count. Shape: (*), the same"""
        K, valid = len(self.counts), truth != IGNORE
        pairs = truth[valid] * K + predicted[valid]
        self.counts += torch.bincount(pairs.cpu(), minlength=K * K).view(K, K)

    def ious(self) -> Tensor:
        """Return the intersection over union of each class; NaN for one that is neither true nor predicted.

        Shape: -> (K,)
        """
        hits = self.counts.diagonal().double()
        return hits / (self.counts.sum(0) + self.counts.sum(1) - self.counts.diagonal())

    def recalls(self) -> Tensor:
        """Return the share of each class's pixels that were found; NaN for a class without pixels. Shape: -> (K,)"""
        return self.counts.diagonal().double() / self.counts.sum(1)

    def metrics(self) -> dict[str, float]:
        """Return miou, mean_accuracy and pixel_accuracy in percent; means over the classes that occur."""
        values = {
            "miou": self.ious().nanmean(),
            "mean_accuracy": self.recalls().nanmean(),
            "pixel_accuracy": self.counts.diagonal().sum() / self.counts.sum(),
        }
        return {name: 100 * float(value) for name, value in values.items()}

    def rows(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the IoU, the accuracy and the share of the pixels of each class, in percent; None where undefined."""
        shares = self.counts.sum(1).double() / max(1, int(self.counts.sum()))
        columns = {"iou": self.ious(), "accuracy": self.recalls(), "share": shares}
        percent = {name: [None if v != v else 100 * v for v in values.tolist()] for name, values in columns.items()}
        return [{"class": name, **{key: percent[key][i] for key in percent}} for i, name in enumerate(names)]


@torch.no_grad()
def predict_mask(model: nn.Module, image: Tensor, part: SegmentationPart, size: tuple[int, int]) -> Tensor:
    """Return the class of every pixel of an image, at the height and width `size` that it had before it was resized.

    Shape: image (1, 3, h, w) -> (H, W)
    """
    parameter = next(model.parameters())
    with eval_mode(model):
        logits = slide(model, image.to(parameter.device, parameter.dtype), part.crop, part.test_stride)
    logits = logits if tuple(logits.shape[-2:]) == size else resize_map(logits, size)
    return logits[0].argmax(0)


def measure(
    model: nn.Module,
    loader: Iterable[Any],
    part: SegmentationPart,
    runtime: Runtime,
    handle: Callable[[Tensor, Tensor, Confusion], None] = lambda truth, predicted, counts: None,
) -> tuple[Confusion, int]:
    """Return the counts over the images of all processes, and their number.

    `handle(truth, predicted, counts)` is called for each image of this process, with the counts of that image.
    """
    total, images = Confusion(model.num_classes), 0  # type: ignore[arg-type]
    with eval_mode(model):
        for image, truth in loader:
            with runtime.autocast():
                predicted = predict_mask(model, image, part, tuple(truth.shape[-2:])).cpu()
            counts = Confusion(len(total.counts))
            counts.add(truth[0], predicted)
            handle(truth[0], predicted, counts)
            total.counts += counts.counts
            images += 1
    parts = runtime.gather((total.counts.tolist(), images))
    total.counts = torch.tensor([counts for counts, _ in parts]).sum(0)
    return total, sum(number for _, number in parts)
