"""From a source to batches, through timm's transforms and loader."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from PIL import Image, ImageOps
from timm.data import create_loader
from torch.utils.data import DataLoader, Sampler
from torchvision import transforms

from isomorph.data.sources import Source
from isomorph.errors import UserError

SHARED_KEYS = ("input_size", "mean", "std", "interpolation")
EVAL_KEYS = (*SHARED_KEYS, "crop_pct", "crop_mode")
NO_AUGMENTATION: dict[str, Any] = dict(scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.0, color_jitter=0.0)


def eval_loader(
    source: Source,
    config: Mapping[str, Any],
    batch_size: int = 100,
    workers: int = 0,
    rfc: float | None = None,
    rfc_fill: Literal["zero", "black"] = "zero",
) -> DataLoader[Any]:
    """Batches in order, transformed as the model's data config says (input_size, mean, std, interpolation, ...).

    `rfc` is the ratio of receptive-field calibration and takes the place of the crop: the image's shorter side is made
    1 / rfc of the input's, the middle is cut out, and where the image ends it is padded. `zero` pads what the model
    reads (the mean colour); `black` pads the picture, as timm does for a crop_pct above 1. Below 1 it is a plain crop.

    Source: Refiner section 4.4
    Raises: UserError for a ratio that is not positive and finite, or another filling.
    """
    kept = {key: config[key] for key in EVAL_KEYS if key in config}
    if rfc is not None:
        refuse_calibration(rfc, rfc_fill, config["input_size"][-2:])
        kept |= dict(crop_pct=rfc, crop_mode="center")
    source = copy.copy(source)
    loader = create_loader(source, batch_size=batch_size, use_prefetcher=False, num_workers=workers, **kept)
    if rfc is not None and rfc_fill == "zero":
        steps = list(source.transform.transforms)  # type: ignore[union-attr]
        crops = [step for step in steps if isinstance(step, transforms.CenterCrop)]
        source.transform = transforms.Compose([*(step for step in steps if step not in crops), *crops])
    return loader


def refuse_calibration(rfc: float, fill: str, size: Sequence[int]) -> None:
    """Raises: UserError for a ratio or a filling of receptive-field calibration that makes no image."""
    if not 0.05 <= rfc < math.inf or min(size) / rfc < 1:
        raise UserError(f"rfc {rfc:g} makes no image; give a ratio like 1.13, or one from .05 to 1 to crop")
    if fill not in ("zero", "black"):
        raise UserError(f"rfc_fill {fill!r} is unknown; choose 'zero' or 'black'")


def train_loader(
    source: Source,
    config: Mapping[str, Any],
    batch_size: int,
    workers: int = 0,
    crop_padding: int = 0,
    repeats: int = 1,
    **augmentation: Any,
) -> DataLoader[Any]:
    """Shuffled full batches under timm's training transform; `augmentation` are its arguments (hflip, ...).

    `crop_padding` > 0 crops from the image padded by so many pixels (the CIFAR way) instead of resizing crops.
    `repeats` > 1 shows each image of an epoch so many times in a row of batches, each time augmented anew, and a share
    of the images an epoch (DeiT's repeated augmentation). Order and augmentation follow torch's global seed, for a
    given number of workers: these start anew each epoch.
    """
    source, (height, width) = copy.copy(source), config["input_size"][-2:]
    whole = width / height
    if crop_padding:
        augmentation |= dict(scale=(1.0, 1.0), ratio=(whole, whole))
    loader = create_loader(
        source,
        batch_size=min(batch_size, max(len(source) // 2 * 2, 1)),
        is_training=True,
        use_prefetcher=False,
        num_workers=workers,
        persistent_workers=False,
        **{key: config[key] for key in SHARED_KEYS},
        **{**NO_AUGMENTATION, **augmentation},
    )
    mend_posterize(source.transform)
    if crop_padding:
        crop = [transforms.Resize((height, width)), transforms.RandomCrop((height, width), padding=crop_padding)]
        source.transform = transforms.Compose([*crop, source.transform])
    if repeats == 1:
        return loader
    return DataLoader(
        source,
        batch_size=loader.batch_size,
        sampler=Repeated(len(source), repeats),
        drop_last=True,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
    )


def mend_posterize(transform: Any) -> None:
    """Lets timm's policies posterize to no bits at all (black), which Pillow 13 refuses with an error mid-run."""
    for part in transform.transforms:
        sub_policies = [getattr(part, "ops", []), *getattr(part, "policy", [])]
        for operation in (op for policy in sub_policies for op in policy):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = posterize


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """The image with so many bits a channel."""
    if bits < 1:
        return Image.new(image.mode, image.size)
    return ImageOps.posterize(image, min(bits, 8))


class Repeated(Sampler[int]):
    """A shuffled epoch of as many samples as there are images, in which each drawn image comes `repeats` times running.

    As timm's RepeatAugSampler, which needs several processes; here all are one, and the order follows torch's seed.
    """

    def __init__(self, images: int, repeats: int) -> None:
        self.images, self.repeats = images, repeats

    def __len__(self) -> int:
        return self.images

    def __iter__(self) -> Iterator[int]:
        drawn = torch.randperm(self.images)[: -(-self.images // self.repeats)]
        return iter(drawn.repeat_interleave(self.repeats)[: self.images].tolist())
