"""UPerNet: semantic segmentation with any timm model as its backbone.

The backbone is the attribute `backbone`, with the names that it has as a classifier: `backbone.blocks.*.attn` selects
the attention of a ViT for surgery. The head is that of the papers: segmentation-models-pytorch has another one
(docs/decisions/014).

Letters: B batch, K classes, C_i channels and H_i W_i size of feature map i, finest first.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import ConvNormAct, PatchEmbed
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from isomorph.layers.grid import pad_to_multiple
from isomorph.models.base import Variant, image_cfg, register_variants, require_images
from isomorph.models.task_networks.backbone import (
    BackboneNetwork,
    backbone_state,
    build_backbone,
    create_network,
)
from isomorph.spec import ImageSize


class PlainNeck(nn.Module):
    """Turn four feature maps of a plain ViT, all of one resolution, into maps of 4, 2, 1 and 1/2 times the resolution.

    The first two are enlarged by transposed convolutions, the last is pooled.

    Shape: four of (B, C, H, W) -> (B, C, 4 H, 4 W), (B, C, 2 H, 2 W), (B, C, H, W), (B, C, H/2, W/2, rounded up)
    Source: BEiT (Bao et al., 2022), as published; differs: odd sizes are rounded up when they are halved
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        first_upsampling, second_upsampling, twice = (
            nn.ConvTranspose2d(channels, channels, 2, 2) for _ in range(3)
        )
        four_times = nn.Sequential(
            first_upsampling, nn.BatchNorm2d(channels), nn.GELU(), second_upsampling
        )
        half = nn.MaxPool2d(2, 2, ceil_mode=True)
        self.scales = nn.ModuleList([four_times, twice, nn.Identity(), half])

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        return [scale(x) for scale, x in zip(self.scales, maps, strict=True)]


def pooling_matrix(cells: int, size: int, like: Tensor) -> Tensor:
    """Return the matrix that averages `size` values in `cells` ranges: cell i covers floor(i size / cells) to
    ceil((i + 1) size / cells), as torch's adaptive pooling.

    It is computed from the size, so that an exported network takes any size. Shape: -> (cells, size)
    """
    cell = torch.arange(cells, device=like.device)[:, None]
    position = torch.arange(size, device=like.device)[None]
    start = cell * size // cells  # (cells, 1)
    stop = ((cell + 1) * size + cells - 1) // cells
    inside = (position >= start) & (position < stop)
    return inside.to(like.dtype) / (stop - start).to(like.dtype)


def average_cells(x: Tensor, cells: int) -> Tensor:
    """Average a feature map in cells x cells rectangles. Shape: (B, C, H, W) -> (B, C, cells, cells)"""
    H, W = x.shape[-2:]
    return pooling_matrix(cells, H, x) @ x @ pooling_matrix(cells, W, x).mT


def resize_map(x: Tensor, size: Sequence[int]) -> Tensor:
    """Resize a map by bilinear interpolation. Shape: (B, C, H, W) -> (B, C, *size)"""
    return F.interpolate(x, (size[0], size[1]), mode="bilinear", align_corners=False)


def _init_convolutions(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, ConvNormAct):
            nn.init.kaiming_normal_(part.conv.weight, mode="fan_out", nonlinearity="relu")
    nn.init.normal_(module.classifier.weight, std=0.01)  # type: ignore[union-attr, arg-type]
    nn.init.zeros_(module.classifier.bias)  # type: ignore[union-attr, arg-type]


class UPerHead(nn.Module):
    """Classify every position from feature maps of several resolutions.

    The coarsest map is joined with its averages over 1, 4, 9 and 36 rectangles, which tell a position about the whole
    image. From there maps are added from coarse to fine, and all of them together are classified at the resolution of
    the finest.

    Shape: maps (B, C_i, H_i, W_i), finest first -> (B, num_classes, H_0, W_0)
    Source: UPerNet (Xiao et al., 2018) Fig. 4, with the pyramid pooling of PSPNet (Zhao et al., 2017)
    """

    def __init__(
        self,
        channels: Sequence[int],
        width: int,
        num_classes: int,
        pool_sizes: Sequence[int] = (1, 2, 3, 6),
        drop_rate: float = 0.1,
    ) -> None:
        super().__init__()
        *finer, coarsest = channels
        self.pool_sizes = tuple(pool_sizes)
        self.pooled = nn.ModuleList(ConvNormAct(coarsest, width) for _ in self.pool_sizes)
        self.context = ConvNormAct(coarsest + len(self.pool_sizes) * width, width, 3)
        self.lateral = nn.ModuleList(ConvNormAct(num_channels, width) for num_channels in finer)
        self.smooth = nn.ModuleList(ConvNormAct(width, width, 3) for _ in finer)
        self.join = ConvNormAct(len(channels) * width, width, 3)
        self.drop = nn.Dropout2d(drop_rate)
        self.classifier = nn.Conv2d(width, num_classes, 1)
        _init_convolutions(self)

    def add_context(self, x: Tensor) -> Tensor:
        """Join a map with its averages over rectangles. Shape: (B, C, H, W) -> (B, width, H, W)"""
        maps = [x]
        for conv, cells in zip(self.pooled, self.pool_sizes, strict=True):
            average = conv(average_cells(x, cells))
            maps.append(resize_map(average, x.shape[-2:]))
        return self.context(torch.cat(maps, dim=1))

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        size = maps[0].shape[-2:]
        y = self.add_context(maps[-1])
        smoothed = [resize_map(y, size)]  # coarse to fine
        for lateral, smooth, x in zip(
            reversed(self.lateral), reversed(self.smooth), reversed(maps[:-1]), strict=True
        ):
            y = lateral(x) + resize_map(y, x.shape[-2:])
            smoothed.append(resize_map(smooth(y), size))
        context = self.join(torch.cat([*reversed(smoothed[1:]), smoothed[0]], dim=1))
        return self.classifier(self.drop(context))


class FCNHead(nn.Module):
    """Classify every position of one feature map by a 3 x 3 convolution: the auxiliary head, used in training only.

    Shape: (B, C, H, W) -> (B, num_classes, H, W)
    Source: FCN (Long et al., 2015), as published with UPerNet
    """

    def __init__(self, channels: int, width: int, num_classes: int, drop_rate: float = 0.1) -> None:
        super().__init__()
        self.conv = ConvNormAct(channels, width, 3)
        self.drop = nn.Dropout2d(drop_rate)
        self.classifier = nn.Conv2d(width, num_classes, 1)
        _init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.drop(self.conv(x)))


class CoarseLogits(NamedTuple):
    """The logits before they are enlarged: those of the head, and of the auxiliary head (None without one).

    Shape: logits (B, K, H_0, W_0), auxiliary (B, K, H_i, W_i)
    """

    logits: Tensor
    auxiliary: Tensor | None


class UPerNet(BackboneNetwork):
    """Semantic segmentation: logits of K classes for every pixel of an image, from the feature maps of any backbone.

    A hierarchical backbone gives the maps of its last four resolutions. A plain ViT gives those of four blocks, which
    `PlainNeck` enlarges or pools. `channels` is the width of the head, by default that of a plain ViT, else 512.
    `auxiliary` adds a second classifier, used in training only, on the last map but one. `backbone_kwargs` are
    arguments of the backbone, `img_size` the size for which its positions are made. Images have any size: for a ViT
    they are padded with zeros to whole patches, and the logits cut again.

    Shape: x (B, in_chans, h, w) -> (B, num_classes, h, w); with `coarse` CoarseLogits, not enlarged
    Source: UPerNet (Xiao et al., 2018); for plain ViTs BEiT (Bao et al., 2022), as published; TDRL section 4.3
    Raises: UserError for a backbone without feature maps, or arguments that it does not take.
    """

    def __init__(
        self,
        backbone: str = "tdrl_vit_ti",
        num_classes: int = 150,
        in_chans: int = 3,
        img_size: int | ImageSize = 512,
        channels: int | None = None,
        pool_sizes: Sequence[int] = (1, 2, 3, 6),
        drop_rate: float = 0.1,
        drop_path_rate: float = 0.0,
        auxiliary: bool = True,
        auxiliary_channels: int = 256,
        backbone_kwargs: Mapping[str, Any] | None = None,
        backbone_pretrained: bool = False,
    ) -> None:
        super().__init__()
        self.backbone_kwargs = dict(backbone_kwargs or {})
        arguments = dict(self.backbone_kwargs)
        if drop_path_rate:
            arguments["drop_path_rate"] = drop_path_rate
        built = build_backbone(backbone, in_chans, img_size, backbone_pretrained, arguments)
        self.backbone = built.module
        self.backbone_name = backbone
        self.indices = built.indices
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.neck: nn.Module = nn.Identity()
        width = 512
        if built.is_plain:
            self.neck = PlainNeck(built.channels[0])
            width = built.channels[0]
        width = channels or width
        self.num_features = self.head_hidden_size = width
        self.head = UPerHead(built.channels, width, num_classes, pool_sizes, drop_rate)
        self.auxiliary_head = None
        if auxiliary:
            self.auxiliary_head = FCNHead(
                built.channels[-2:][0], auxiliary_channels, num_classes, drop_rate
            )

    @property
    def patch_size(self) -> ImageSize:
        """Height and width of a ViT's patches; 1 x 1 for a backbone without patches."""
        embed = getattr(self.backbone, "patch_embed", None)
        return tuple(embed.patch_size) if isinstance(embed, PatchEmbed) else (1, 1)

    def pad(self, x: Tensor) -> Tensor:
        """Pad images with zeros, right and below, to whole patches; an exported network is given whole patches."""
        ph, pw = self.patch_size
        height, width = x.shape[-2:]
        if (ph, pw) == (1, 1) or torch.compiler.is_exporting() or not (height % ph or width % pw):
            return x
        return pad_to_multiple(x, ph, pw)

    def forward_features(self, x: Tensor) -> list[Tensor]:
        """Return the maps that the heads read, finest first. Shape: (B, in_chans, h, w) -> (B, C_i, H_i, W_i) each"""
        return self.neck(self.backbone_maps(self.pad(x)))

    def forward(self, x: Tensor, coarse: bool = False) -> Tensor | CoarseLogits:
        height, width = require_images(x).shape[-2:]
        maps = self.forward_features(x)
        logits = self.head(maps)
        if not coarse:
            return self.enlarge(logits, (height, width))
        if self.auxiliary_head is None:
            return CoarseLogits(logits, None)
        return CoarseLogits(logits, self.auxiliary_head(maps[-2:][0]))

    def enlarge(self, logits: Tensor, size: ImageSize) -> Tensor:
        """Resize logits to an image of a height and width. Shape: (B, K, H_i, W_i) -> (B, K, height, width)"""
        if torch.compiler.is_exporting():
            return resize_map(logits, size)
        ph, pw = self.patch_size
        height, width = size
        padded = (height + -height % ph, width + -width % pw)
        return resize_map(logits, padded)[..., :height, :width]

    def get_classifier(self) -> nn.Module:
        """Return the last convolution of the head."""
        return self.head.classifier

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the last convolutions of both heads by untrained ones."""
        self.num_classes = num_classes
        for head in (self.head, self.auxiliary_head):
            if head is None:
                continue
            old = head.classifier
            head.classifier = nn.Conv2d(old.in_channels, num_classes, 1).to(old.weight)
            nn.init.normal_(head.classifier.weight, std=0.01)
            nn.init.zeros_(head.classifier.bias)  # type: ignore[arg-type]

    def own_cfg(self, inner: Mapping[str, Any]) -> dict[str, Any]:
        cfg = {
            key: inner[key]
            for key in ("mean", "std", "interpolation")
            if inner.get(key) is not None
        }
        first = inner.get("first_conv")
        if not isinstance(first, str):
            first = "patch_embed.proj"
        cfg["first_conv"] = f"backbone.{first}"
        cfg["classifier"] = ("head.classifier",)
        if self.auxiliary_head is not None:
            cfg["classifier"] += ("auxiliary_head.classifier",)
        cfg["num_classes"] = self.num_classes
        return cfg


def checkpoint_filter_fn(state_dict: dict[str, Any], model: UPerNet) -> dict[str, Any]:
    """Load the network's own checkpoint unchanged, a classifier's into the backbone; what it lacks keeps its values."""
    return backbone_state(model, state_dict, fresh=("gamma", "relative_bias", "prefix_bias"))


default_cfgs = generate_default_cfgs(
    {"upernet": image_cfg(num_classes=150, input_size=(3, 512, 512), interpolation="bilinear")}
)
_DESCRIPTION = "with a fused TDRL-ViT-Ti 11.46M parameters (TDRL Table 2)"
register_variants(
    __name__, partial(create_network, UPerNet), {"upernet": Variant({}, _DESCRIPTION)}
)
