"""What isomorph's ViTs share: the images they expect, as timm's registry has it, and how timm builds them."""

from collections.abc import Callable
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg


def vit_cfg(**weights: Any) -> dict[str, Any]:
    """The pretrained entry of a ViT for ImageNet at 224 and any other size, with where its weights are."""
    return {
        **weights,
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "fixed_input_size": False,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }


def build_vit(
    kind: type, variant: str, pretrained: bool, filter_fn: Callable[..., Any], arguments: dict[str, Any]
) -> Any:
    """Builds a variant through timm, its features taken block by block."""
    kept = {name: value for name, value in arguments.items() if name != "out_indices"}
    features = dict(out_indices=arguments.get("out_indices", 3), feature_cls="getter")
    return build_model_with_cfg(kind, variant, pretrained, pretrained_filter_fn=filter_fn, feature_cfg=features, **kept)
