"""A folder of generated images compared with the images of a data source or of another folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from isomorph.data.formats.naming import SPLITS, ImageFiles
from isomorph.data.formats.registry import SOURCES, locate_folder, open_source
from isomorph.data.sources import Source, spaced_images
from isomorph.tasks.diffusion.image_distance import (
    Progress,
    cached_features,
    counted,
    default_cache,
    folder_batches,
    image_distances,
    image_size,
    open_folder,
)
from isomorph.tasks.diffusion.image_features import Extractor


def open_real_images(
    data: str, split: Literal["train", "test"], root: Path | None = None, max_images: int | None = None
) -> Source:
    """Open the images of a data source, of a split of a folder, or of a folder without splits, all of them.

    Raises: UserError when there are none.
    """
    if data not in SOURCES and locate_folder(data)[0] == "imagefolder" and not _has_splits(Path(data)):
        paths, folder = open_folder(Path(data)), Path(data)
        images = ImageFiles(folder, (path.relative_to(folder).as_posix() for path in paths))
        source = Source(images, np.zeros(len(paths), np.int64), ())
    else:
        source = open_source(data, split, root)
    return spaced_images(source, max_images)


def _has_splits(folder: Path) -> bool:
    """True if a folder has folders for training or test images."""
    return any((folder / name).is_dir() for names in SPLITS.values() for name in names)


def compare_folder(
    folder: Path,
    real: Source,
    extractor: Extractor,
    batch_size: int = 100,
    cache: Path | None = None,
    progress: Callable[[float, int, str], None] = lambda done, total, step: None,
) -> dict[str, Any]:
    """Return the distances of the images of a folder from real ones, as `image_distances` does.

    The features of the real images are read from the folder `cache`, or stored there.

    Raises: UserError for a folder without images, unreadable images, or images of several sizes.
    """
    paths = open_folder(folder)
    size = image_size(paths[0])

    def report(what: str) -> Progress:
        return lambda done, total: progress(done, total, what)

    batches = folder_batches(paths, batch_size)
    generated = extractor.extract(counted(batches, -(-len(paths) // batch_size), report("generated images")))
    others = cached_features(extractor, real, size, batch_size, cache or default_cache(), report("real images"))
    return image_distances(generated, others, extractor.name)
