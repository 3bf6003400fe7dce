"""ReaL's labels of ImageNet's validation images: several per image, looked up by file name."""

import re

import numpy as np

from isomorph.data.imagenet_labels import imagenet_labels
from isomorph.data.sources import Source, image_name
from isomorph.errors import UserError

_IMAGE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")


def real_labels(source: Source, title: str) -> np.ndarray:
    """Return ReaL's labels of every image, found by the number in its file name.

    Shape: -> (n, 9), padded with -1; a row of -1 only is an image that ReaL leaves out
    Source: Beyer et al. (2020)
    Raises: UserError when a name has no such number, or two images have the same name.
    """
    indices = np.asarray([_image_index(image_name(source.images, i), title) for i in range(len(source))], np.int64)
    values, counts = np.unique(indices, return_counts=True)
    if len(values) < len(indices):
        raise UserError(f"{title} has image ILSVRC2012_val_{values[counts > 1][0] + 1:08d} twice; remove one")
    return imagenet_labels().real[indices]


def _image_index(name: str | None, title: str) -> int:
    """Return the index (from 0) of an image among the 50,000 by its name. Raises: UserError for another name."""
    match = _IMAGE_NAME.search(name or "")
    number = int(match[1]) if match else 0
    if not 1 <= number <= len(imagenet_labels().real):
        found = f"has an image named {name}" if name else "has images without names"
        raise UserError(
            f"the suite real needs file names like ILSVRC2012_val_00000001.JPEG, but {title} {found}; "
            "restore the original names, or leave real out"
        )
    return number - 1
