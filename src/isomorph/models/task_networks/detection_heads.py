"""The heads of Mask R-CNN: torchvision's, with LayerNorm after convolutions, and outputs in float32 at least."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import roi_align

from isomorph.models.variants import Mixin

Target = dict[str, Tensor]
"""Objects of an image: boxes (n, 4) as left, top, right, bottom in pixels, labels (n,), and masks (n, H, W)."""

_RATIOS = (0.5, 1.0, 2.0)
_PRE_NMS_TRAIN, _RPN_SAMPLES, _RPN_IOU, _RPN_NMS = 2, 256, (0.7, 0.3), 0.7
"""Proposals before suppression in training, as a multiple of those after it; anchors trained with; thresholds."""
CANONICAL_SIZE, CANONICAL_STRIDE = 224, 16
"""A box of this size in pixels is read from the map with this stride; one of twice the size from the next."""


class Float32Outputs(Mixin):
    """Mixin for a head with outputs in float32 at least: under autocast coordinates would be rounded to 8 bits."""

    def forward(self, x: Any) -> Any:
        return tree_map(lambda y: y.to(torch.promote_types(y.dtype, torch.float32)), super().forward(x))


class ProposalHead(Float32Outputs, RPNHead):
    """torchvision's RPNHead. Shape: maps -> objectness, deltas of every map"""


class BoxPredictor(Float32Outputs, FastRCNNPredictor):
    """torchvision's FastRCNNPredictor. Shape: (n, C) -> (n, K), (n, 4 K)"""


class MaskPredictor(Float32Outputs, MaskRCNNPredictor):
    """torchvision's MaskRCNNPredictor. Shape: (n, C, 14, 14) -> (n, K, 28, 28)"""


class StrideAnchors(AnchorGenerator):
    """Anchors of three shapes at every position of the maps, `strides` pixels apart.

    torchvision's generator derives the strides from the sizes of image and maps, which are wrong where the image was
    padded, and rounded where a stride is a fraction.
    """

    def __init__(self, strides: Sequence[float], scale: float) -> None:
        super().__init__(tuple((stride * scale,) for stride in strides), (_RATIOS,) * len(strides))
        self.strides = tuple(strides)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        first = feature_maps[0]
        self.set_cell_anchors(first.dtype, first.device)
        strides = [[first.new_tensor(stride)] * 2 for stride in self.strides]
        anchors = torch.cat(self.grid_anchors([list(level.shape[-2:]) for level in feature_maps], strides))
        return [anchors] * len(image_list.image_sizes)


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
        regions = torch.cat([F.pad(each, (1, 0), value=i) for i, each in enumerate(boxes)])  # (n, 5): image, box
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


def build_rpn(channels: int, strides: Sequence[float], anchor_scale: float, proposals: int) -> RegionProposalNetwork:
    """Return the network that proposes boxes: two 3 x 3 convolutions, and anchors of three shapes on every map.

    Source: G2SD's ViTDet: 2000 boxes a map before suppression in training, 1000 in testing, 1000 after it
    """
    anchors = StrideAnchors(strides, anchor_scale)
    return RegionProposalNetwork(
        anchors,
        ProposalHead(channels, len(_RATIOS), conv_depth=2),
        *_RPN_IOU,
        batch_size_per_image=_RPN_SAMPLES,
        positive_fraction=0.5,
        pre_nms_top_n={"training": _PRE_NMS_TRAIN * proposals, "testing": proposals},
        post_nms_top_n={"training": proposals, "testing": proposals},
        nms_thresh=_RPN_NMS,
    )


def build_regions(
    channels: int,
    features: int,
    strides: Sequence[float],
    num_classes: int,
    masks: bool,
    samples: int,
    score_threshold: float,
    detections: int,
) -> RoIHeads:
    """Return the heads that read proposals: four convolutions and a linear layer for boxes, five for masks.

    Class 0 is the background.
    """
    mask_parts: dict[str, nn.Module] = {}
    if masks:
        mask_parts = {
            "mask_roi_pool": PyramidRoIAlign(14, strides),
            "mask_head": MaskRCNNHeads(channels, [channels] * 4, 1, norm_layer=LayerNorm2d),
            "mask_predictor": MaskPredictor(channels, channels, num_classes + 1),
        }
    return RoIHeads(
        PyramidRoIAlign(7, strides),
        FastRCNNConvFCHead((channels, 7, 7), [channels] * 4, [features], norm_layer=LayerNorm2d),
        BoxPredictor(features, num_classes + 1),
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        batch_size_per_image=samples,
        positive_fraction=0.25,
        bbox_reg_weights=(10.0, 10.0, 5.0, 5.0),
        score_thresh=score_threshold,
        nms_thresh=0.5,
        detections_per_img=detections,
        **mask_parts,
    )


def fixed_boxes(x: Tensor) -> Tensor:
    """Return boxes that cover an image at three sizes: the whole, its quarters, its sixteenths. Shape: -> (21, 4)"""
    H, W = x.shape[-2:]
    boxes: list[Any] = []
    for parts in (1, 2, 4):
        steps = [n / parts for n in range(parts)]
        boxes += [(j * W, i * H, (j + 1 / parts) * W, (i + 1 / parts) * H) for i in steps for j in steps]
    return torch.tensor(boxes, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
