"""How maps lie in layers that lay them out in their own way, and layers whose weights are no such map."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

_CHANNELS = "attends from channels to channels: it has no map over places"
_KEYS_ALONE = "takes the softmax of its keys alone: no query is compared with a key, so there is no map"
_POOLS = "pools places with weights that no query makes"

NO_MAP_REASONS = {
    "timm.models.xcit.XCA": _CHANNELS,
    "timm.models.edgenext.CrossCovarianceAttn": _CHANNELS,
    "timm.models.davit.ChannelAttention": _CHANNELS,
    "timm.models.davit.ChannelAttentionV2": _CHANNELS,
    "timm.models.coat.FactorAttnConvRelPosEnc": _KEYS_ALONE,
    "timm.layers.lambda_layer.LambdaLayer": _KEYS_ALONE,
    "timm.models.mobilevit.LinearSelfAttention": _KEYS_ALONE,
    "timm.models.swiftformer.EfficientAdditiveAttention": _KEYS_ALONE,
    "timm.layers.global_context.GlobalContext": _POOLS,
    "timm.layers.non_local_attn.BilinearAttnTransform": _POOLS,
    "timm.models.efficientvit_mit.LiteMLA": "is linear attention: it never weighs one place against the others",
}
"""Layers of timm that are called attention but have no map of queries and keys, and why."""


def _names_of(layer: nn.Module) -> list[str]:
    """Full names of the layer's classes, its own first."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(layer).__mro__]


def no_map_reason(layer: nn.Module) -> str | None:
    """Why the layer has no map, or None."""
    return next((NO_MAP_REASONS[name] for name in _names_of(layer) if name in NO_MAP_REASONS), None)


def _as_it_comes(_: Any, found: Tensor) -> Tensor:
    """One head where there is no axis for heads; groups of places (windows) go with the images.

    Shape: (B, ., .), (B, nh, ., .) or (B, nh, groups, ., .) -> (B groups, nh, ., .)
    """
    if found.ndim == 3:
        return found[:, None]
    return found.transpose(1, 2).flatten(0, 1) if found.ndim == 5 else found


def _groups_first(_: Any, found: Tensor) -> Tensor:
    """Shape: (B, groups, nh, ., .) -> (B groups, nh, ., .)"""
    return found.flatten(0, 1)


def _heads_with_images(layer: Any, found: Tensor) -> Tensor:
    """Shape: (B nh, ., .) or (B nh, groups, ., .) -> (B groups, nh, ., .)"""
    found = found.unflatten(0, (-1, layer.num_heads))
    return found.transpose(1, 2).flatten(0, 1) if found.ndim == 5 else found


_LAYOUTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "timm.models.twins.LocallyGroupedAttn": _groups_first,
    "timm.layers.bottleneck_attn.BottleneckAttn": _heads_with_images,
    "timm.layers.halo_attn.HaloAttn": _heads_with_images,
    "timm.models.vision_transformer_sam.Attention": _heads_with_images,
}


def to_standard_layout(layer: nn.Module, found: Tensor) -> Tensor:
    """Maps, queries or keys of a layer with the axes of all others. Shape: -> (B, nh, ., .)"""
    layout = next((_LAYOUTS[name] for name in _names_of(layer) if name in _LAYOUTS), _as_it_comes)
    return layout(layer, found)


_NO_FUSED_MAP = {"timm.layers.diff_attention.DiffAttention"}
"""Layers whose fused form takes the difference of two outputs, so that their map exists in the plain form only."""


def fused_form_has_no_map(layer: nn.Module) -> bool:
    """Whether the layer's fused form has no map."""
    return bool(_NO_FUSED_MAP.intersection(_names_of(layer)))
