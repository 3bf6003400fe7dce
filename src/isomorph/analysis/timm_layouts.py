"""How maps lie in layers that lay them out in their own way, and layers whose weights are no such map."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

CHANNELS = "attends from channels to channels: it has no map over places"
KEYS_ALONE = "takes the softmax of its keys alone: no query is compared with a key, so there is no map"
POOLS = "pools places with weights that no query makes"

REFUSED = {
    "timm.models.xcit.XCA": CHANNELS,
    "timm.models.edgenext.CrossCovarianceAttn": CHANNELS,
    "timm.models.davit.ChannelAttention": CHANNELS,
    "timm.models.davit.ChannelAttentionV2": CHANNELS,
    "timm.models.coat.FactorAttnConvRelPosEnc": KEYS_ALONE,
    "timm.layers.lambda_layer.LambdaLayer": KEYS_ALONE,
    "timm.models.mobilevit.LinearSelfAttention": KEYS_ALONE,
    "timm.models.swiftformer.EfficientAdditiveAttention": KEYS_ALONE,
    "timm.layers.global_context.GlobalContext": POOLS,
    "timm.layers.non_local_attn.BilinearAttnTransform": POOLS,
    "timm.models.efficientvit_mit.LiteMLA": "is linear attention: it never weighs one place against the others",
}
"""Layers of timm that are called attention but have no map of queries and keys, and why."""


def _names_of(layer: nn.Module) -> list[str]:
    """Full names of the layer's classes, its own first."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(layer).__mro__]


def refusal(layer: nn.Module) -> str | None:
    """Why the layer has no map, or None."""
    return next((REFUSED[name] for name in _names_of(layer) if name in REFUSED), None)


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


LAYOUTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "timm.models.twins.LocallyGroupedAttn": _groups_first,
    "timm.layers.bottleneck_attn.BottleneckAttn": _heads_with_images,
    "timm.layers.halo_attn.HaloAttn": _heads_with_images,
    "timm.models.vision_transformer_sam.Attention": _heads_with_images,
}


def laid_out(layer: nn.Module, found: Tensor) -> Tensor:
    """Maps, queries or keys of a layer with the axes of all others. Shape: -> (B, nh, ., .)"""
    layout = next((LAYOUTS[name] for name in _names_of(layer) if name in LAYOUTS), _as_it_comes)
    return layout(layer, found)


UNFUSED = {"timm.layers.diff_attention.DiffAttention"}
"""Layers whose fused form takes the difference of two outputs, so that their map exists in the plain form only."""


def hides_map(layer: nn.Module) -> bool:
    """Whether the layer's fused form has no map."""
    return bool(UNFUSED.intersection(_names_of(layer)))
