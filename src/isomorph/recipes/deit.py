"""DeiT's augmentation, which several papers train with."""

from typing import Any

DEIT: dict[str, Any] = dict(
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
