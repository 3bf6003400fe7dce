"""Mask R-CNN around any timm backbone: boxes, and masks if wanted. Plain ViTs get windows and a pyramid (ViTDet).

    timm.create_model("mask_rcnn", backbone="tdrl_vit_ti", num_classes=80, masks=True)

Proposals, matching, losses and the selection of detections are torchvision's.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from timm.models import generate_default_cfgs
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

from isomorph.errors import UserError
from isomorph.layers.eval_mode import require_finite
from isomorph.models.task_networks.backbone import (
    BackboneNetwork,
    backbone_state,
    build_backbone,
    create_network,
    feature_maps,
)
from isomorph.models.task_networks.detection_heads import Target, build_regions, build_rpn, fixed_boxes
from isomorph.models.task_networks.detection_pyramids import (
    SimpleFeaturePyramid,
    StagePyramid,
    WindowedViT,
    is_windowable,
)
from isomorph.models.variants import Variant, check_counts, image_cfg, register_variants, require_images

Detections = dict[str, Tensor]
"""Detections in an image: boxes (n, 4) as left, top, right, bottom, labels (n,), scores (n,), masks (n, 1, 28, 28)."""

_CLASS_HEADS = tuple(
    f"roi_heads.{name}"
    for name in ("box_predictor.cls_score", "box_predictor.bbox_pred", "mask_predictor.mask_fcn_logits")
)
"""Layers with outputs for each class: new for other classes."""


class MaskRCNN(BackboneNetwork):
    """Find objects in images: boxes with classes, and with `masks` the outline of every object.

    The maps of the backbone become a pyramid, from which proposals are drawn; every proposal is classified, refined
    and outlined. A plain ViT (timm's VisionTransformer and its subclasses) attends in windows of `window` patches, and
    in `global_blocks` to the whole map; `window=0` leaves it as it is. Its last map becomes a simple pyramid, as
    that of any backbone with one resolution; the stages of other backbones enter a feature pyramid network.

    Three calls: `forward(x, targets)` in train mode returns the losses; `forward(x)` returns all outputs before boxes
    are selected, for boxes at fixed positions, so that two networks can be compared (`iso.verify`); and `detect(x)`
    returns the detections. Images of any size are padded on the right and below to whole cells of the coarsest map.

    Args:
        backbone: a model of timm's registry, created with `backbone_kwargs`.
        masks: whether there is a head for masks.
        img_size: size of the images, for which relative positions are created; any other works too.
        channels, features: width of the pyramid, and of the linear layer of the box head.
        anchor_scale: side of the anchors of a map, as a multiple of its stride.
        proposals: number of proposals an image. `samples`: how many of them the heads are trained with.
        score_threshold, detections: lowest score, and largest number, of the detections of an image.

    Shape: x (B, in_chans, H, W), normalised
    Source: Mask R-CNN (He et al., 2017), ViTDet (Li et al., 2022), section 3; settings of G2SD's code, which TDRL uses
    Raises: UserError for a backbone that timm does not have or that has no feature maps, or images that are too small.
    """

    def __init__(
        self,
        backbone: str = "tdrl_vit_ti",
        num_classes: int = 80,
        masks: bool = True,
        backbone_kwargs: Mapping[str, Any] | None = None,
        in_chans: int = 3,
        img_size: int | tuple[int, int] = 1024,
        window: int = 14,
        global_blocks: Sequence[int] | None = None,
        channels: int = 256,
        features: int = 1024,
        anchor_scale: float = 8,
        proposals: int = 1000,
        samples: int = 512,
        score_threshold: float = 0.05,
        detections: int = 100,
        drop_path_rate: float | None = None,
        backbone_pretrained: bool = False,
    ) -> None:
        super().__init__()
        check_counts(num_classes=num_classes, channels=channels, features=features, proposals=proposals)
        self.num_classes, self.in_chans, self.has_masks = num_classes, in_chans, masks
        self.backbone_kwargs, self.img_size = dict(backbone_kwargs or {}), to_2tuple(img_size)
        arguments = self.backbone_kwargs | ({} if drop_path_rate is None else {"drop_path_rate": drop_path_rate})
        found = build_backbone(backbone, in_chans, pretrained=backbone_pretrained, arguments=arguments)
        if not found.is_plain:
            found = found.distinct()
        self.backbone = found.module
        self.indices: tuple[int, ...] | None = found.indices
        if found.is_plain:
            self.indices = found.indices[-1:]
            if window and is_windowable(found.module):
                self.backbone = WindowedViT(found.module, self.img_size, window, global_blocks)
                self.indices = None
            self.pyramid: nn.Module = SimpleFeaturePyramid(found.channels[-1], channels)
            stride = found.reductions[-1]
            self.strides = tuple(stride * factor / 4 for factor in (1, 2, 4, 8, 16))
        else:
            self.pyramid = StagePyramid(found.channels, channels)
            self.strides = (*found.reductions, 2 * found.reductions[-1])
        self.rpn = build_rpn(channels, self.strides, anchor_scale, proposals)
        chosen = (masks, samples, score_threshold, detections)
        self.roi_heads = build_regions(channels, features, self.strides[:-1], num_classes, *chosen)

    def own_cfg(self, inner: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **{key: inner[key] for key in ("mean", "std") if inner.get(key) is not None and self.in_chans == 3},
            "input_size": (self.in_chans, *self.img_size),
            "num_classes": self.num_classes,
            "classifier": tuple(head for head in _CLASS_HEADS if self.has_masks or "mask" not in head),
        }

    def get_classifier(self) -> nn.Module:
        """Return the classifier of boxes."""
        return self.roi_heads.box_predictor.cls_score

    def pyramid_maps(self, x: Tensor) -> OrderedDict[str, Tensor]:
        """Return the maps of the pyramid, finest first. Shape: (B, in_chans, H, W) -> (B, C, H / stride, W / stride)"""
        require_images(x)
        cell = int(self.strides[-2])
        x = F.pad(x, (0, -x.shape[3] % cell, 0, -x.shape[2] % cell))
        maps = self.backbone(x) if self.indices is None else feature_maps(self.backbone, self.indices, x)
        levels = self.pyramid(maps if isinstance(self.pyramid, StagePyramid) else maps[0])
        return OrderedDict((f"p{number}", level) for number, level in enumerate(levels, 2))

    def forward(self, x: Tensor, targets: Sequence[Target] | None = None, keep_maps: bool = False) -> dict[str, Any]:
        """Return the losses for targets; without targets all outputs before boxes are selected.

        A target is a dict of `boxes` (n, 4) in pixels, `labels` (n,) from 0, and with masks `masks` (n, H, W). With
        `keep_maps` the result has the maps of the pyramid and the objectness of anchors too.
        """
        maps = self.pyramid_maps(x)
        kept = {"maps": list(maps.values()), "objectness": self.rpn.head(list(maps.values()))[0]} if keep_maps else {}
        return (self._raw_outputs(x, maps) if targets is None else self._losses(x, maps, targets)) | kept

    def _losses(self, x: Tensor, maps: OrderedDict[str, Tensor], targets: Sequence[Target]) -> dict[str, Tensor]:
        if not self.training:
            raise UserError("losses need train mode; call model.train(), or leave the targets out")
        sizes = [tuple(x.shape[-2:])] * len(x)
        shifted = [{**target, "labels": target["labels"] + 1} for target in targets]  # 0 is the background
        proposals, losses = self.rpn(ImageList(x, sizes), maps, shifted)
        _, more = self.roi_heads(maps, proposals, sizes, shifted)
        return {**losses, **more}

    def _raw_outputs(self, x: Tensor, maps: OrderedDict[str, Tensor]) -> dict[str, Any]:
        """Return what every layer computes, for boxes that do not depend on the image."""
        objectness, anchor_deltas = self.rpn.head(list(maps.values()))
        boxes = [fixed_boxes(x)] * len(x)
        heads: Any = self.roi_heads
        logits, deltas = heads.box_predictor(heads.box_head(heads.box_roi_pool(maps, boxes)))
        out = {"objectness": objectness, "anchor_deltas": anchor_deltas, "class_logits": logits, "box_deltas": deltas}
        if self.has_masks:
            out["mask_logits"] = heads.mask_predictor(heads.mask_head(heads.mask_roi_pool(maps, boxes)))
        return out

    @torch.no_grad()
    def detect(self, x: Tensor, sizes: Sequence[tuple[int, int]] | None = None) -> list[Detections]:
        """Return the detections of every image, best first, in pixels of x; labels count from 0.

        `sizes` are height and width of each image inside x, without its padding. Masks are probabilities on a grid of
        28 x 28 inside each box.

        Raises: UserError in train mode, NotFinite for scores, boxes or masks that are NaN or infinite.
        """
        if self.training:
            raise UserError("detect needs eval mode; call model.eval()")
        whole = (x.shape[2], x.shape[3])
        inside = [whole] * len(x) if sizes is None else [(height, width) for height, width in sizes]
        maps, heads = self.pyramid_maps(x), (self.rpn.head, self.roi_heads.box_predictor, self.roi_heads.mask_predictor)
        with ExitStack() as hooks:  # torchvision drops boxes whose scores are not finite
            for head in filter(None, heads):
                hooks.callback(head.register_forward_hook(lambda *call: require_finite(call[2])).remove)
            proposals, _ = self.rpn(ImageList(x, inside), maps)
            found, _ = self.roi_heads(maps, proposals, inside)
        return [{**each, "labels": each["labels"] - 1} for each in found]


def checkpoint_filter_fn(state_dict: dict[str, Any], model: MaskRCNN) -> dict[str, Any]:
    """Convert a checkpoint: a Mask R-CNN's is loaded unchanged, a classifier's into the backbone."""
    return backbone_state(model, state_dict, fresh=("rel_pos_h", "rel_pos_w"))


default_cfgs = generate_default_cfgs(
    {
        "mask_rcnn": image_cfg(
            num_classes=80,
            input_size=(3, 1024, 1024),
            crop_pct=1.0,
            interpolation="bilinear",
            first_conv=None,
            classifier=_CLASS_HEADS,
        )
    }
)  # no weights of whole networks are public


_DESCRIPTION = "with a fused TDRL-ViT-Ti 27.66M parameters (TDRL Table 2)"
register_variants(__name__, partial(create_network, MaskRCNN), {"mask_rcnn": Variant({}, _DESCRIPTION)})
