"""What runs on ImageNet-1k share: the fields of the data, DeiT's augmentation, and the text of a result."""

from typing import Any

Fields = dict[str, Any]
"""Fields of a recipe, or of a group in it, that differ from their defaults."""

DEIT: Fields = dict(
    auto_augment="rand-m9-mstd0.5-inc1",
    color_jitter=0.4,
    erasing=0.25,
    mixup=0.8,
    cutmix=1.0,
    smoothing=0.1,
    repeats=3,
)
"""DeiT's augmentation, with every image three times in an epoch: DeiT's paper calls repeated augmentation a key
ingredient, and its code, which papers that "use the augmentation of DeiT" build on, does it by default."""


def images(batch: int, size: int | None = None, **more: Any) -> Fields:
    """Return the data fields of a folder of images: the batch over all processes, and the size if it is not usual."""
    return dict(source="imagefolder", batch_size=batch, workers=8, **({"size": [size, size]} if size else {}), **more)


def top1(value: str, condition: str = "") -> str:
    """Return the text of a published top-1; empty if there is none."""
    return f"{value} top-1 on ImageNet-1k{condition}" if value else ""
