"""Layouts of attention maps in timm's layers, and layers of timm that have no attention map."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

_CHANNELS = "attends between channels, so it has no map over tokens"
_KEYS_ALONE = "takes the softmax of its keys alone, so it has no map from queries to keys"
_POOLS = "pools tokens with weights that do not depend on a query"

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
    "timm.models.efficientvit_mit.LiteMLA": "is linear attention, which has no map from queries to keys",
}
"""Layers of timm that are called attention but have no map from queries to keys, with the reason."""


def _names_of(layer: nn.Module) -> list[str]:
    """Return the full names of the layer's class and its base classes."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(layer).__mro__]


def no_map_reason(layer: nn.Module) -> str | None:
    """Return why a layer has no attention map, or None."""
    return next((NO_MAP_REASONS[name] for name in _names_of(layer) if name in NO_MAP_REASONS), None)


def _add_heads_axis(_: Any, tensor: Tensor) -> Tensor:
    """Add an axis for heads if there is none, and flatten groups of tokens (windows) into the batch.

    Shape: (B, ., .), (B, nh, ., .) or (B, nh, groups, ., .) -> (B groups, nh, ., .)
    """
    if tensor.ndim == 3:
        return tensor[:, None]
    return tensor.transpose(1, 2).flatten(0, 1) if tensor.ndim == 5 else tensor


def _groups_first(_: Any, tensor: Tensor) -> Tensor:
    """Flatten groups of tokens into the batch. Shape: (B, groups, nh, ., .) -> (B groups, nh, ., .)"""
    return tensor.flatten(0, 1)


def _heads_with_images(layer: Any, tensor: Tensor) -> Tensor:
    """Separate the heads from the batch. Shape: (B nh, ., .) or (B nh, groups, ., .) -> (B groups, nh, ., .)"""
    tensor = tensor.unflatten(0, (-1, layer.num_heads))
    return tensor.transpose(1, 2).flatten(0, 1) if tensor.ndim == 5 else tensor


_LAYOUTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "timm.models.twins.LocallyGroupedAttn": _groups_first,
    "timm.layers.bottleneck_attn.BottleneckAttn": _heads_with_images,
    "timm.layers.halo_attn.HaloAttn": _heads_with_images,
    "timm.models.vision_transformer_sam.Attention": _heads_with_images,
}


def to_standard_layout(layer: nn.Module, tensor: Tensor) -> Tensor:
    """Return maps, queries or keys of any layer in the standard layout. Shape: -> (B, nh, ., .)"""
    layout = next((_LAYOUTS[name] for name in _names_of(layer) if name in _LAYOUTS), _add_heads_axis)
    return layout(layer, tensor)


_NO_FUSED_MAP = {"timm.layers.diff_attention.DiffAttention"}
"""Layers whose fused form subtracts two outputs, so that only their plain form has a map."""


def fused_form_has_no_map(layer: nn.Module) -> bool:
    """True if the fused form of the layer has no map."""
    return bool(_NO_FUSED_MAP.intersection(_names_of(layer)))
