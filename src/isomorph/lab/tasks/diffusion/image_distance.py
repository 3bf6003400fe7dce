"""How near generated images are to real ones: distances of their features, of Inception-v3 or of another network.

Features, distances, precision and recall are torch-fidelity's.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms.functional import normalize

from isomorph.errors import UserError, optional_module
from isomorph.lab.data.formats.imagefolder import find_splits
from isomorph.lab.data.formats.naming import ImageFiles, image_files
from isomorph.lab.data.formats.registry import SOURCES, locate_folder, open_source
from isomorph.lab.data.loaders import batch_ranges, eval_transform
from isomorph.lab.data.sources import Source, spaced_images
from isomorph.lab.training.open import open_model
from isomorph.layers.modes import require_finite
from isomorph.models.download import is_connection_error, is_reachable
from isomorph.models.input_sizes import evaluation_config
from isomorph.spec import ImageSize
from isomorph.terminal_tables import Row

INCEPTION = "inception"
INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"
NO_INCEPTION = (
    f"the weights of Inception-v3 cannot be downloaded; give torch-fidelity's file {INCEPTION_FILE} as `weights`, or "
    "the features of another network as `features`"
)
# Fewest images of a set: precision and recall look at three neighbours of each.
MIN_IMAGES = 5
# Images in each of the 100 draws of the kernel distance, or all if there are fewer.
_KERNEL_IMAGES = 1000
Progress = Callable[[int, int], None]


def _fidelity(module: str) -> Any:
    return optional_module(
        f"torch_fidelity.{module}", "comparing sets of images needs torch-fidelity", "diffusion"
    )


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
                # torch-fidelity would run any code in it
                torch.load(weights, map_location="meta", weights_only=True)
            except Exception:
                raise UserError(
                    f"weights {weights} is not a file of weights; give torch-fidelity's "
                    f"{INCEPTION_FILE}"
                ) from None
        elif not cached.is_file() and not is_reachable(inception.URL_INCEPTION_V3):
            raise UserError(NO_INCEPTION)
        path = None if weights is None else str(weights)
        try:
            self.inception = inception.FeatureExtractorInceptionV3(
                "inception-v3-compat",
                ["2048"],
                feature_extractor_weights_path=path,
                verbose=False,
            )
        except Exception as error:
            if weights is None and is_connection_error(error):
                raise UserError(NO_INCEPTION) from None
            raise UserError(
                f"{weights} does not have the weights of torch-fidelity's Inception-v3"
            ) from None

    def forward(self, x: Tensor) -> Tensor:
        return self.inception(x)[0]


class PooledFeatures(nn.Module):
    """The features before the classifier of a network, of images resized and normalised as it expects.

    Shape: (B, 3, H, W) uint8 -> (B, features)
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not hasattr(model, "forward_head"):
            raise UserError(
                f"{type(model).__name__} has no features before a classifier; give a timm classifier"
            )
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
    network: nn.Module
    if features == INCEPTION:
        network = InceptionFeatures(weights)
    else:
        network = PooledFeatures(open_model(features, weights))
    return Extractor(features, network.requires_grad_(False).eval().to(device))


def image_distances(generated: Tensor, real: Tensor, features: str = INCEPTION) -> Row:
    """Return distances of generated from real images by their features, as torch-fidelity computes them.

    fid, kid and kid_std for Inception's features; frechet_distance, kernel_distance and kernel_distance_std, and the
    name `features`, for those of another network. precision: the fraction of generated images within the real ones
    (nearer to one than its third neighbour); recall: that of real images within the generated ones.

    Shape: (N, features), (M, features)
    Source: Heusel et al. (2017); Binkowski et al. (2018); Kynkaanniemi et al. (2019)
    Raises: UserError without torch-fidelity, or for fewer than 5 images; NotFinite for NaN or infinite features.
    """
    fid = _fidelity("metric_fid")
    kid = _fidelity("metric_kid")
    prc = _fidelity("metric_prc")
    fewest = min(len(generated), len(real))
    if fewest < MIN_IMAGES:
        raise UserError(f"{fewest} images are too few to compare; give at least {MIN_IMAGES}")
    require_finite((generated, real))
    statistics = [fid.fid_features_to_statistics(features_of) for features_of in (generated, real)]
    frechet = fid.fid_statistics_to_metric(*statistics, verbose=False)
    subset = min(_KERNEL_IMAGES, fewest)
    kernel = kid.kid_features_to_metric(generated, real, kid_subset_size=subset, verbose=False)
    overlap = prc.prc_features_to_metric(
        generated, real, save_cpu_ram=True, prc_batch_size=2000, verbose=False
    )

    distances: Row = {}
    frechet_name = "fid"
    kernel_name = "kid"
    if features != INCEPTION:
        distances["features"] = features
        frechet_name = "frechet_distance"
        kernel_name = "kernel_distance"
    distances[frechet_name] = frechet["frechet_inception_distance"]
    distances[kernel_name] = kernel["kernel_inception_distance_mean"]
    distances[f"{kernel_name}_std"] = kernel["kernel_inception_distance_std"]
    distances["precision"] = overlap["precision"]
    distances["recall"] = overlap["recall"]
    distances["images"] = len(generated)
    distances["real_images"] = len(real)
    return distances


def open_folder(folder: Path) -> Source:
    """Open the images of a folder and the folders in it, in their order. Raises: UserError when there are none."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    paths = image_files(folder)
    if not paths:
        raise UserError(
            f"no images in {folder}; give a folder of PNGs, as `isomorph sample --out FOLDER` writes it"
        )
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
    if _has_splits(data):
        source = open_source(data, split, root)
        return spaced_images(source, max_images)
    if root is not None:
        raise UserError(f"{data} is a folder of its own; leave the root {root} out")
    if split == "test":
        raise UserError(
            f"{data} has no test images of its own, and all of its images would be taken; leave `test` out"
        )
    return spaced_images(open_folder(Path(data)), max_images)


def _has_splits(data: str) -> bool:
    if data in SOURCES or any(find_splits(Path(data)).values()):
        return True
    return locate_folder(data)[0] != "imagefolder"


def _batches(
    source: Source, size: ImageSize, batch_size: int, progress: Progress, exact: bool = False
) -> Iterator[Tensor]:
    """Yield images at a size, cut out as for training. Shape: -> (B, 3, H, W) uint8

    Raises: UserError for images of another size, if it is to be `exact`.
    """
    crop = eval_transform(
        dict(
            input_size=(3, *size),
            crop_pct=1.0,
            crop_mode="center",
            interpolation="bilinear",
            mean=(0.0, 0.0, 0.0),
            std=(1.0, 1.0, 1.0),
        )
    )
    batches = batch_ranges(len(source), batch_size)
    for done, numbers in enumerate(batches, 1):
        images = []
        for number in numbers:
            image = source.image(number)
            if exact and image.size[::-1] != size:
                height, width = size
                paths = cast(Any, source.images)
                raise UserError(
                    f"{paths[number]} is {image.height} x {image.width}, and {paths[0]} is "
                    f"{height} x {width}; give images of one size"
                )
            images.append((crop(image) * 255).round().to(torch.uint8))
        yield torch.stack(images)
        progress(done, len(batches))


def compare_folder(
    folder: Path,
    real: Source,
    extractor: Extractor,
    batch_size: int = 100,
    progress: Callable[[float, int, str], None] = lambda done, total, step: None,
) -> Row:
    """Return `image_distances` of a folder from real images.

    Raises: UserError for a folder without images, unreadable images, or images of several sizes; NotFinite.
    """
    generated = open_folder(folder)
    width, height = generated.image(0).size

    def features_of(source: Source, title: str) -> Tensor:
        def report(done: int, total: int) -> None:
            progress(done, total, title)

        batches = _batches(source, (height, width), batch_size, report, exact=source is generated)
        return extractor.extract(batches)

    own = features_of(generated, "generated images")
    others = features_of(real, "real images")
    return image_distances(own, others, extractor.name)
