"""Logits of a whole image from windows of the size that a network was trained on, averaged where they overlap."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def window_starts(side: int, window: int, stride: int) -> list[int]:
    """Return where windows start along a side that they cover; the last one ends at its end.

    >>> from isomorph.tasks.segmentation.windows import window_starts
    >>> window_starts(683, window=512, stride=341)
    [0, 171]
    """
    count = -(-max(side - window, 0) // stride) + 1
    return [max(0, min(number * stride, side - window)) for number in range(count)]


def slide(
    model: nn.Module, images: Tensor, window: Sequence[int], stride: Sequence[int], batch_size: int = 8
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
