"""ReaL: several right labels an image, found by the image's file name whatever the order of the files."""

import re

import numpy as np

from isomorph.data.imagenet_labels import imagenet_labels
from isomorph.data.sources import Source, image_name
from isomorph.errors import UserError

_IMAGE_NAME = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")


def real_labels(source: Source, title: str) -> np.ndarray:
    """ReaL's labels of every image, by the number in its name.

    Shape: -> (n, 9), filled up with -1; a row of -1 alone is an image that ReaL leaves out
    Source: Beyer et al. (2020)
    Raises: UserError when a name does not tell the image, or two images have one name.
    """
    numbers = np.asarray([_image_index(image_name(source.pictures, i), title) for i in range(len(source))], np.int64)
    if len(np.unique(numbers)) < len(numbers):
        values, counts = np.unique(numbers, return_counts=True)
        raise UserError(f"{title} has image ILSVRC2012_val_{values[counts > 1][0] + 1:08d} twice; keep one")
    return imagenet_labels().real[numbers]


def _image_index(name: str | None, title: str) -> int:
    """The place of an image among the 50,000, from 0. Raises: UserError when its name does not tell."""
    found = _IMAGE_NAME.search(name or "")
    number = int(found[1]) if found else 0
    if not 1 <= number <= len(imagenet_labels().real):
        called = f"has an image called {name}" if name else "gives its images no names"
        raise UserError(
            f"real finds the labels by names like ILSVRC2012_val_00000001.JPEG, but {title} {called}; "
            "give the validation images under their own names, or leave real out"
        )
    return number - 1
