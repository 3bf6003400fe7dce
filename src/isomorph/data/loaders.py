"""From a source to batches, through timm's transforms and loader."""

import copy
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms

from isomorph.data.label_maps import MapLabels
from isomorph.data.sampler import SeededIndex, TrainSampler
from isomorph.data.sources import Source
from isomorph.errors import UserError
from isomorph.import_path import SafeChildren
from isomorph.seeding import seed_generators

_SHARED_KEYS = ("input_size", "mean", "std", "interpolation")
_EVAL_KEYS = (*_SHARED_KEYS, "crop_pct", "crop_mode")
Labels = Tensor | MapLabels
Example = tuple[Tensor, int | MapLabels, list[str]]
"""Image, label, and what could not be read on the way to it."""

_NO_AUGMENTATION: dict[str, Any] = dict(scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.0, color_jitter=0.0)


class IsolatedDataLoader(DataLoader[Any]):
    """A DataLoader whose workers import nothing from the working folder, however they are started."""

    def __iter__(self) -> Any:
        with SafeChildren():
            return super().__iter__()


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
    kept = {key: config[key] for key in _EVAL_KEYS if key in config}
    if rfc is not None:
        _check_rfc(rfc, rfc_fill, config["input_size"][-2:])
        kept |= dict(crop_pct=rfc, crop_mode="center")
    transform: Any = eval_transform(kept)
    if rfc is not None and rfc_fill == "zero":
        steps = list(transform.transforms)
        crops = [step for step in steps if isinstance(step, transforms.CenterCrop)]
        transform = transforms.Compose([*(step for step in steps if step not in crops), *crops])
    source = copy.copy(source)
    source.transform = transform
    return IsolatedDataLoader(
        source,
        batch_size,
        num_workers=workers,
        worker_init_fn=ignore_stop_signals,
        persistent_workers=workers > 0,
    )


def eval_transform(config: Mapping[str, Any]) -> Callable[[Image.Image], Any]:
    """timm's transform for testing, as the model's data config says."""
    return create_transform(**{key: config[key] for key in _EVAL_KEYS if key in config})


def _check_rfc(rfc: float, fill: str, size: Sequence[int]) -> None:
    """Raises: UserError for a ratio or a filling of receptive-field calibration that makes no image."""
    if not 0.05 <= rfc < math.inf or min(size) / rfc < 1:
        raise UserError(f"rfc {rfc:g} makes no image; give a ratio like 1.13, or one from .05 to 1 to crop")
    if fill not in ("zero", "black"):
        raise UserError(f"rfc_fill {fill!r} is unknown; choose 'zero' or 'black'")


def train_loader(
    source: Source,
    transform: Callable[[Image.Image], Any],
    deals: TrainSampler,
    workers: int = 0,
    unreadable: int = 0,
) -> DataLoader[Any]:
    """What `deals` deals, one part of a batch after another, under a training transform: images, labels, problems.

    Up to `unreadable` images are each replaced by the next one that can be read, and said in `problems`. The loader
    runs to the end of the training, so that workers are ahead of the model at the start of every epoch too.

    Raises: UserError naming the image when more cannot be read.
    """
    source = copy.copy(source)
    source.transform = transform
    return IsolatedDataLoader(
        SeededDataset(source, unreadable),
        batch_sampler=deals,
        num_workers=workers,
        collate_fn=collate,
        worker_init_fn=ignore_stop_signals,
        pin_memory=torch.cuda.is_available(),
    )


def train_transform(
    config: Mapping[str, Any], crop_padding: int = 0, **augmentation: Any
) -> Callable[[Image.Image], Any]:
    """timm's training transform; `augmentation` are its arguments (hflip, ...).

    `crop_padding` > 0 crops from the image padded by so many pixels (the CIFAR way) instead of resizing crops.
    """
    (height, width) = config["input_size"][-2:]
    if crop_padding:
        augmentation |= dict(scale=(1.0, 1.0), ratio=(width / height, width / height))
    shared = {key: config[key] for key in _SHARED_KEYS}
    transform = create_transform(is_training=True, **shared, **{**_NO_AUGMENTATION, **augmentation})
    _fix_posterize(transform)
    if not crop_padding:
        return transform
    crop = [transforms.Resize((height, width)), transforms.RandomCrop((height, width), padding=crop_padding)]
    return transforms.Compose([*crop, transform])


class SeededDataset(Dataset[Example]):
    """The images of a source by draw: image and seed; every augmentation follows its own seed."""

    def __init__(self, source: Source, unreadable: int) -> None:
        self.source, self.unreadable = source, unreadable

    def __getitem__(self, draw: SeededIndex) -> Example:
        index, seed = draw
        problems: list[str] = []
        while True:
            seed_generators(seed, devices=False)
            try:
                image, label = self.source[index]
                return image, label, problems
            except UserError as error:
                problems.append(str(error))
                if len(problems) > self.unreadable:
                    raise UserError(f"{error} (or allow some: data.unreadable)") from None
                index = (index + 1) % len(self.source)


def collate(examples: Sequence[Example]) -> tuple[Tensor, Labels, list[str]]:
    """Shape: -> (B, C, H, W), (B,), and what could not be read; label maps are stacked field by field"""
    images, labels, problems = zip(*examples, strict=True)
    return torch.stack(images), default_collate(labels), [problem for found in problems for problem in found]


def ignore_stop_signals(worker: int) -> None:
    """A stop is for the main process, which lets its workers go when it has saved: they heed no one else."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not everywhere; there, a SIGTERM to all processes ends the workers
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_when_parent_asks, daemon=True).start()


def _exit_when_parent_asks() -> None:
    """Ends a worker when the process that it works for asks for it (its system parent may be a fork server)."""
    parent = multiprocessing.parent_process()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != (parent.pid if parent else os.getppid()):
        pass
    os._exit(0)


def _fix_posterize(transform: Any) -> None:
    """Lets timm's policies posterize to no bits at all (black), which Pillow 13 refuses with an error mid-run."""
    for part in transform.transforms:
        sub_policies = [getattr(part, "ops", []), *getattr(part, "policy", [])]
        for operation in (op for policy in sub_policies for op in policy):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """The image with so many bits a channel."""
    if bits < 1:
        return Image.new(image.mode, image.size)
    return ImageOps.posterize(image, min(bits, 8))
