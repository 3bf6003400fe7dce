"""What images isomorph's ViTs expect, as timm's registry has it."""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


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
