"""From a source to batches, through timm's transforms."""

from collections.abc import Mapping
from typing import Any

import torch
from timm.data import create_transform
from torch.utils.data import DataLoader
from torchvision import transforms

from isomorph.data.sources import Source

NO_AUGMENTATION: dict[str, Any] = dict(scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.0, color_jitter=0.0)


def eval_loader(source: Source, config: Mapping[str, Any], batch_size: int = 100, workers: int = 0) -> DataLoader[Any]:
    """Batches in order, transformed as the model's data config says (input_size, mean, std, interpolation, ...)."""
    keys = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")
    source.transform = create_transform(**{key: config[key] for key in keys if key in config})
    return DataLoader(source, batch_size, num_workers=workers, persistent_workers=workers > 0)


def train_loader(
    source: Source,
    config: Mapping[str, Any],
    batch_size: int,
    workers: int = 0,
    crop_padding: int = 0,
    **augmentation: Any,
) -> DataLoader[Any]:
    """Shuffled full batches under timm's training transform; `augmentation` are its arguments (hflip, ...).

    `crop_padding` > 0 crops from the image padded by so many pixels (the CIFAR way) instead of resizing crops.
    The order and the augmentation follow torch's global seed.
    """
    base = {key: config[key] for key in ("input_size", "mean", "std", "interpolation")}
    if crop_padding:
        augmentation |= dict(scale=(1.0, 1.0), ratio=(1.0, 1.0))
    transform = create_transform(is_training=True, **base, **{**NO_AUGMENTATION, **augmentation})
    if crop_padding:
        height, width = config["input_size"][-2:]
        crop = [transforms.Resize((height, width)), transforms.RandomCrop((height, width), padding=crop_padding)]
        transform = transforms.Compose([*crop, transform])
    source.transform = transform
    return DataLoader(
        source,
        min(batch_size, len(source)),
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=workers > 0,
    )
