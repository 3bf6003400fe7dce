"""How near generated images are to real ones: distances of their features, of Inception-v3 or of another network.

Features, distances, precision and recall are torch-fidelity's.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.functional import normalize

from isomorph.checkpoints.open import open_model
from isomorph.errors import UserError, optional_module
from isomorph.lab.data.formats.imagefolder import find_splits
from isomorph.lab.data.formats.naming import ImageFiles, is_image_name
from isomorph.lab.data.formats.registry import SOURCES, locate_folder, open_source
from isomorph.lab.data.loaders import batch_ranges, eval_transform
from isomorph.lab.data.sources import Source, spaced_images
from isomorph.layers.modes import require_finite
from isomorph.models.download import is_connection_error, is_reachable
from isomorph.models.input_sizes import evaluation_config

INCEPTION = "inception"
INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
NO_INCEPTION = (
    f"the weights of Inception-v3 cannot be downloaded; give torch-fidelity's file {INCEPTION_FILE} as --weights, or "
    "the features of another network as --features"
)
# Fewest images of a set: precision and recall look at three neighbours of each.
MIN_IMAGES = 5
# Images in each of the 100 draws of the kernel distance, or all if there are fewer.
_KERNEL_IMAGES = 1000
Progress = Callable[[int, int], None]


def _fidelity(module: str) -> Any:
    return optional_module(f"torch_fidelity.{module}", "comparing sets of images needs torch-fidelity", "diffusion")


class InceptionFeatures(nn.Module):
    """The pooled features of Inception-v3 in TensorFlow's form, in torch-fidelity's implementation and weights.

    Shape: (B, 3, H, W) uint8 -> (B, 2048)
    """

    def __init__(self, weights: Path | None) -> None:
        super().__init__()
        inception = _fidelity("feature_extractor_inceptionv3")
        cached = Path(torch.hub.get_dir(), "checkpoints", INCEPTION_FILE)
        if weights is not None:
            try:
                torch.load(weights, map_location="meta", weights_only=True)  # torch-fidelity would run any code in it
            except Exception:
                what = f"is not a file of weights; give torch-fidelity's {INCEPTION_FILE}"
                raise UserError(f"--weights {weights} {what}") from None
        elif not cached.is_file() and not is_reachable(inception.URL_INCEPTION_V3):
            raise UserError(NO_INCEPTION)
        build = partial(inception.FeatureExtractorInceptionV3, "inception-v3-compat", ["2048"], verbose=False)
        try:
            self.inception = build(feature_extractor_weights_path=None if weights is None else str(weights))
        except Exception as error:
            if weights is None and is_connection_error(error):
                raise UserError(NO_INCEPTION) from None
            raise UserError(f"{weights} does not have the weights of torch-fidelity's Inception-v3") from None

    def forward(self, x: Tensor) -> Tensor:
        return self.inception(x)[0]


class PooledFeatures(nn.Module):
    """The features before the classifier of a network, of images resized and normalised as it expects.

    Shape: (B, 3, H, W) uint8 -> (B, features)
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not hasattr(model, "forward_head"):
            raise UserError(f"{type(model).__name__} has no features before a classifier; give a timm classifier")
        self.model: Any = model
        config = evaluation_config(model)
        self.size = tuple(config["input_size"][-2:])
        self.mean = list(config["mean"])
        self.std = list(config["std"])

    def forward(self, x: Tensor) -> Tensor:
        x = x / 255
        if tuple(x.shape[-2:]) != self.size:
            x = F.interpolate(x, self.size, mode="bicubic", antialias=True).clamp(0, 1)
        features = self.model.forward_features(normalize(x, self.mean, self.std))
        return self.model.forward_head(features, pre_logits=True)


class Extractor(NamedTuple):
    """A network that turns images into features, and its name."""

    name: str
    # Called with (B, 3, H, W) uint8; returns (B, features).
    network: nn.Module

    @torch.no_grad()
    def extract(self, batches: Iterable[Tensor]) -> Tensor:
        """Return the features of batches of images. Shape: (B, 3, H, W) uint8 each -> (N, features), float32"""
        device = next(self.network.parameters()).device
        return torch.cat([self.network(batch.to(device)).float().cpu() for batch in batches])


def open_extractor(features: str, weights: Path | None, device: torch.device) -> Extractor:
    """Open Inception-v3 (`inception`), or any classifier by its timm name, checkpoint or run.

    Raises: UserError without torch-fidelity, or when the weights are missing, damaged or cannot be downloaded.
    """
    network = InceptionFeatures(weights) if features == INCEPTION else PooledFeatures(open_model(features, weights))
    return Extractor(features, network.requires_grad_(False).eval().to(device))


def image_distances(generated: Tensor, real: Tensor, features: str = INCEPTION) -> dict[str, Any]:
    """Return distances of generated from real images by their features, as torch-fidelity computes them.

    fid, kid and kid_std for Inception's features; frechet_distance, kernel_distance and kernel_distance_std, and the
    name `features`, for those of another network. precision: the fraction of generated images within the real ones
    (nearer to one than its third neighbour); recall: that of real images within the generated ones.

    Shape: (N, features), (M, features)
    Source: Heusel et al. (2017); Binkowski et al. (2018); Kynkaanniemi et al. (2019)
    Raises: UserError without torch-fidelity, or for fewer than 5 images; NotFinite for NaN or infinite features.
    """
    fid, kid, prc = (_fidelity(f"metric_{name}") for name in ("fid", "kid", "prc"))
    if min(len(generated), len(real)) < MIN_IMAGES:
        raise UserError(f"{min(len(generated), len(real))} images are too few to compare; give at least {MIN_IMAGES}")
    require_finite((generated, real))
    statistics = [fid.fid_features_to_statistics(each) for each in (generated, real)]
    subset = min(_KERNEL_IMAGES, len(generated), len(real))
    found = fid.fid_statistics_to_metric(*statistics, verbose=False)
    found |= kid.kid_features_to_metric(generated, real, kid_subset_size=subset, verbose=False)
    found |= prc.prc_features_to_metric(generated, real, save_cpu_ram=True, prc_batch_size=2000, verbose=False)
    own = features == INCEPTION
    frechet, kernel = ("fid", "kid") if own else ("frechet_distance", "kernel_distance")
    return {
        **({} if own else {"features": features}),
        frechet: found["frechet_inception_distance"],
        kernel: found["kernel_inception_distance_mean"],
        f"{kernel}_std": found["kernel_inception_distance_std"],
        "precision": found["precision"],
        "recall": found["recall"],
        "images": len(generated),
        "real_images": len(real),
    }


def open_folder(folder: Path) -> Source:
    """Open the images of a folder and the folders in it, in their order. Raises: UserError when there are none."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    paths = sorted(path for path in folder.rglob("*") if is_image_name(path.name) and not path.name.startswith("."))
    if not paths:
        raise UserError(f"no images in {folder}; give a folder of PNGs, as `isomorph sample --out FOLDER` writes it")
    images = ImageFiles(folder, (path.relative_to(folder).as_posix() for path in paths))
    return Source(images, np.zeros(len(paths), np.int64), ())


def open_real_images(
    data: str,
    split: Literal["train", "test"],
    root: Path | None = None,
    max_images: int | None = None,
) -> Source:
    """Open the images of a data source, of a split of a folder, or of a folder without splits, all of them.

    Raises: UserError when there are none.
    """
    if data in SOURCES or any(find_splits(Path(data)).values()) or locate_folder(data)[0] != "imagefolder":
        return spaced_images(open_source(data, split, root), max_images)
    return spaced_images(open_folder(Path(data)), max_images)


def _batches(
    source: Source, size: tuple[int, int], batch_size: int, progress: Progress, exact: bool = False
) -> Iterator[Tensor]:
    """Yield images at a size, cut out as for training. Shape: -> (B, 3, H, W) uint8

    Raises: UserError for images of another size, if it is to be `exact`.
    """
    config = dict(input_size=(3, *size), crop_pct=1.0, crop_mode="center", interpolation="bilinear")
    crop = eval_transform({**config, "mean": (0.0,) * 3, "std": (1.0,) * 3})
    batches = batch_ranges(len(source), batch_size)
    for done, numbers in enumerate(batches, 1):
        images = [source.image(i) for i in numbers]
        for number, image in zip(numbers, images, strict=True) if exact else ():
            if image.size[::-1] != size:
                (height, width) = size
                (own_height, own_width) = image.size[::-1]
                paths = cast(Any, source.images)
                what = f"is {own_height} x {own_width}, and {paths[0]} is {height} x {width}"
                raise UserError(f"{paths[number]} {what}; give images of one size")
        yield torch.stack([(crop(image) * 255).round().to(torch.uint8) for image in images])
        progress(done, len(batches))


def compare_folder(
    folder: Path,
    real: Source,
    extractor: Extractor,
    batch_size: int = 100,
    progress: Callable[[float, int, str], None] = lambda done, total, step: None,
) -> dict[str, Any]:
    """Return `image_distances` of a folder from real images.

    Raises: UserError for a folder without images, unreadable images, or images of several sizes; NotFinite.
    """
    own = open_folder(folder)
    features = []
    width, height = own.image(0).size
    for source, title in ((own, "generated images"), (real, "real images")):
        report = partial(lambda title, done, total: progress(done, total, title), title)
        features.append(extractor.extract(_batches(source, (height, width), batch_size, report, source is own)))
    generated, others = features
    return image_distances(generated, others, extractor.name)
