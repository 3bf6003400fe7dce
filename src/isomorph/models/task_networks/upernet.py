"""UPerNet: semantic segmentation with any timm model as its backbone.

The backbone is the attribute `backbone`, with the names that it has as a classifier: `backbone.blocks.*.attn` selects
the attention of a ViT for surgery.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed
from timm.models import build_model_with_cfg, generate_default_cfgs, group_parameters, register_model
from torch import Tensor, nn

from isomorph.errors import UserError
from isomorph.layers.weight_decay import parameters_without_decay
from isomorph.models.task_networks.backbone_weights import backbone_state
from isomorph.models.task_networks.feature_backbone import build_backbone, feature_maps
from isomorph.models.task_networks.upernet_head import FCNHead, PlainNeck, UPerHead, resize_map
from isomorph.models.vit_cfg import require_images, vit_cfg

_SHARED_WITH_BACKBONE = ("mean", "std", "interpolation")
"""Entries of the backbone's pretrained_cfg that are the network's too."""
_NEW_IN_A_CLASSIFIER = ("gamma", "relative_bias", "prefix_bias")
"""Last names of tensors of the backbone that a classifier's checkpoint may lack."""


class CoarseLogits(NamedTuple):
    """The logits before they are enlarged: those of the head, and of the auxiliary head (None without one).

    Shape: logits (B, K, H_0, W_0), auxiliary (B, K, H_i, W_i)
    """

    logits: Tensor
    auxiliary: Tensor | None


class UPerNet(nn.Module):
    """Semantic segmentation: logits of K classes for every pixel of an image, from the feature maps of any backbone.

    A hierarchical backbone gives the maps of its last four resolutions. A plain ViT gives those of four blocks, which
    `PlainNeck` enlarges or pools. `channels` is the width of the head, by default that of a plain ViT, else 512.
    `auxiliary` adds a second classifier, used in training only, on the last map but one. `backbone_kwargs` are
    arguments of the backbone, `feature_indices` the feature maps that it gives, `img_size` the size for which its
    positions are made. Images have any size: for a ViT they are padded with zeros to whole patches, and the logits cut
    again.

    Shape: x (B, in_chans, h, w) -> (B, num_classes, h, w); with `coarse` CoarseLogits, not enlarged
    Source: UPerNet (Xiao et al., 2018); for plain ViTs BEiT (Bao et al., 2022), as published; TDRL section 4.3
    Raises: UserError for a backbone without feature maps, or arguments that it does not take.
    """

    def __init__(
        self,
        backbone: str = "tdrl_vit_ti",
        num_classes: int = 150,
        in_chans: int = 3,
        img_size: int | tuple[int, int] = 512,
        channels: int | None = None,
        feature_indices: Sequence[int] | None = None,
        pool_sizes: Sequence[int] = (1, 2, 3, 6),
        drop_rate: float = 0.1,
        drop_path_rate: float = 0.0,
        auxiliary: bool = True,
        auxiliary_channels: int = 256,
        backbone_kwargs: Mapping[str, Any] | None = None,
        backbone_pretrained: bool = False,
    ) -> None:
        super().__init__()
        arguments = {**({"drop_path_rate": drop_path_rate} if drop_path_rate else {}), **(backbone_kwargs or {})}
        built = build_backbone(backbone, in_chans, img_size, feature_indices, backbone_pretrained, arguments)
        self.backbone, self.backbone_name, self.indices = built.module, backbone, built.indices
        self.backbone_kwargs = dict(backbone_kwargs or {})
        self.num_classes, self.in_chans = num_classes, in_chans
        self.neck: nn.Module = nn.Identity()
        if built.is_plain:
            _check_four_maps(built.indices)
            self.neck = PlainNeck(built.channels[0])
        width = channels or (built.channels[0] if built.is_plain else 512)
        self.num_features = self.head_hidden_size = width
        self.head = UPerHead(built.channels, width, num_classes, pool_sizes, drop_rate)
        self.auxiliary_head: FCNHead | None = None
        if auxiliary:
            self.auxiliary_head = FCNHead(built.channels[-2:][0], auxiliary_channels, num_classes, drop_rate)

    @property
    def fused_arguments(self) -> dict[str, Any]:
        """Arguments that create the network with its backbone fused; empty if the backbone has none."""
        fused = getattr(self.backbone, "fused_arguments", None)
        return {"backbone_kwargs": {**self.backbone_kwargs, **fused}} if fused else {}

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width that images are padded to multiples of."""
        embed = getattr(self.backbone, "patch_embed", None)
        return tuple(embed.patch_size) if isinstance(embed, PatchEmbed) else (1, 1)

    def pad(self, x: Tensor) -> Tensor:
        """Pad images with zeros, right and below, to whole patches; an exported network is given whole patches."""
        (ph, pw), (height, width) = self.patch_size, x.shape[-2:]
        if (ph, pw) == (1, 1) or torch.compiler.is_exporting() or not (height % ph or width % pw):
            return x
        return F.pad(x, (0, -width % pw, 0, -height % ph))

    def forward_features(self, x: Tensor) -> list[Tensor]:
        """Return the maps that the heads read, finest first. Shape: (B, in_chans, h, w) -> (B, C_i, H_i, W_i) each"""
        return self.neck(feature_maps(self.backbone, self.indices, self.pad(x)))

    def forward(self, x: Tensor, coarse: bool = False) -> Tensor | CoarseLogits:
        height, width = require_images(x).shape[-2:]
        maps = self.forward_features(x)
        logits = self.head(maps)
        if coarse:
            second = self.auxiliary_head(maps[-2:][0]) if self.auxiliary_head is not None else None
            return CoarseLogits(logits, second)
        return self.enlarge(logits, (height, width))

    def enlarge(self, logits: Tensor, size: tuple[int, int]) -> Tensor:
        """Resize logits to an image of a height and width. Shape: (B, K, H_i, W_i) -> (B, K, height, width)"""
        if torch.compiler.is_exporting():
            return resize_map(logits, size)
        (ph, pw), (height, width) = self.patch_size, size
        padded = (height + -height % ph, width + -width % pw)
        return resize_map(logits, padded)[..., :height, :width]

    def get_classifier(self) -> nn.Module:
        """Return the classifier of the head."""
        return self.head.classifier

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the classifiers of both heads by untrained ones."""
        self.num_classes = num_classes
        for head in filter(None, (self.head, self.auxiliary_head)):
            old: Any = head.classifier
            head.classifier = nn.Conv2d(old.in_channels, num_classes, 1).to(old.weight)
            nn.init.normal_(head.classifier.weight, std=0.01)
            nn.init.zeros_(head.classifier.bias)  # type: ignore[arg-type]

    def no_weight_decay(self) -> set[str]:
        """Return the names of the backbone's parameters without weight decay."""
        own: set[str] = getattr(self.backbone, "no_weight_decay", set)()
        return {f"backbone.{name}" for name in own} | parameters_without_decay(self)

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Return the layer of each parameter for layer decay: those of the backbone, then everything else."""
        matcher = self.backbone.group_matcher(coarse=coarse)  # type: ignore[operator]
        layers = group_parameters(self.backbone, matcher, reverse=True)
        last = max(layers.values()) + 1
        return lambda name: layers.get(name.removeprefix("backbone."), last) if name.startswith("backbone.") else last

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's blocks in the backward pass instead of storing their activations."""
        self.backbone.set_grad_checkpointing(enable)  # type: ignore[operator]


def _check_four_maps(indices: Sequence[int]) -> None:
    """Raise UserError unless a plain ViT gives four maps."""
    if len(indices) != 4:
        raise UserError(f"feature_indices {list(indices)}: a plain ViT must give four feature maps; name four blocks")


def checkpoint_filter_fn(state_dict: dict[str, Any], model: UPerNet) -> dict[str, Any]:
    """Convert a checkpoint: the network's own is loaded unchanged, a classifier's into the backbone.

    LayerScale and relative positions that a classifier does not have keep the network's values.
    """
    return backbone_state(model, state_dict, _NEW_IN_A_CLASSIFIER)


default_cfgs = generate_default_cfgs(
    {
        "upernet": vit_cfg(
            num_classes=150,
            input_size=(3, 512, 512),
            interpolation="bilinear",
            first_conv="backbone.patch_embed.proj",
            classifier=("head.classifier", "auxiliary_head.classifier"),
        )
    }
)


@register_model
def upernet(pretrained: bool = False, **kwargs: Any) -> UPerNet:
    """UPerNet with any timm model as `backbone`: 11.46M parameters with a fused TDRL-ViT-Ti (TDRL Table 2).

    `pretrained` gives the backbone its public weights; the network has none.
    """
    overlay = kwargs.pop("pretrained_cfg_overlay", None) or {}
    model = build_model_with_cfg(UPerNet, "upernet", False, backbone_pretrained=pretrained, **kwargs)
    inner = getattr(model.backbone, "pretrained_cfg", None) or {}
    first = inner.get("first_conv")
    shared = {key: inner[key] for key in _SHARED_WITH_BACKBONE if inner.get(key) is not None}
    names = {"first_conv": f"backbone.{first}"} if isinstance(first, str) else {}
    heads = ("head.classifier", "auxiliary_head.classifier")[: 1 + (model.auxiliary_head is not None)]
    model.pretrained_cfg = model.default_cfg = {
        **model.pretrained_cfg,
        **shared,
        **names,
        "classifier": heads,
        "num_classes": model.num_classes,
        **overlay,
    }
    return model
