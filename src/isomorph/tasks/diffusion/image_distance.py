"""How near generated images are to real ones: Frechet and kernel distance, precision and recall of their features."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from isomorph.checkpoints.files import write_atomically
from isomorph.data.formats.naming import is_image_name
from isomorph.data.loaders import eval_transform
from isomorph.data.sources import Source, read_image
from isomorph.errors import UserError
from isomorph.tasks.diffusion.image_features import INCEPTION, Extractor, require_fidelity

MIN_IMAGES = 5
"""Fewest images of a set: precision and recall look at three neighbours of each."""
_KERNEL_IMAGES = 1000
"""Images in each of the 100 draws of the kernel distance, or all if there are fewer."""
Progress = Callable[[int, int], None]


def image_distances(generated: Tensor, real: Tensor, features: str = INCEPTION) -> dict[str, Any]:
    """Return distances of generated from real images by their features, as torch-fidelity computes them.

    fid, kid and kid_std for Inception's features; frechet_distance, kernel_distance and kernel_distance_std, and the
    name `features`, for those of another network. precision: the fraction of generated images within the real ones
    (nearer to one than its third neighbour); recall: that of real images within the generated ones.

    Shape: (N, features), (M, features)
    Source: Heusel et al. (2017); Binkowski et al. (2018); Kynkaanniemi et al. (2019)
    Raises: UserError without torch-fidelity, or for fewer than 5 images.
    """
    require_fidelity()
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    from torch_fidelity.metric_kid import kid_features_to_metric
    from torch_fidelity.metric_prc import prc_features_to_metric

    if min(len(generated), len(real)) < MIN_IMAGES:
        raise UserError(f"{min(len(generated), len(real))} images are too few to compare; give at least {MIN_IMAGES}")
    statistics = [fid_features_to_statistics(each) for each in (generated, real)]
    subset = min(_KERNEL_IMAGES, len(generated), len(real))
    found = fid_statistics_to_metric(*statistics, verbose=False)
    found |= kid_features_to_metric(generated, real, kid_subset_size=subset, verbose=False)
    found |= prc_features_to_metric(generated, real, save_cpu_ram=True, prc_batch_size=2000, verbose=False)
    own = features == INCEPTION
    kernel = "kid" if own else "kernel_distance"
    return {
        **({} if own else {"features": features}),
        "fid" if own else "frechet_distance": found["frechet_inception_distance"],
        kernel: found["kernel_inception_distance_mean"],
        f"{kernel}_std": found["kernel_inception_distance_std"],
        "precision": found["precision"],
        "recall": found["recall"],
        "images": len(generated),
        "real_images": len(real),
    }


def open_folder(folder: Path) -> list[Path]:
    """Return the images of a folder and the folders in it, sorted. Raises: UserError when there are none."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    paths = sorted(path for path in folder.rglob("*") if is_image_name(path.name) and not path.name.startswith("."))
    if not paths:
        raise UserError(f"no images in {folder}; give a folder of PNGs, as `isomorph sample --out FOLDER` writes it")
    return paths


def folder_batches(paths: list[Path], batch_size: int) -> Iterator[Tensor]:
    """Yield the images of files. Shape: -> (B, 3, H, W) uint8. Raises: UserError for unreadable ones or other sizes."""
    expected = image_size(paths[0])
    for start in range(0, len(paths), batch_size):
        chosen = paths[start : start + batch_size]
        images = [_read(path) for path in chosen]
        for path, image in zip(chosen, images, strict=True):
            if tuple(image.shape[-2:]) != expected:
                own, others = (" x ".join(map(str, sides)) for sides in (image.shape[-2:], expected))
                raise UserError(f"{path} is {own}, and {paths[0]} is {others}; give images of one size")
        yield torch.stack(images)


def image_size(path: Path) -> tuple[int, int]:
    """Return height and width of the image in a file. Raises: UserError when it cannot be read."""
    height, width = _read(path).shape[-2:]
    return height, width


def _read(path: Path) -> Tensor:
    """Return the pixels of a file in RGB. Shape: -> (3, H, W) uint8. Raises: UserError when it cannot be read."""
    return _pixels(read_image(path))


def _pixels(image: Any) -> Tensor:
    return torch.from_numpy(np.array(image)).movedim(-1, 0)


def source_batches(source: Source, size: tuple[int, int], batch_size: int) -> Iterator[Tensor]:
    """Yield the images of a data source at a size, cut out as for training. Shape: -> (B, 3, H, W) uint8"""
    config = dict(input_size=(3, *size), crop_pct=1.0, crop_mode="center", interpolation="bilinear")
    crop = eval_transform({**config, "mean": (0.0,) * 3, "std": (1.0,) * 3})
    for start in range(0, len(source), batch_size):
        numbers = range(start, min(start + batch_size, len(source)))
        yield torch.stack([(crop(source.image(i)) * 255).round().to(torch.uint8) for i in numbers])


def cached_features(
    extractor: Extractor, source: Source, size: tuple[int, int], batch_size: int, folder: Path, progress: Progress
) -> Tensor:
    """Return the features of all images of a data source, read from the cache folder if they are there.

    An entry belongs to the weights of the network, the size, and the images' files: their bytes, or their paths, sizes
    and times of change.
    """
    text = f"{extractor.name} {extractor.fingerprint} {size} {_fingerprint(source)}"
    path = folder / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.safetensors"
    try:
        features = load_file(path)["features"]
        if len(features) == len(source):
            return features
    except (OSError, SafetensorError, KeyError):
        pass
    total = -(-len(source) // batch_size)
    batches = source_batches(source, size, batch_size)
    features = extractor.extract(counted(batches, total, progress))
    write_atomically(path, lambda file: save_file({"features": features}, file))
    return features


def counted(batches: Iterator[Tensor], total: int, progress: Progress) -> Iterator[Tensor]:
    """Yield batches and report their number."""
    for number, batch in enumerate(batches, 1):
        yield batch
        progress(number, total)


def _fingerprint(source: Source) -> str:
    """Return a hash of the images of a source, by their bytes, or by path, size and time of change."""
    digest = hashlib.blake2b(digest_size=16)
    for i in range(len(source)):
        image = source.images[i]
        if isinstance(image, Path):
            status = image.stat()
            digest.update(f"{image.resolve()} {status.st_size} {status.st_mtime_ns}".encode())
        else:
            digest.update(image if isinstance(image, bytes) else np.ascontiguousarray(image).tobytes())
    return digest.hexdigest()


def default_cache() -> Path:
    """Return the folder of cached features: isomorph/features below $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isomorph" / "features"
