"""Loaders of training and test batches, with timm's transforms."""

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms

from isomorph.errors import UserError
from isomorph.lab.data.label_maps import MapLabels
from isomorph.lab.data.sampler import SeededIndex, TrainSampler
from isomorph.lab.data.sources import Examples, Source, with_changes
from isomorph.lab.distributed import Runtime, seed_generators
from isomorph.process import SafeChildProcesses, handler_kept
from isomorph.terminal_tables import count_of

# What a model expects of its images: input_size, mean, std, interpolation, crop_pct, crop_mode, as timm names them.
ImageConfig = dict[str, Any]
_SHARED_KEYS = ("input_size", "mean", "std", "interpolation")
_EVAL_KEYS = (*_SHARED_KEYS, "crop_pct", "crop_mode")
Labels = Tensor | MapLabels
# image, label, errors of unreadable images skipped before it
Example = tuple[Tensor, int | MapLabels, list[str]]

_NO_AUGMENTATION: ImageConfig = dict(
    scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.0, color_jitter=0.0
)


def mean_and_std(
    config: Mapping[str, Any], device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the channels in a data config. Shape: -> (C, 1, 1), (C, 1, 1)"""
    mean = torch.tensor(config["mean"], device=device)
    std = torch.tensor(config["std"], device=device)
    return mean[:, None, None], std[:, None, None]


class IsolatedDataLoader(DataLoader[Any]):
    """DataLoader whose workers import nothing from the working folder, however they are started.

    A killed worker is a UserError of the iterator, after the batches that are ready. Torch's handler of SIGCHLD, which
    other loaders of a process may have set, would raise wherever the main thread is.
    """

    def __iter__(self) -> Any:
        with (
            SafeChildProcesses(),
            handler_kept(getattr(signal, "SIGCHLD", signal.SIGINT)),
            _explain_killed_worker(),
        ):
            if self.num_workers:
                return _explained(super().__iter__())
            return super().__iter__()


@contextmanager
def _explain_killed_worker() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ConnectionResetError, ConnectionRefusedError) as error:
        # connections end while a batch is handed over
        of_worker = "worker (pid" in str(error) or "Pin memory thread" in str(error)
        if not getattr(error, "errno", 0) and not of_worker:
            raise
        raise UserError(
            "a data-loading process was killed, perhaps as memory ran out; use fewer workers"
        ) from None


def _explained(batches: Iterator[Any]) -> Iterator[Any]:
    with _explain_killed_worker():
        yield from batches


def eval_loader(
    source: Source,
    config: ImageConfig,
    batch_size: int = 100,
    workers: int = 0,
    rfc: float | None = None,
    rfc_fill: Literal["zero", "black"] = "zero",
    batches: slice = slice(None),
) -> DataLoader[Any]:
    """Return a loader of a source's images in order, transformed as in the model's data config.

    `config` is timm's data config (input_size, mean, std, interpolation, ...). `rfc` is the ratio of receptive-field
    calibration and replaces the crop: the image's shorter side is resized to 1 / rfc of the input's, the centre is cut
    out, and where the image ends it is padded. `rfc_fill="zero"` pads the normalised image with zeros (the mean
    colour); `"black"` pads the image itself, as timm does for a crop_pct above 1. An rfc below 1 only crops.
    `batches` selects batches by number: `slice(rank, None, world)` is the share of one of several processes.

    Shape: yields images (B, C, H, W), labels (B,)
    Source: Refiner section 4.4
    Raises: UserError for a ratio that leaves no image, or a batch size below 1.

    >>> model = timm.create_model("cifar_resnet20")
    >>> source = iso.data.open_source("digits", "test")
    >>> loader = iso.data.eval_loader(source, timm.data.resolve_data_config(model=model), batch_size=50)
    >>> images, labels = next(iter(loader))
    >>> images.shape
    torch.Size([50, 3, 32, 32])
    """
    options = dict(config)
    if rfc_fill not in ("zero", "black"):
        raise UserError(f"rfc_fill {rfc_fill!r} is unknown; choose 'zero' or 'black'")
    if rfc is not None:
        if not 0.05 <= rfc < math.inf or min(config["input_size"][-2:]) / rfc < 1:
            raise UserError(
                f"rfc {rfc:g} leaves no image; give a ratio like 1.13, or one from .05 to 1 to crop"
            )
        options |= dict(crop_pct=rfc, crop_mode="center")
    transform: Any = eval_transform(options)
    if rfc is not None and rfc_fill == "zero":  # the normalised image is cropped
        transform.transforms.sort(key=lambda step: isinstance(step, transforms.CenterCrop))
    chosen = batch_ranges(len(source), batch_size)[batches]
    return ordered_loader(transformed(source, transform), chosen, workers)


def transformed(source: Examples, transform: Callable[[Image.Image], Any]) -> Examples:
    """Return the source with another transform of its images."""
    return with_changes(source, transform=transform)


def ordered_loader(
    examples: Any,
    batches: Sequence[Sequence[int]],
    workers: int,
    collate: Callable[[Any], Any] | None = None,
) -> DataLoader[Any]:
    """Return a loader of the given batches of anything with an index."""
    return IsolatedDataLoader(
        examples,
        batch_sampler=batches,  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=collate,
        worker_init_fn=ignore_stop_signals,
        persistent_workers=workers > 0,
    )


def loader_of_share(
    examples: Any,
    batch_size: int,
    workers: int,
    runtime: Runtime,
    collate: Callable[[Any], Any] | None = None,
) -> DataLoader[Any]:
    """Return the loader of this process's share of the test examples. Raises: UserError if they are too few."""
    if len(examples) < runtime.world:
        raise UserError(
            f"{count_of(len(examples), 'test example')} for {runtime.world} processes; start fewer"
        )
    own = range(len(examples))[runtime.share]
    batches = [[own[i] for i in batch] for batch in batch_ranges(len(own), batch_size)]
    return ordered_loader(examples, batches, workers, collate)


def batch_ranges(images: int, batch_size: int) -> list[Sequence[int]]:
    """Return the indices of every batch; the last may be smaller. Raises: UserError for a batch size below 1."""
    if batch_size < 1:
        raise UserError(f"the batch size, {batch_size}, must be at least 1")
    return [range(start, min(start + batch_size, images)) for start in range(0, images, batch_size)]


def eval_transform(config: ImageConfig) -> Callable[[Image.Image], Any]:
    """Return timm's transform of test images for a model's data config; for 1 channel, colour is left out.

    `config` is timm's data config: input_size, mean, std, interpolation, crop_pct, crop_mode.

    >>> source = iso.data.open_source("digits", "test")
    >>> transform = iso.data.eval_transform(timm.data.resolve_data_config(model=timm.create_model("cifar_resnet20")))
    >>> transform(source.image(0)).shape
    torch.Size([3, 32, 32])
    """
    options = {key: config[key] for key in _EVAL_KEYS if key in config}
    return _in_channels(config, create_transform(**options))


def _in_channels(config: ImageConfig, transform: Any) -> Any:
    """Return a transform for images in as many channels as the model reads: 3, or 1, for which colour is left out.

    Raises: UserError for another number of channels.
    """
    channels = config["input_size"][0]
    if channels not in (1, 3):
        raise UserError(
            f"the model reads images of {channels} channels; images are read with 3, or with 1 as grey"
        )
    if channels == 1:
        steps = transform.transforms
        to_tensor = [isinstance(step, transforms.ToTensor) for step in steps].index(True)
        steps.insert(to_tensor, transforms.Grayscale(1))  # augmentations fill with a colour
    return transform


def train_loader(
    examples: Any,
    sampler: TrainSampler,
    workers: int = 0,
    unreadable: int = 0,
    collate_fn: Callable[[Sequence[Any]], Any] | None = None,
) -> DataLoader[Any]:
    """Return a loader of training batches, by default images, labels, and error messages of images that are not read.

    `examples` are anything with a length and an index, such as `transformed(source, transform)`; each is drawn with the
    sampler's seed for it. Each of up to `unreadable` images that cannot be read is replaced by the next. The loader
    runs to the end of the training, so that at the start of an epoch too its workers are ahead of the model.

    Shape: yields images (B, C, H, W), labels (B,), messages
    Raises: UserError naming the image when more cannot be read.
    """
    return IsolatedDataLoader(
        SeededDataset(examples, unreadable),
        batch_sampler=sampler,
        num_workers=workers,
        collate_fn=collate_fn or collate,
        worker_init_fn=ignore_stop_signals,
        pin_memory=torch.cuda.is_available(),
    )


def train_transform(
    config: ImageConfig, crop_padding: int = 0, **augmentation: Any
) -> Callable[[Image.Image], Any]:
    """Return timm's training transform for a model's data config; `augmentation` are its arguments (hflip, ...).

    `crop_padding` > 0 crops from the image padded by that many pixels, as usual for CIFAR, instead of resizing crops.

    >>> source = iso.data.open_source("digits", "train")
    >>> config = timm.data.resolve_data_config(model=timm.create_model("cifar_resnet20"))
    >>> source.transform = iso.data.train_transform(config, crop_padding=4, hflip=0.5)
    >>> source[0][0].shape
    torch.Size([3, 32, 32])
    """
    height, width = config["input_size"][-2:]
    options = _NO_AUGMENTATION | augmentation
    if crop_padding:
        options |= dict(scale=(1.0, 1.0), ratio=(width / height, width / height))
    shared = {key: config[key] for key in _SHARED_KEYS}
    transform = create_transform(is_training=True, **shared, **options)
    _fix_posterize(transform)
    transform = _in_channels(config, transform)
    if not crop_padding:
        return transform
    resize = transforms.Resize((height, width))
    crop = transforms.RandomCrop((height, width), padding=crop_padding)
    return transforms.Compose([resize, crop, transform])


@dataclass(frozen=True)
class SeededDataset(Dataset[Example]):
    """The images of a source by index and augmentation seed; an unreadable one is replaced by the next."""

    source: Source
    unreadable: int

    def __getitem__(self, seeded: SeededIndex) -> Example:
        index, seed = seeded
        problems: list[str] = []
        while True:
            seed_generators(seed, devices=False)
            try:
                image, label = self.source[index]
                return image, label, problems
            except UserError as error:
                problems.append(str(error))
                if len(problems) > self.unreadable:
                    raise UserError(
                        f"{error}; to skip unreadable images, give data.unreadable"
                    ) from None
                index = (index + 1) % len(self.source)


def collate(examples: Sequence[Example]) -> tuple[Tensor, Labels, list[str]]:
    """Stack examples to a batch; label maps are stacked field by field. Shape: -> (B, C, H, W), (B,), messages"""
    images, labels, problems = zip(*examples, strict=True)
    return torch.stack(images), default_collate(labels), list(chain.from_iterable(problems))


def ignore_stop_signals(worker: int) -> None:
    """Make a worker ignore signals to stop: the main process handles them, and ends its workers once it has saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # some systems lack it: there, a SIGTERM to all processes ends the workers
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_when_parent_asks, daemon=True).start()


def _exit_when_parent_asks() -> None:
    """End this worker at a SIGTERM from the loader's process (the worker's system parent may be a fork server)."""
    parent = multiprocessing.parent_process()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != (parent.pid if parent else os.getppid()):
        pass
    os._exit(0)


def _fix_posterize(transform: Any) -> None:
    """Let timm's policies posterize to 0 bits (black), which Pillow 13 rejects with an error mid-run."""
    for part in transform.transforms:
        policies = [getattr(part, "ops", []), *getattr(part, "policy", [])]
        for operation in chain.from_iterable(policies):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    if bits < 1:
        return Image.new(image.mode, image.size)
    return ImageOps.posterize(image, min(bits, 8))
