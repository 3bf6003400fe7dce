"""Classes of the pixels of whole images, as a trained network predicts them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isomorph.distributed import Runtime
from isomorph.layers.eval_mode import eval_mode
from isomorph.models.task_networks.upernet import resize_map
from isomorph.tasks.segmentation.fields import SegmentationPart
from isomorph.tasks.segmentation.metrics import Confusion
from isomorph.tasks.segmentation.windows import slide

WINDOWS = 8
"""Windows that are computed at once."""


@torch.no_grad()
def predict_mask(
    model: nn.Module, image: Tensor, part: SegmentationPart, size: tuple[int, int], windows: int = WINDOWS
) -> Tensor:
    """Return the class of every pixel of an image, at the height and width `size` that it had before it was resized.

    Shape: image (1, 3, h, w) -> (H, W)
    """
    parameter = next(model.parameters())
    with eval_mode(model):
        logits = slide(model, image.to(parameter.device, parameter.dtype), part.crop, part.test_stride, windows)
    logits = logits if tuple(logits.shape[-2:]) == size else resize_map(logits, size)
    return logits[0].argmax(0)


def measure(
    model: nn.Module,
    loader: Iterable[Any],
    part: SegmentationPart,
    classes: int,
    runtime: Runtime,
    handle: Callable[[Tensor, Tensor, Confusion], None] = lambda truth, predicted, counts: None,
) -> tuple[Confusion, int]:
    """Return the counts over the images of all processes, and their number.

    `handle(truth, predicted, counts)` is called for each image of this process, with the counts of that image.
    """
    total, images = Confusion(classes), 0
    with eval_mode(model):
        for image, truth in loader:
            with runtime.autocast():
                predicted = predict_mask(model, image, part, tuple(truth.shape[-2:])).cpu()
            counts = Confusion(classes)
            counts.add(truth[0], predicted)
            handle(truth[0], predicted, counts)
            total.counts += counts.counts
            images += 1
    parts = runtime.gather((total.counts.tolist(), images))
    total.counts = torch.tensor([counts for counts, _ in parts]).sum(0)
    return total, sum(number for _, number in parts)
