"""Mask R-CNN around any timm backbone: boxes, and masks if wanted. Plain ViTs get windows and a pyramid (ViTDet).

    timm.create_model("mask_rcnn", backbone="tdrl_vit_ti", num_classes=80, masks=True)

Proposals, matching, losses and the selection of detections are torchvision's; heads have LayerNorm after convolutions,
and outputs in float32 at least.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, LayerNorm2d, resample_abs_pos_embed, to_2tuple
from timm.models import checkpoint_seq, generate_default_cfgs
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import Conv2dNormActivation, FeaturePyramidNetwork, roi_align
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from isomorph.errors import UserError
from isomorph.layers import DecomposedAttention
from isomorph.layers.grid import pad_to_multiple
from isomorph.layers.modes import at_least_float32, require_finite, upcast
from isomorph.models.base import (
    Mixin,
    State,
    Variant,
    image_cfg,
    own_filter,
    register_variants,
    require_images,
)
from isomorph.models.task_networks.backbone import (
    BackboneNetwork,
    backbone_state,
    build_backbone,
    create_network,
)
from isomorph.operations import observing
from isomorph.spec import ImageSize

# Objects of an image: boxes (n, 4) as left, top, right, bottom in pixels, labels (n,), and masks
# (n, H, W).
Target = dict[str, Tensor]

_RATIOS = (0.5, 1.0, 2.0)


class Float32Outputs(Mixin):
    """Mixin for a head with outputs in float32 at least: under autocast coordinates would be rounded to 8 bits."""

    def forward(self, x: Any) -> Any:
        return tree_map(upcast, super().forward(x))


class ProposalHead(Float32Outputs, RPNHead):
    """torchvision's RPNHead. Shape: maps -> objectness, deltas of every map"""


class BoxPredictor(Float32Outputs, FastRCNNPredictor):
    """torchvision's FastRCNNPredictor. Shape: (n, C) -> (n, K), (n, 4 K)"""


class MaskPredictor(Float32Outputs, MaskRCNNPredictor):
    """torchvision's MaskRCNNPredictor. Shape: (n, C, 14, 14) -> (n, K, 28, 28)"""


class StrideAnchors(AnchorGenerator):
    """Anchors of three shapes at every position of the maps, `strides` pixels apart.

    torchvision derives the strides from sizes, wrongly for padded images, and rounds fractions.
    """

    def __init__(self, strides: Sequence[float], scale: float) -> None:
        sizes = tuple((stride * scale,) for stride in strides)
        super().__init__(sizes, (_RATIOS,) * len(strides))
        self.strides = tuple(strides)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        first = feature_maps[0]
        # bfloat16 rounds coordinates above 512 to multiples of 4 pixels
        dtype = at_least_float32(first)
        self.set_cell_anchors(dtype, first.device)
        strides = [[first.new_tensor(stride, dtype=dtype)] * 2 for stride in self.strides]
        sizes = [list(level.shape[-2:]) for level in feature_maps]
        anchors = torch.cat(self.grid_anchors(sizes, strides))
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
        self.output_size = (size, size)
        self.strides = tuple(strides)

    def forward(self, maps: Mapping[str, Tensor], boxes: Sequence[Tensor], _: Any = None) -> Tensor:
        levels = list(maps.values())[: len(self.strides)]
        first = levels[0]
        numbered = [F.pad(own, (1, 0), value=image) for image, own in enumerate(boxes)]
        regions = torch.cat(numbered)  # (n, 5): image, box
        chosen = self.levels_of(regions[:, 1:])
        out = first.new_zeros(len(regions), first.shape[1], *self.output_size)
        for level, (features, stride) in enumerate(zip(levels, self.strides, strict=True)):
            rows = torch.where(chosen == level)[0]
            # bfloat16 rounds coordinates above 512 to multiples of 4 pixels
            exact = upcast(features)
            own = regions[rows].to(exact.dtype)
            pooled = roi_align(exact, own, self.output_size, spatial_scale=1 / stride, aligned=True)
            out = out.index_put((rows,), pooled.to(out.dtype))
        return out

    def levels_of(self, boxes: Tensor) -> Tensor:
        """Return the number of the map for every box: 224 x 224 pixels are read at stride 16. Shape: (n, 4) -> (n,)"""
        left, top, right, bottom = boxes.unbind(1)
        sizes = ((right - left) * (bottom - top)).clamp(min=0).sqrt()
        octaves = torch.floor(torch.log2(sizes / 224 + 1e-6))
        levels = octaves + math.log2(16 / self.strides[0])
        return levels.clamp(0, len(self.strides) - 1).long()


def build_rpn(
    channels: int,
    strides: Sequence[float],
    anchor_scale: float,
    proposals: int,
) -> RegionProposalNetwork:
    """Return the network that proposes boxes: two 3 x 3 convolutions, and anchors of three shapes on every map.

    Source: G2SD's ViTDet: 2000 boxes a map before suppression in training, 1000 in testing, 1000 after it
    """
    return RegionProposalNetwork(
        StrideAnchors(strides, anchor_scale),
        ProposalHead(channels, len(_RATIOS), conv_depth=2),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=256,
        positive_fraction=0.5,
        pre_nms_top_n={"training": 2 * proposals, "testing": proposals},
        post_nms_top_n={"training": proposals, "testing": proposals},
        nms_thresh=0.7,
    )


def fixed_boxes(x: Tensor) -> Tensor:
    """Return boxes that cover an image at three sizes: the whole, its quarters, its sixteenths. Shape: -> (21, 4)"""
    H, W = x.shape[-2:]
    boxes: list[Any] = []
    for parts in (1, 2, 4):
        height = H / parts
        width = W / parts
        for row, column in itertools.product(range(parts), repeat=2):
            top = row * height
            left = column * width
            boxes.append((left, top, left + width, top + height))
    return torch.tensor(boxes, dtype=at_least_float32(x), device=x.device)


_PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token")


def _without_prefix_tokens(state: State) -> State:
    """Drop a ViT's prefix tokens and their positions; those of patches have to be a square.

    Raises: UserError if they are not, as of weights for rectangular images.
    """
    tokens = [state[name] for name in _PREFIX_TOKENS if name in state]
    state = {name: tensor for name, tensor in state.items() if name not in _PREFIX_TOKENS}
    positions = state.get("pos_embed")
    if not isinstance(positions, Tensor) or positions.ndim != 3:
        return state
    count = positions.shape[1]
    # registers may have no positions, and tokens may have been removed before
    counts = list(itertools.accumulate((token.shape[1] for token in tokens), initial=0))
    for prefix in (*reversed(counts), 1, 2):
        if prefix < count and math.isqrt(count - prefix) ** 2 == count - prefix:
            state["pos_embed"] = positions[:, prefix:]
            return state
    raise UserError(
        f"the weights have {count} positions, which do not fill a square of patches; give weights for square images"
    )


class WindowedViT(nn.Module):
    """Turn a plain ViT into a backbone for large images: one feature map, at a cost that grows with their area.

    Attention of most blocks is limited to windows; that of the `global_blocks`, the last of each quarter by default,
    is not. Both know relative positions by row and column, which start at zero. The class token is dropped, and
    absolute positions are resized to the image. There is no norm after the last block. Projections stay those of the
    given network, pyramids included. `img_size` is the image size that the relative positions of global blocks are
    created for; all positions are resized to other sizes.

    Shape: x (B, in_chans, height, width), multiples of the patch -> a list of one (B, C, height / patch, width / patch)
    Source: ViTDet (Li et al., 2022), section 3
    Raises: UserError for a window below 1, or a block that the network does not have.
    """

    def __init__(
        self,
        vit: VisionTransformer,
        img_size: ImageSize,
        window: int = 14,
        global_blocks: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        depth = len(vit.blocks)
        # 2, 5, 8, 11 of 12
        quarters = [math.ceil(quarter * depth / 4) - 1 for quarter in range(1, 5)]
        chosen = tuple(quarters if global_blocks is None else global_blocks)
        if window < 1 or any(not 0 <= block < depth for block in chosen):
            raise UserError(
                f"window {window} must be at least 1, and global_blocks {chosen} from 0 to {depth - 1}",
            )
        self.source_filter = own_filter(type(vit))
        self.pretrained_cfg = getattr(vit, "pretrained_cfg", None)
        self.grad_checkpointing = False
        self.patch_embed = vit.patch_embed
        self.pos_drop = vit.pos_drop
        self.norm_pre = vit.norm_pre
        self.blocks = vit.blocks
        self.grid_size = tuple(vit.patch_embed.grid_size)
        self.pos_embed = None
        if vit.pos_embed is not None:
            prefix = 0 if vit.no_embed_class else vit.num_prefix_tokens
            positions = vit.pos_embed.detach()[:, prefix:]
            self.pos_embed = nn.Parameter(positions.clone())
        self.num_prefix_tokens = 0
        self.no_embed_class = True
        self.embed_dim = vit.embed_dim
        height, width = img_size
        ph, pw = self.patch_embed.patch_size
        grid = (math.ceil(height / ph), math.ceil(width / pw))
        for number, block in enumerate(self.blocks):
            if number in chosen:
                block.attn = DecomposedAttention.from_attention(block.attn, None, grid)
            else:
                block.attn = DecomposedAttention.from_attention(block.attn, (window, window))

    def convert_foreign(self, state: State) -> State:
        """Return a plain ViT's weights without prefix tokens, under the backbone's names."""
        return self.source_filter(_without_prefix_tokens(state), self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass of training instead of storing their activations."""
        self.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of parameter names by block, for layer decay."""
        return dict(stem=r"^(?:patch_embed|pos_embed|norm_pre)", blocks=r"^blocks\.(\d+)")

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: the absolute positions."""
        return {"pos_embed"}

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.patch_embed(x)  # (B, H, W, C)
        if self.pos_embed is not None:
            grid = (x.shape[1], x.shape[2])
            positions = resample_abs_pos_embed(
                self.pos_embed, grid, self.grid_size, num_prefix_tokens=0
            )
            x = x + positions.unflatten(1, grid)
        x = self.norm_pre(self.pos_drop(x))
        recompute = self.grad_checkpointing and self.training
        x = checkpoint_seq(self.blocks, x) if recompute else self.blocks(x)
        return [x.permute(0, 3, 1, 2)]


class SimpleFeaturePyramid(nn.Module):
    """Maps at 4, 2, 1 and 1/2 times the resolution of a single map, and one at 1/4, which is the last one subsampled.

    Shape: one map (B, in_channels, H, W), both even -> five of (B, out_channels, 4 H, 4 W) to
    (B, out_channels, H / 4, W / 4)
    Source: ViTDet (Li et al., 2022), section 3
    """

    def __init__(self, in_channels: int, out_channels: int = 256) -> None:
        super().__init__()
        half = in_channels // 2
        quarter = in_channels // 4
        enlarged = nn.Sequential(
            nn.ConvTranspose2d(in_channels, half, 2, 2),
            LayerNorm2d(half),
            nn.GELU(),
            nn.ConvTranspose2d(half, quarter, 2, 2),
        )
        resized: list[tuple[nn.Module, int]] = [
            (enlarged, quarter),
            (nn.ConvTranspose2d(in_channels, half, 2, 2), half),
            (nn.Identity(), in_channels),
            (nn.MaxPool2d(2), in_channels),
        ]
        conv = partial(
            Conv2dNormActivation, norm_layer=LayerNorm2d, activation_layer=None, bias=False
        )
        self.levels = nn.ModuleList()
        for resize, width in resized:
            project = conv(width, out_channels, 1)
            smooth = conv(out_channels, out_channels, 3)
            self.levels.append(nn.Sequential(resize, project, smooth))

    def forward(self, maps: Mapping[str, Tensor]) -> OrderedDict[str, Tensor]:
        (x,) = maps.values()
        levels = [level(x) for level in self.levels]
        levels.append(F.max_pool2d(levels[-1], 1, 2))
        return _named_levels(levels)


def _named_levels(levels: Sequence[Tensor]) -> OrderedDict[str, Tensor]:
    """Return the maps of a pyramid, finest first, by their names: p2, p3, ..."""
    return OrderedDict((f"p{number}", level) for number, level in enumerate(levels, 2))


# Detections in an image: boxes (n, 4) as left, top, right, bottom, labels (n,), scores (n,), masks
# (n, 1, 28, 28).
Detections = dict[str, Tensor]

_LAST_LAYERS = (
    "box_predictor.cls_score",
    "box_predictor.bbox_pred",
    "mask_predictor.mask_fcn_logits",
)
_CLASS_HEADS = tuple(f"roi_heads.{layer}" for layer in _LAST_LAYERS)


def _has_plain_attention(model: nn.Module) -> bool:
    """True for a plain ViT whose attention is timm's."""
    if not isinstance(model, VisionTransformer):
        return False
    return all(type(block.attn) is Attention for block in model.blocks)


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
        img_size: int | ImageSize = 1024,
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
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.has_masks = masks
        self.backbone_kwargs = dict(backbone_kwargs or {})
        self.img_size = to_2tuple(img_size)
        arguments = dict(self.backbone_kwargs)
        if drop_path_rate is not None:
            arguments["drop_path_rate"] = drop_path_rate
        built = build_backbone(
            backbone, in_chans, pretrained=backbone_pretrained, arguments=arguments
        ).distinct()
        self.backbone = built.module
        self.indices = built.indices
        if built.is_plain:
            if window and _has_plain_attention(built.module):
                self.backbone = WindowedViT(built.module, self.img_size, window, global_blocks)
                self.indices = None
            self.pyramid: nn.Module = SimpleFeaturePyramid(built.channels[-1], channels)
            stride = built.reductions[-1]
            self.strides = tuple(stride * factor / 4 for factor in (1, 2, 4, 8, 16))
        else:
            self.pyramid = FeaturePyramidNetwork(
                list(built.channels), channels, LastLevelMaxPool(), LayerNorm2d
            )
            self.strides = (*built.reductions, 2 * built.reductions[-1])
        self.rpn = build_rpn(channels, self.strides, anchor_scale, proposals)
        self.roi_heads = self._new_regions(channels, features, samples, score_threshold, detections)

    def _new_regions(
        self,
        channels: int,
        features: int,
        samples: int,
        threshold: float,
        detections: int,
    ) -> RoIHeads:
        strides = self.strides[:-1]
        classes = self.num_classes + 1  # class 0 is the background
        masks: dict[str, Any] = {}
        if self.has_masks:
            masks["mask_roi_pool"] = PyramidRoIAlign(14, strides)
            masks["mask_head"] = MaskRCNNHeads(channels, [channels] * 4, 1, norm_layer=LayerNorm2d)
            masks["mask_predictor"] = MaskPredictor(channels, channels, classes)
        return RoIHeads(
            PyramidRoIAlign(7, strides),
            FastRCNNConvFCHead(
                (channels, 7, 7), [channels] * 4, [features], norm_layer=LayerNorm2d
            ),
            BoxPredictor(features, classes),
            fg_iou_thresh=0.5,
            bg_iou_thresh=0.5,
            batch_size_per_image=samples,
            positive_fraction=0.25,
            bbox_reg_weights=(10.0, 10.0, 5.0, 5.0),
            score_thresh=threshold,
            nms_thresh=0.5,
            detections_per_img=detections,
            **masks,
        )

    def own_cfg(self, inner: Mapping[str, Any]) -> dict[str, Any]:
        heads = _CLASS_HEADS if self.has_masks else _CLASS_HEADS[:2]
        cfg = {
            "input_size": (self.in_chans, *self.img_size),
            "num_classes": self.num_classes,
            "classifier": heads,
        }
        for key in ("mean", "std"):
            if inner.get(key) is not None and self.in_chans == 3:
                cfg[key] = inner[key]
        return cfg

    def get_classifier(self) -> nn.Module:
        """Return the layer that gives the class logits of boxes."""
        return self.roi_heads.box_predictor.cls_score

    def pyramid_maps(self, x: Tensor) -> OrderedDict[str, Tensor]:
        """Return the maps of the pyramid, finest first. Shape: (B, in_chans, H, W) -> (B, C, H / stride, W / stride)"""
        require_images(x)
        cell = int(self.strides[-2])
        maps = self.backbone_maps(pad_to_multiple(x, cell, cell))
        return self.pyramid(_named_levels(maps))

    def forward(
        self,
        x: Tensor,
        targets: Sequence[Target] | None = None,
        keep_maps: bool = False,
    ) -> dict[str, Any]:
        """Return the losses for targets; without targets all outputs before boxes are selected.

        A target is a dict of `boxes` (n, 4) in pixels, `labels` (n,) from 0, and with masks `masks` (n, H, W). With
        `keep_maps` the result has the maps of the pyramid and the objectness of anchors too.
        """
        maps = self.pyramid_maps(x)
        out: dict[str, Any] = {}
        if targets is None:
            out |= self._raw_outputs(x, maps)
        else:
            out |= self._losses(x, maps, targets)
        if keep_maps:
            out["maps"] = list(maps.values())
            out["objectness"] = self.rpn.head(out["maps"])[0]
        return out

    def _losses(
        self,
        x: Tensor,
        maps: OrderedDict[str, Tensor],
        targets: Sequence[Target],
    ) -> dict[str, Tensor]:
        if not self.training:
            raise UserError("losses need train mode; call model.train(), or leave the targets out")
        sizes = [tuple(x.shape[-2:])] * len(x)
        # 0 is the background
        shifted = [{**target, "labels": target["labels"] + 1} for target in targets]
        proposals, losses = self.rpn(ImageList(x, sizes), maps, shifted)
        _, roi_losses = self.roi_heads(maps, proposals, sizes, shifted)
        return {**losses, **roi_losses}

    def _raw_outputs(self, x: Tensor, maps: OrderedDict[str, Tensor]) -> dict[str, Any]:
        objectness, anchor_deltas = self.rpn.head(list(maps.values()))
        boxes = [fixed_boxes(x)] * len(x)
        heads: Any = self.roi_heads
        features = heads.box_roi_pool(maps, boxes)
        logits, deltas = heads.box_predictor(heads.box_head(features))
        out = {
            "objectness": objectness,
            "anchor_deltas": anchor_deltas,
            "class_logits": logits,
            "box_deltas": deltas,
        }
        if self.has_masks:
            features = heads.mask_roi_pool(maps, boxes)
            out["mask_logits"] = heads.mask_predictor(heads.mask_head(features))
        return out

    @torch.no_grad()
    def detect(self, x: Tensor, sizes: Sequence[ImageSize] | None = None) -> list[Detections]:
        """Return the detections of every image, best first, in pixels of x; labels count from 0.

        `sizes` are height and width of each image inside x, without its padding. Masks are probabilities on a grid of
        28 x 28 inside each box.

        Raises: UserError in train mode, NotFinite for scores, boxes or masks that are NaN or infinite.
        """
        if self.training:
            raise UserError("detect needs eval mode; call model.eval()")
        if sizes is None:
            sizes = [(x.shape[2], x.shape[3])] * len(x)
        inside = [(height, width) for height, width in sizes]
        maps = self.pyramid_maps(x)
        heads = ["rpn.head", "roi_heads.box_predictor"]
        if self.has_masks:
            heads.append("roi_heads.mask_predictor")
        # torchvision drops boxes whose scores are not finite
        with observing(self, after=lambda call: require_finite(call.output), names=heads):
            proposals, _ = self.rpn(ImageList(x, inside), maps)
            detections, _ = self.roi_heads(maps, proposals, inside)
        return [{**detection, "labels": detection["labels"] - 1} for detection in detections]


def checkpoint_filter_fn(state_dict: dict[str, Any], model: MaskRCNN) -> dict[str, Any]:
    """Convert a checkpoint: a Mask R-CNN's is loaded unchanged, a classifier's into the backbone."""
    return backbone_state(model, state_dict, fresh=("rel_pos_h", "rel_pos_w"))


_SIZE = dict(input_size=(3, 1024, 1024), crop_pct=1.0, interpolation="bilinear")
_CFG = image_cfg(num_classes=80, first_conv=None, classifier=_CLASS_HEADS, **_SIZE)
default_cfgs = generate_default_cfgs({"mask_rcnn": _CFG})  # no weights of whole networks are public

_DESCRIPTION = "with a fused TDRL-ViT-Ti 27.66M parameters (TDRL Table 2)"
register_variants(
    __name__, partial(create_network, MaskRCNN), {"mask_rcnn": Variant({}, _DESCRIPTION)}
)
