"""Cut the features of boxes out of a pyramid of maps (ROIAlign)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import roi_align

CANONICAL_SIZE, CANONICAL_STRIDE = 224, 16
"""A box of this size in pixels is read from the map with this stride; one of twice the size from the next."""


class PyramidRoIAlign(nn.Module):
    """Read a grid of features for every box, from the map of the pyramid that fits the size of the box.

    As torchvision's MultiScaleRoIAlign, and boxes are moved by half a pixel, so that pixel centres are at half
    coordinates.

    Shape: maps of (B, C, H_i, W_i), B times (n_i, 4) boxes in pixels -> (sum of n_i, C, size, size)
    Source: ROIAlignV2 of Mask R-CNN in detectron2 (`aligned=True`), levels: FPN (Lin et al., 2017), eq. 1
    """

    def __init__(self, size: int, strides: Sequence[float]) -> None:
        super().__init__()
        self.output_size, self.strides = (size, size), tuple(strides)

    def forward(self, maps: Mapping[str, Tensor], boxes: Sequence[Tensor], _: Any = None) -> Tensor:
        levels = list(maps.values())[: len(self.strides)]
        regions = number_boxes(boxes)
        chosen = self.levels_of(regions[:, 1:])
        out = levels[0].new_zeros(len(regions), levels[0].shape[1], *self.output_size)
        for level, (features, stride) in enumerate(zip(levels, self.strides, strict=True)):
            rows = torch.where(chosen == level)[0]
            found = roi_align(features, regions[rows].to(features.dtype), self.output_size, 1 / stride, -1, True)
            out = out.index_put((rows,), found.to(out.dtype))
        return out

    def levels_of(self, boxes: Tensor) -> Tensor:
        """Return the number of the map for every box. Shape: (n, 4) -> (n,)"""
        sizes = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).clamp(min=0).sqrt()
        wanted = torch.floor(torch.log2(sizes / CANONICAL_SIZE + 1e-6)) + math.log2(CANONICAL_STRIDE / self.strides[0])
        return wanted.clamp(0, len(self.strides) - 1).long()


def number_boxes(boxes: Sequence[Tensor]) -> Tensor:
    """Join the boxes of all images, with the number of the image first. Shape: B of (n_i, 4) -> (sum of n_i, 5)"""
    return torch.cat([torch.cat([b.new_full((len(b), 1), i), b], 1) for i, b in enumerate(boxes)])
